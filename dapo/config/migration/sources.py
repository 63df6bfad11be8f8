"""Reads what a user of verl or TRL has: a launch script, a YAML or JSON file, or a Python file with a GRPOConfig."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.config.loading import MAX_FILE_BYTES, parse_value, read_text
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
    names = {
        node.targets[0].id: value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
        for value in [_literal(node.value, {})]
        if value is not UNKNOWN
    }
    given: dict[str, Any] = {}
    for function, keyword in _keywords(tree):
        value = _literal(keyword.value, names)
        if function == "GRPOConfig":
            given[str(keyword.arg)] = value
        elif keyword.arg == "model" and value is not UNKNOWN:
            given["model_name_or_path"] = value
        elif keyword.arg == "reward_funcs":
            functions = keyword.value.elts if isinstance(keyword.value, ast.List) else [keyword.value]
            given["reward_funcs"] = [_reward(each, source) for each in functions]
    if not given:
        raise ConfigError(f"{source}: found no call of GRPOConfig with named arguments")
    notes = [
        "the dataset is loaded in Python: write its rows to a file, or use dapo's Trainer, which takes them as they are"
    ]
    return Settings("trl", given, notes)


def _keywords(tree: ast.AST) -> Iterator[tuple[str, ast.keyword]]:
    """Yield the named arguments of the calls of GRPOConfig and GRPOTrainer."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("GRPOConfig", "GRPOTrainer"):
                yield from ((function, keyword) for keyword in node.keywords if keyword.arg is not None)


def _literal(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return names.get(node.id, UNKNOWN)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return UNKNOWN


def _reward(node: ast.expr, source: str) -> Any:
    """Return the import path of a reward function that is defined in the same file, as `trl grpo` would write it."""
    if isinstance(node, ast.Name):
        return f"{Path(source).with_suffix('').as_posix().replace('/', '.')}.{node.id}"
    return _literal(node, {})
