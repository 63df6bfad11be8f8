"""Reads what a user of verl or TRL has: a launch script, a YAML or JSON file, or a Python file with a GRPOConfig."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.config.loading import MAX_FILE_BYTES, parse_value, read_text
from dapo.config.migration.python import PythonFile
from dapo.config.migration.shell import UNKNOWN, read_script
from dapo.config.migration.table import find, leaves_of
from dapo.config.schema import option_names
from dapo.errors import ConfigError

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_MAX_REFERENCES = 20  # of references to references


@dataclass(frozen=True, slots=True)
class Settings:
    """The options that a file sets, by the other system's names."""

    system: str  # verl or trl
    given: Mapping[str, Any]  # text with UNKNOWN in it is a value that could not be read
    notes: list[str]


def read_settings(path: Path, environment: Mapping[str, str]) -> Settings:
    """Read a file of verl or TRL."""
    kind = path.suffix.lower()
    if kind in (".yaml", ".yml", ".json"):
        return _from_tree(read_text(path, "YAML"), str(path))
    text = read_text(path, "Python" if kind == ".py" else "shell script")
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: longer than {MAX_FILE_BYTES:,} characters")
    if kind == ".py":
        return _from_python(text, str(path))
    script = read_script(text, str(path), environment)
    return Settings("verl", {name: _value(value) for name, value in script.options.items()}, script.notes)


def _value(text: str) -> Any:
    """Read a value as Hydra does: a number, true, null, a list or a mapping; anything else is text."""
    if UNKNOWN in text:
        return text
    try:
        return parse_value(text)
    except ValueError:
        return text


def _from_tree(text: str, source: str) -> Settings:
    try:
        tree = parse_value(text)
    except ValueError as error:
        raise ConfigError(f"{source}: not valid YAML ({error})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: expected options of verl or TRL, found {type(tree).__name__}")
    notes = []
    if "defaults" in tree:
        notes.append("the files that `defaults` names are not read; convert the resolved configuration to include them")
    if "env" in tree:
        notes.append("`env` sets environment variables: export them before `dapo train`")
    leaves = dict(leaves_of({key: value for key, value in tree.items() if key not in ("defaults", "env")}))
    given = {
        name: _resolve(value, leaves)
        for name, value in leaves.items()
        if not name.rpartition(".")[2].startswith("_") and value != "???"  # _target_; a value that Hydra requires
    }
    known = {system: sum(find(system, name) is not None for name in given) for system in ("verl", "trl")}
    if set(given) <= set(option_names()):
        raise ConfigError(f"{source}: these are options of dapo already; `dapo train {source}` uses them")
    if not any(known.values()):
        raise ConfigError(
            f"{source}: found no option of verl or TRL; expected names such as actor_rollout_ref.rollout.n or "
            "num_generations"
        )
    return Settings(max(known, key=lambda system: known[system]), given, notes)


def _resolve(value: Any, leaves: Mapping[str, Any]) -> Any:
    """Put in the values that ${name} and ${oc.select:name,default} refer to."""
    for _ in range(_MAX_REFERENCES):
        found = _REFERENCE.search(value) if isinstance(value, str) else None
        if found is None:
            return value
        name, _, default = found[1].removeprefix("oc.select:").partition(",")
        is_plain = re.fullmatch(r"[\w.]+", name) and not name.startswith(".")
        known = leaves.get(name, _value(default) if default else UNKNOWN) if is_plain else UNKNOWN
        value = known if found[0] == value else value.replace(found[0], str(known))
    return UNKNOWN


def _from_python(text: str, source: str) -> Settings:
    """Return the arguments of GRPOConfig and GRPOTrainer that are written out; nothing is run."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"{source}: not valid Python{line}") from None
    try:
        given, notes = PythonFile(tree, source).arguments()
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None
    if not given:
        raise ConfigError(f"{source}: found no call of GRPOConfig with named arguments")
    return Settings("trl", given, notes)
