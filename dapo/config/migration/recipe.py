"""Turns the options of verl or TRL into a recipe, with a list of what differs and of what has no counterpart."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import ValidationError

from dapo.config.loading import Dumper
from dapo.config.migration import trl, verl
from dapo.config.migration.conversions import SKIP, Conversion, NoCounterpart
from dapo.config.migration.shell import UNKNOWN
from dapo.config.migration.sources import Settings
from dapo.config.migration.table import NOT_SET, SYSTEMS, Row, find, rows
from dapo.config.schema import Config, leaves
from dapo.config.training_options import CLIP_BOUNDS
from dapo.errors import ConfigError

_CONVERSIONS: Mapping[str, Mapping[str, Conversion]] = {"verl": verl.CONVERSIONS, "trl": trl.CONVERSIONS}
_ALWAYS = {"verl": verl.ALWAYS, "trl": trl.ALWAYS}
_WITH_LOSS = [f"algorithm.{name}" for name in CLIP_BOUNDS]  # their defaults depend on algorithm.loss
_WIDTH = 118
_MAX_SHOWN = 200  # characters of a value in a comment
_MAX_UNKNOWN = 40  # names that are listed; a resolved configuration of verl has hundreds


@dataclass
class Recipe:
    """A recipe in the making."""

    settings: Settings
    options: dict[str, Any] = field(default_factory=dict)  # by our names
    comments: dict[str, str] = field(default_factory=dict)  # option -> what stands behind its value
    missing: dict[str, str] = field(default_factory=dict)  # their name=value -> why it has no counterpart
    differing: dict[str, str] = field(default_factory=dict)  # their name -> what differs
    unneeded: list[str] = field(default_factory=list)  # their names
    unknown: list[str] = field(default_factory=list)  # names that are not in the table

    def problem(self) -> str | None:
        """Return what keeps the recipe from loading; None if nothing does."""
        try:
            Config.parse(_nested(self.options), "recipe")
        except ConfigError as error:
            return str(error).removeprefix("recipe: ")
        return None

    def text(self, source: str) -> str:
        """Return the recipe as YAML with comments."""
        head = [f"Converted from {source} ({SYSTEMS[self.settings.system]}) by `dapo convert`."]
        if problem := self.problem():
            head.append(f"It does not load yet: {problem}.")
        return "".join([*_comment(head), *self._yaml(), *(_comment(["", *self.report()]))])

    def _yaml(self) -> Iterator[str]:
        opened: tuple[str, ...] = ()
        for option, _ in leaves():
            if option in self.options:
                *path, leaf = option.split(".")
                for depth, section in enumerate(path):
                    if opened[: depth + 1] != tuple(path[: depth + 1]):
                        yield f"{'  ' * depth}{section}:\n"
                opened = tuple(path)
                comment = f" # {self.comments[option]}" if option in self.comments else ""
                yield f"{'  ' * len(path)}{leaf}: {_flow(self.options[option])}{comment}\n"

    def report(self) -> list[str]:
        """Return the lines that say what to look at: doubts, missing counterparts, differences, ignored names."""
        system = _title(self.settings.system)
        unknown = self.unknown[:_MAX_UNKNOWN] + ["..."] * (len(self.unknown) > _MAX_UNKNOWN)
        parts = [
            ("To check", [*self.settings.notes, *self._doubts()]),
            ("No counterpart, so the run differs here", [f"{name}: {why}" for name, why in self.missing.items()]),
            ("What differs", [f"{name}: {note}" for name, note in self.differing.items()]),
            ("Not needed", [", ".join(self.unneeded)] * bool(self.unneeded)),
            (f"Not in our list of {system}'s options, and left out", [", ".join(unknown)] * bool(unknown)),
        ]
        return [line for title, items in parts if items for line in [f"{title}:", *(f"- {item}" for item in items)]]

    def _doubts(self) -> Iterator[str]:
        if "reward.use" not in self.options:
            chooser = "by data_source" if self.settings.system == "verl" else "in Python"
            yield f"reward.use is not set, so the judge is `math`; {_title(self.settings.system)} chooses it {chooser}"


def convert(settings: Settings) -> Recipe:
    """Convert all options that were given, and those left out whose default is not ours."""
    recipe = Recipe(settings)
    for option, (value, reason) in _ALWAYS[settings.system].items():
        recipe.options[option], recipe.comments[option] = value, reason
    given = _by_first_name(recipe)
    defaults = {row.name: row.default for row in rows(settings.system) if row.default is not NOT_SET}
    theirs = {name: value for name, value in (defaults | given).items() if not _is_unknown(value)}
    for name, value in defaults.items():
        if name not in given:
            _convert_one(recipe, name, value, theirs, is_given=False)
    for name, value in given.items():
        _convert_one(recipe, name, value, theirs, is_given=True)
    if (
        "run.epochs" in recipe.options
        and (schedule := recipe.options.pop("optim.lr_schedule", "constant")) != "constant"
    ):
        # How many steps an epoch has is known only afterwards, because groups are dropped.
        recipe.missing[f"a {schedule} learning rate over epochs"] = (
            f"set run.steps instead of run.epochs, and optim.lr_schedule={schedule}; until then the rate is constant"
        )
    return recipe


def _by_first_name(recipe: Recipe) -> dict[str, Any]:
    """Return the given values by the first of their names in the table; keys of a mapping are put together again."""
    found: dict[str, Any] = {}
    ranks: dict[str, int] = {}
    for name, value in recipe.settings.given.items():
        row = find(recipe.settings.system, name)
        if row is None:
            recipe.unknown.append(name)
        elif name in row.names:  # of several spellings, the first that is not null counts
            rank = row.names.index(name)
            if row.name not in ranks or (value is not None and (found[row.name] is None or rank < ranks[row.name])):
                found[row.name], ranks[row.name] = value, rank
        elif row.name.endswith(".*"):
            found[name] = value
        elif isinstance(mapping := found.setdefault(row.name, {}), dict):
            mapping[name.removeprefix(f"{row.name}.")] = value
    return found


def _convert_one(recipe: Recipe, name: str, value: Any, theirs: Mapping[str, Any], is_given: bool) -> None:
    row = find(recipe.settings.system, name)
    assert row is not None
    if row.conversion == "free":
        if is_given:
            recipe.unneeded.append(name)
        return
    try:
        converted = _converted(recipe.settings.system, row, value, theirs)
    except NoCounterpart as error:
        origin = "" if is_given else " (the default)"
        recipe.missing[f"{name}={_shown(value)}{origin}"] = str(error) or row.note
        return
    if converted is not SKIP and row.ours is not None:
        is_ours = converted == _default(row.ours) and row.ours not in recipe.options and row.ours not in _WITH_LOSS
        if is_given or not is_ours:
            recipe.options[row.ours] = converted
            recipe.comments.pop(row.ours, None)
            if not is_given:
                recipe.comments[row.ours] = f"{_title(recipe.settings.system)}'s default"
    is_other = converted is not SKIP and row.ours is not None and converted != _default(row.ours)
    if is_given and row.is_told and (is_other or row.conversion == "skip"):
        recipe.differing[name] = row.note


def _converted(system: str, row: Row, value: Any, theirs: Mapping[str, Any]) -> Any:
    """Return the value for our option, or SKIP; raise NoCounterpart if there is none."""
    if _is_unknown(value):
        if row.conversion in ("skip", "run_name"):
            return SKIP
        raise NoCounterpart(f"the value could not be read; {f'set {row.ours}' if row.ours else row.plain_note}")
    if row.conversion.startswith("off "):
        if any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in row.off_values):
            return SKIP
        raise NoCounterpart
    try:
        converted = _CONVERSIONS[system][row.conversion](value, theirs)
    except KeyError as error:
        raise NoCounterpart(f"it depends on {error.args[0]}, which could not be read; set {row.ours}") from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError):
        raise NoCounterpart(f"the value could not be understood; set {row.ours}") from None
    if converted is not SKIP and row.ours is not None and (fault := _fault(row.ours, converted)):
        raise NoCounterpart(f"{row.ours}: {fault}")
    return converted


def _fault(option: str, value: Any) -> str | None:
    """Return why our option does not accept the value by itself; rules between options are checked later."""
    try:
        Config.model_validate(_nested({"model.path": "m", "data.train": "d", option: value}))
    except ValidationError as error:
        faults = [fault for fault in error.errors() if fault["loc"]]
        return faults[0]["msg"] if faults else None
    return None


def _title(system: str) -> str:
    return SYSTEMS[system].split()[0]


def _is_unknown(value: Any) -> bool:
    return UNKNOWN in str(value)


def _default(option: str) -> Any:
    default = next(info.default for name, info in leaves() if name == option)
    return list(default) if isinstance(default, tuple) else default


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for option, value in options.items():
        *path, leaf = option.split(".")
        section = tree
        for name in path:
            section = section.setdefault(name, {})
        section[leaf] = value
    return tree


def _flow(value: Any) -> str:
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, allow_unicode=True, width=2**30, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _shown(value: Any) -> str:
    text = " ".join(str(value).replace(UNKNOWN, "?").split())
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _comment(lines: list[str]) -> Iterator[str]:
    for line in lines:
        plain = "".join(char if char.isprintable() else " " for char in line)
        indent = "  " if plain.startswith("- ") else ""
        for part in textwrap.wrap(plain, _WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]:
            yield f"# {part}".rstrip() + "\n"
