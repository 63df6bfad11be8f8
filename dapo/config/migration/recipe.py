"""Turns the options of verl or TRL into a recipe, with a list of what differs and of what has no counterpart."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import ValidationError

from dapo.config.loading import Dumper, merge_options
from dapo.config.migration import trl, verl
from dapo.config.migration.conversions import SKIP, Conversion, NoCounterpart, Theirs, Written
from dapo.config.migration.shell import UNKNOWN
from dapo.config.migration.sources import Settings
from dapo.config.migration.table import NOT_SET, SYSTEMS, Row, find, rows
from dapo.config.schema import Config, leaves, option_names
from dapo.config.training_options import LOSS_SETTINGS
from dapo.errors import ConfigError

_CONVERSIONS: Mapping[str, Mapping[str, Conversion]] = {"verl": verl.CONVERSIONS, "trl": trl.CONVERSIONS}
_ALWAYS = {"verl": verl.ALWAYS, "trl": trl.ALWAYS}
_LOSSES = ("actor_rollout_ref.actor.policy_loss.loss_mode", "loss_type", "importance_sampling_level")
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
    written: dict[str, str] = field(default_factory=dict)  # their name -> our option that has its value, or part of it
    spelled: dict[str, str] = field(default_factory=dict)  # first name in the table -> the name that was given
    failed: dict[str, str | None] = field(default_factory=dict)  # their name that has no counterpart -> our option

    def problem(self) -> str | None:
        """Return what keeps the recipe from loading; None if nothing does."""
        try:
            Config.parse(_nested(self.options), "recipe")
        except ConfigError as error:
            return str(error).removeprefix("recipe: ")
        return None

    def name(self, first: str) -> str:
        """Return the name that was given for an option, of its several spellings."""
        return self.spelled.get(first, first)

    def default(self, option: str) -> Any:
        """Return our default, given the loss that the recipe has."""
        section, _, leaf = option.rpartition(".")
        settings = LOSS_SETTINGS.get(self.options.get("algorithm.loss", "dapo"), {})
        return settings[leaf] if section == "algorithm" and leaf in settings else _default(option)

    def replace(self, option: str, name: str, value: Any) -> None:
        """Write a given value; another given option that set something else is listed."""
        name = self.name(name)
        for other in [other for other, ours in self.written.items() if ours == option and other != name]:
            if self.options[option] != value:
                del self.written[other]
                self.differing.pop(other, None)
                self.missing[f"{other}={_shown(self.settings.given.get(other))}"] = f"{name} counts for {option}"
        self.options[option] = value
        self.comments.pop(option, None)
        self.written[name] = option

    def add_missing(self, name: str, value: Any, why: str, is_given: bool) -> None:
        origin = "" if is_given else " (the default)"
        self.missing[f"{self.name(name)}={_shown(value)}{origin}"] = why

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
        unknown = self.unknown[:_MAX_UNKNOWN]
        if len(self.unknown) > _MAX_UNKNOWN:
            unknown.append(f"and {len(self.unknown) - _MAX_UNKNOWN} more")
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
        if "run.epochs" in self.options:
            yield (
                f"run.epochs counts passes over the distinct questions, {_title(self.settings.system)} counts rows "
                "(DAPO-Math-17k has 1.79 million rows for 17,398 questions); set run.steps for the same length"
            )


def convert(settings: Settings) -> Recipe:
    """Convert all options that were given, and those left out whose default is not ours.

    Every given option ends in the recipe, or in one of the lists of the report.
    """
    recipe = Recipe(settings)
    for option, (value, reason) in _ALWAYS[settings.system].items():
        recipe.options[option], recipe.comments[option] = value, reason
    given = _by_first_name(recipe)
    defaults = _defaults(settings.system)
    values = defaults | given
    theirs = Theirs(values, {name for name, value in given.items() if _is_unknown(value)})
    skipped: dict[str, set[str]] = {}  # given, but not written by its own row -> the names that decided so
    used: set[str] = set()  # names that decided about a value that was written
    # The loss comes first, because it sets our other defaults; given values come last, and replace defaults.
    for name in sorted(values, key=lambda name: (name not in _LOSSES, name in given)):
        theirs.read.clear()
        is_done = _convert_one(recipe, name, values[name], theirs, is_given=name in given)
        if is_done:
            used |= theirs.read
        elif name in given and name not in recipe.failed:
            skipped[name] = set(theirs.read)
    for name, deciding in skipped.items():
        if name in used and (ours := _row(recipe, name).ours):
            recipe.written[recipe.name(name)] = ours
            if _row(recipe, name).is_told and given[name] != defaults.get(name):
                recipe.differing[recipe.name(name)] = _row(recipe, name).note
        else:
            _list_skipped(recipe, name, given[name], deciding)
    _drop_schedule_over_epochs(recipe, values, given)
    return recipe


def _drop_schedule_over_epochs(recipe: Recipe, values: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Leave the schedule out if the run is given in epochs: their number of steps is known only afterwards."""
    schedule = recipe.options.get("optim.lr_schedule", "constant")
    if "run.epochs" not in recipe.options or schedule == "constant":
        return
    del recipe.options["optim.lr_schedule"]
    name = next(row.name for row in rows(recipe.settings.system) if row.conversion == "lr_schedule")
    recipe.written.pop(recipe.name(name), None)
    recipe.differing.pop(recipe.name(name), None)
    why = f"set run.steps instead of run.epochs, and optim.lr_schedule={schedule}; until then the rate is constant"
    recipe.add_missing(name, values[name], why, is_given=name in given)


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
            if row.name not in ranks:
                found[row.name], ranks[row.name], recipe.spelled[row.name] = value, rank, name
            elif value is not None and (found[row.name] is None or rank < ranks[row.name]):
                _list_other_spelling(recipe, recipe.spelled[row.name], found[row.name], name)
                found[row.name], ranks[row.name], recipe.spelled[row.name] = value, rank, name
            else:
                _list_other_spelling(recipe, name, value, recipe.spelled[row.name])
        elif row.name.endswith(".*"):
            found[name] = value
        elif isinstance(mapping := found.get(row.name) or {}, dict):
            found[row.name] = mapping | {name.removeprefix(f"{row.name}."): value}
        else:
            _list_other_spelling(recipe, name, value, row.name)
    return found


