"""Conversions of values that verl and TRL share."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from dapo.config.training_options import RunConfig

SKIP = object()  # nothing to write

_TRACKERS: tuple[str, ...] = get_args(get_args(RunConfig.model_fields["trackers"].annotation)[0])


class Theirs(dict[str, Any]):
    """Values of the other system by name, with its defaults for what was left out; it remembers which were read."""

    def __init__(self, values: Mapping[str, Any], unreadable: Collection[str]) -> None:
        super().__init__({name: value for name, value in values.items() if name not in unreadable})
        self.unreadable = unreadable
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        if name in self.unreadable:
            raise KeyError(name)
        self.read.add(name)
        return super().get(name, default)


Conversion = Callable[[Any, Theirs], Any]


class NoCounterpart(Exception):
    """The value cannot be expressed; the message says why, if the note of the row does not."""


@dataclass(frozen=True, slots=True)
class Written:
    """A value for our option that needs more to be said or set."""

    value: Any
    note: str = ""  # what differs, besides the note of the row
    also: Mapping[str, Any] = field(default_factory=dict)  # values of other options of ours


def same(value: Any, theirs: Theirs) -> Any:
    return value


def skip(value: Any, theirs: Theirs) -> Any:
    return SKIP


def null_skips(value: Any, theirs: Theirs) -> Any:
    return SKIP if value is None else value


def choice(**choices: Any) -> Conversion:
    """Return a conversion that replaces each value by another one."""

    def convert(value: Any, theirs: Theirs) -> Any:
        key = str(value).lower().replace("-", "_")
        if key not in choices:
            raise NoCounterpart
        return choices[key]

    return convert


def run_name(value: Any, theirs: Theirs) -> Any:
    name = re.sub(r"[^\w.@+=-]+", "-", Path(str(value)).name).strip("-.")
    return name or SKIP


def trackers(value: Any, theirs: Theirs) -> Any:
    names = value if isinstance(value, list) else [value]
    known = [name for name in names if name in _TRACKERS]
    unknown = [str(name) for name in names if name not in (*_TRACKERS, "console", "none", "all", None)]
    note = f"the trackers are {', '.join(_TRACKERS)}, not {', '.join(unknown)}"
    if unknown and not known:
        raise NoCounterpart(note)
    return Written(known, note if unknown else "") if known else SKIP


def named_sets(paths: list[str]) -> Any:
    """Return evaluation sets by name: the stem of each file, with its folder where stems are equal."""
    for name_of in (lambda path: path.stem, lambda path: f"{path.parent.name}-{path.stem}"):
        sets = {name_of(Path(path)): path for path in paths}
        if len(sets) == len(paths):
            return sets
    return paths
