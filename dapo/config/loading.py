"""Reading YAML and dotted overrides, and explaining each mistake in them in one sentence."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from types import NoneType
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dapo.config.migration.table import explain_last_part, explain_unknown, find, leaves_of
from dapo.errors import ConfigError, one_line

# Limits of a recipe. PyYAML needs eight seconds for a megabyte, and an alias can stand for any number of values.
MAX_FILE_BYTES = 2**18
_MAX_YAML_VALUES = 50_000  # with all aliases expanded
_MAX_YAML_DEPTH = 32
_INDICATORS = ("*", "&", "!", "%", "@", "`")  # no plain text starts with these; a glob may
_MAX_SHOWN = 200  # characters of a wrong value that an error message quotes


class Loader(yaml.SafeLoader):
    """Reads YAML as people mean it: 1e-6 is a number, a date is text, and a key that appears twice is an error.

    It builds only values that JSON can represent, and refuses files that are too large or too deeply nested.
    """

    # No !!timestamp, !!binary, !!set, !!omap or !!pairs.
    yaml_constructors = {  # noqa: RUF012  # so declared by PyYAML
        tag: build
        for tag, build in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.endswith((":null", ":bool", ":int", ":float", ":str", ":seq", ":map"))
    }
    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _check_extent(node)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key, count in Counter(key for key in keys if isinstance(key, Hashable)).items():
            if count > 1:
                raise _refused(f"the key '{_cut(str(key))}' appears twice", node)
        return super().construct_mapping(node, deep)

    def construct_text(self, node: yaml.ScalarNode) -> str:
        try:  # JSON may escape one character as a pair of surrogates, which PyYAML does not combine
            text = self.construct_scalar(node).encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise _refused("half of a surrogate pair, which no file or database can store", node) from None
        if "\0" in text:
            raise _refused("a NUL character, which no name or path can contain", node)
        return text

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        # Check the length first: Python takes quadratic time for very long numbers, or refuses to parse them.
        if len(node.value) > 100 or not -(2**63) <= (value := self.construct_yaml_int(node)) < 2**63:
            raise _refused("an integer that does not fit into 64 bits", node)
        return value


Loader.add_constructor("tag:yaml.org,2002:str", Loader.construct_text)
Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_integer)


def _refused(problem: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _check_extent(root: yaml.Node) -> None:
    """Refuse aliases that multiply or contain themselves, and nesting that would overflow Python's stack."""
    known: dict[int, tuple[int, int]] = {}  # node id -> (number of values, levels below it)

    def measure(node: yaml.Node, depth: int) -> tuple[int, int]:
        if id(node) not in known and depth <= _MAX_YAML_DEPTH:
            members: list[yaml.Node] = []
            if isinstance(node, yaml.MappingNode):
                members = [part for pair in node.value for part in pair]
            elif isinstance(node, yaml.SequenceNode):
                members = node.value
            parts = [measure(member, depth + 1) for member in members]
            known[id(node)] = 1 + sum(size for size, _ in parts), max((1 + levels for _, levels in parts), default=0)
        size, levels = known.get(id(node), (1, 0))
        if depth + levels > _MAX_YAML_DEPTH:
            raise _refused(f"more than {_MAX_YAML_DEPTH} levels of nesting", node)
        if size > _MAX_YAML_VALUES:
            raise _refused(f"more than {_MAX_YAML_VALUES:,} values, with aliases expanded", node)
        return size, levels

    measure(root, 0)


class Dumper(yaml.SafeDumper):
    """Quotes text that Loader would read as a number."""


for _tool in (Loader, Dumper):
    _tool.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


def read_yaml(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Read a recipe; name `dapo convert` if the file is verl's or TRL's. `names` are all options."""
    advice = f"not a recipe; `dapo convert {path}` makes a recipe of"
    if path.suffix in (".sh", ".bash", ".py") and path.is_file():
        raise ConfigError(f"{path}: {advice} a launch script of verl, or of a Python file with TRL's GRPOConfig")
    values = parse_yaml(read_text(path, "YAML"), str(path))
    given = [name for name, _ in leaves_of(values)]
    foreign = [find("verl", name) or find("trl", name) for name in given if name not in names]
    systems = [row.owner for row in foreign if row is not None]
    is_ours = any(name in names and find("verl", name) is None for name in given)
    if systems and not is_ours:
        raise ConfigError(f"{path}: {advice} this configuration of {max(systems, key=systems.count)}")
    return values


def read_text(path: Path, form: str) -> str:
    """Read a text file, at most one character more than may be parsed; `form` is what it should contain."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        is_run = (path / "config.yaml").is_file()
        hint = f"; to continue the run in it: dapo resume {path}" if is_run else ""
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error}){hint}") from None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not valid {form} (it is not a text file in UTF-8)") from None


def parse_yaml(text: str, source: str, expected: str = "sections such as `model:` and `data:`") -> dict[str, Any]:
    """Parse the YAML text of a configuration into nested values. `expected` is what a message says it should hold."""
    try:
        values = parse_value(text)
    except ValueError as error:
        raise ConfigError(f"{source}: not valid YAML ({error})") from None
    if not isinstance(values, dict):
        found = "nothing" if values is None else f"a {type(values).__name__}"
        raise ConfigError(f"{source}: expected {expected}, found {found}")
    return {name: {} if section is None else section for name, section in values.items()}  # `model:` alone is null


def parse_value(text: str) -> Any:
    """Parse with a SafeLoader, which builds no Python objects; raise ValueError for every fault in the text."""
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"longer than {MAX_FILE_BYTES:,} characters")
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(_yaml_fault(error)) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except Exception as error:  # PyYAML raises all kinds of errors: `!!bool maybe` is a KeyError
        raise ValueError(f"{type(error).__name__}: {error}") from None