def _list_other_spelling(recipe: Recipe, name: str, value: Any, counting: str) -> None:
    if value is None:
        recipe.unneeded.append(name)
    else:
        recipe.missing[f"{name}={_shown(value)}"] = f"{counting} means the same, and counts"


def _convert_one(recipe: Recipe, name: str, value: Any, theirs: Theirs, is_given: bool) -> bool:
    """Convert one option, and return whether it is in the recipe, by itself or because it is our default."""
    row = _row(recipe, name)
    if row.conversion == "free":
        return False
    try:
        converted = _converted(recipe.settings.system, row, value, theirs)
    except NoCounterpart as error:
        recipe.add_missing(name, value, str(error) or row.note, is_given)
        recipe.failed[name] = row.ours
        return False
    if converted is SKIP or row.ours is None:
        return False
    result = converted if isinstance(converted, Written) else Written(converted)
    is_other = result.value != recipe.default(row.ours)
    for option, each in {**result.also, row.ours: result.value}.items():
        if is_given:
            recipe.replace(option, name, each)
        elif each != recipe.default(option) or option in recipe.options:
            recipe.options[option] = each
            recipe.comments[option] = _origin(recipe, row, converted, theirs.read)
    if is_given:
        told = row.is_told and (is_other or row.is_always_told)
        if note := result.note or (row.note if told else ""):
            recipe.differing[recipe.name(name)] = note
    return True


def _origin(recipe: Recipe, row: Row, converted: Any, read: set[str]) -> str:
    """Return where the value of an option that was left out comes from: a default, or options that were given."""
    system = recipe.settings.system
    try:
        is_default = _converted(system, row, row.default, Theirs(_defaults(system), ())) == converted
    except NoCounterpart:
        is_default = False
    deciding = sorted(recipe.name(name) for name in read if name in recipe.spelled)
    return f"{_title(system)}'s default" if is_default or not deciding else f"from {', '.join(deciding)}"


def _list_skipped(recipe: Recipe, name: str, value: Any, deciding: set[str]) -> None:
    """List a given option that is not in the recipe: because it failed with another one, differs, or does nothing."""
    row = _row(recipe, name)
    is_plain_skip = row.conversion == "skip"
    is_other = is_plain_skip and value != row.default
    if deciding & recipe.failed.keys() or (is_other and row.ours in recipe.failed.values()):
        recipe.add_missing(name, value, row.note, is_given=True)
    elif is_other:
        recipe.differing[recipe.name(name)] = row.note
    else:
        recipe.unneeded.append(recipe.name(name))


def _converted(system: str, row: Row, value: Any, theirs: Theirs) -> Any:
    """Return the value for our option, or SKIP; raise NoCounterpart if there is none."""
    if _is_unknown(value):
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
    plain = converted.value if isinstance(converted, Written) else converted
    if plain is not SKIP and row.ours is not None and (fault := _fault(row.ours, plain)):
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


def _row(recipe: Recipe, name: str) -> Row:
    row = find(recipe.settings.system, name)
    assert row is not None
    return row


def _defaults(system: str) -> dict[str, Any]:
    return {row.name: row.default for row in rows(system) if row.default is not NOT_SET}


def _title(system: str) -> str:
    return SYSTEMS[system].split()[0]


def _is_unknown(value: Any) -> bool:
    return UNKNOWN in str(value)


def _default(option: str) -> Any:
    default = next(info.default for name, info in leaves() if name == option)
    return list(default) if isinstance(default, tuple) else default


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    merge_options(tree, options, option_names())
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