def apply_override(values: dict[str, Any], override: str, names: Sequence[str]) -> None:
    """Set one option, given as section.key=value. `names` are all options, for suggestions."""
    shown = _cut(override)
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override '{shown}': expected section.key=value, for example optim.lr=1e-5")
    try:
        value = parse_value(text)
    except ValueError as error:
        hint = "; in quotes it is text: " + _cut(f"'{key}=\"{text}\"'") if text.startswith(_INDICATORS) else ""
        raise ConfigError(f"override '{shown}': the value is not valid YAML ({error}){hint}") from None
    _set_option(values, key, value, f"override '{shown}'", names)


def merge_options(values: dict[str, Any], options: Mapping[str, Any], names: Sequence[str], prefix: str = "") -> None:
    """Set the options that a Python program gives: nested sections, dotted names, or both. `names` are all options."""
    for key, given in options.items():
        if not isinstance(key, str):
            raise ConfigError(f"config: {_shown(key)} is not the name of an option or a section")
        name = f"{prefix}{key}"
        value = given.model_dump(exclude_unset=True) if isinstance(given, BaseModel) else given
        if isinstance(value, Mapping) and name not in names:  # some options are mappings themselves
            _section(values, name.split("."), name, "config", names)
            merge_options(values, value, names, f"{name}.")
        else:
            _set_option(values, name, _to_yaml_value(value), "config", names)


def _to_yaml_value(value: Any) -> Any:
    """Convert what Python programs use in place of text, numbers, lists and mappings."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        return {key: _to_yaml_value(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_to_yaml_value(member) for member in value]
    if isinstance(value, PathLike):
        return fspath(value)
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _set_option(values: dict[str, Any], key: str, value: Any, where: str, names: Sequence[str]) -> None:
    *sections, leaf = key.split(".")
    _section(values, sections, key, where, names)[leaf] = value


def _section(values: dict[str, Any], path: Sequence[str], key: str, where: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the section at `path`, made if it is missing. `key` is the option it is for."""
    if len(path) > _MAX_YAML_DEPTH:
        raise ConfigError(f"{where}: more than {_MAX_YAML_DEPTH} levels of nesting")
    for name in path:
        child = values.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{where}: '{_cut(name)}' is a value, not a section{_suggest(key, names)}")
        values = child
    return values


def explain(error: ValidationError, source: str, names: Sequence[str]) -> str:
    """Return one sentence per wrong value. `names` are all options, for suggestions."""
    sentences = []
    for fault in error.errors():
        is_unknown = fault["type"] == "extra_forbidden"
        # pydantic adds the members of a union to the location; they are not names of options.
        parts = [part for part in fault["loc"] if isinstance(part, str) and part.isidentifier()]
        if is_unknown and str(fault["loc"][-1]) not in parts[-1:]:
            parts.append(str(fault["loc"][-1]))
        key = ".".join(part for part in parts if part not in ("str", "dict"))
        if is_unknown:
            theirs = explain_unknown(key, fault["input"]) if len(key) <= _MAX_SHOWN else None
            sentences.append(theirs or f"unknown key '{_cut(key)}'{_suggest(key, names)}")
        elif isinstance(fault["input"], str) and (row := find("trl", key)):  # TRL's `optim: adamw_torch`
            sentences.append(f"'{key}' is {_shown(fault['input'])}: {row.plain_note}")
        elif fault["type"] == "missing" and not isinstance(fault["loc"][-1], int):
            sentences.append(f"'{key}' is missing")
        elif not key or (fault["type"] == "value_error" and isinstance(fault["input"], dict) and "." not in key):
            # A rule between options, whose sentence names them.
            sentences.append(fault["msg"].removeprefix("Value error, "))
        else:
            reason = fault["msg"].removeprefix("Value error, ")
            expected = reason[0].lower() + reason[1:]
            # reward.use may be a URL with a secret, so it is not quoted.
            found = "" if key == "reward.use" else f" is {_shown(fault['input'])}"
            sentences.append(f"'{key}'{found}: {expected}{_quoting(key, fault)}")
    return f"{source}: " + "; ".join(dict.fromkeys(sentences))


# Names of options in earlier versions.
_EARLIER_NAMES = {"reward.function": "reward.use"}


def _quoting(key: str, fault: ErrorDetails) -> str:
    """Return a hint about quotes if text was expected and YAML read something else."""
    if fault["type"] != "string_type" or isinstance(fault["input"], (dict, list, NoneType)):
        return ""
    return (
        "; YAML reads on, off, yes, no and true as booleans and digits as numbers, unless they are quoted: "
        f"{key}='\"...\"' on the command line"
    )


def _shown(value: Any) -> str:
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _suggest(key: str, names: Sequence[str]) -> str:
    if len(key) > _MAX_SHOWN:
        return ""
    if key in _EARLIER_NAMES:
        return f"; in dapo it is '{_EARLIER_NAMES[key]}'"
    sections = sorted({name.rsplit(".", 1)[0] for name in names})
    # The likeliest mistakes are a missing word and the wrong section, then verl's or TRL's name, then a misspelling.
    section, _, leaf = key.rpartition(".")
    longer = [name for name in names if name.startswith(f"{section}.") and name.endswith(f"_{leaf}")]
    same_leaf = [name for name in names if name.rsplit(".", 1)[-1] == leaf]
    close = longer or same_leaf[:1]
    if not close and (theirs := explain_last_part(key)):
        return theirs
    close = close or difflib.get_close_matches(key, [*names, *sections], n=1, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _yaml_fault(error: Exception) -> str:
    """Return what is wrong and where, without the part of the file that PyYAML quotes: it may contain a secret."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return one_line(error)
