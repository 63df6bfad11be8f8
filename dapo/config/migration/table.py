"""The tables of verl's and TRL's options, and the error message for a recipe that uses one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

SYSTEMS = {"verl": "verl 0.9.1", "trl": "TRL 1.16.0"}
NOT_SET = object()  # the default of an option that a recipe need not repeat
_FEW = 3  # names explained in one error message


@dataclass(frozen=True, slots=True)
class Row:
    """One option of another system."""

    system: str
    names: tuple[str, ...]  # the name, and other spellings; one that ends with .* stands for everything below it
    default: Any  # the value if the option is left out; NOT_SET if a recipe need not repeat it
    ours: str | None
    conversion: str  # explained at the top of verl.txt
    note: str  # one sentence: what differs
    is_told: bool  # a converted recipe says what differs, if the value is not our default
    is_always_told: bool  # or even if it is

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def owner(self) -> str:
        """The system without its version."""
        return self.system.split()[0]

    @property
    def off_values(self) -> list[Any]:
        """The values for which nothing has to be written, if the conversion is `off`."""
        return [_scalar(text) for text in self.conversion.removeprefix("off ").split(", ")]

    def answer(self) -> str:
        """Return the error message for a recipe that uses this name: our option, and what differs."""
        place = f"in dapo it is '{self.ours}'" if self.ours else "dapo has no such option"
        return f"{place}: {self.plain_note}"

    @property
    def plain_note(self) -> str:
        """The note as a part of a sentence."""
        first, _, rest = self.note.rstrip(".").partition(" ")
        return f"{first.lower() if first[1:].islower() or len(first) == 1 else first} {rest}".rstrip()


@cache
def rows(system: str) -> tuple[Row, ...]:
    """Read the table of `verl` or `trl`."""
    text = (Path(__file__).parent / f"{system}.txt").read_text(encoding="utf-8")
    return tuple(_rows(text, SYSTEMS[system]))


def _rows(text: str, system: str) -> Iterator[Row]:
    for line in text.splitlines():
        if line and not line.startswith("#"):
            names, default, ours, conversion, note = line.split(" | ")
            value = NOT_SET if default == "-" else _scalar(default)
            ours = None if ours == "-" else ours
            mark, plain = note.split(" ", 1) if note.startswith("!") else ("", note)
            yield Row(
                system,
                tuple(names.split(" = ")),
                value,
                ours,
                conversion,
                plain,
                mark != "",
                is_always_told=mark == "!!",
            )


def _scalar(text: str) -> Any:
    try:
        return float(text) if "e-" in text else yaml.safe_load(text)  # YAML 1.1 reads 1e-6 as text
    except ValueError:
        return text


@cache
def _by_name(system: str) -> Mapping[str, Row]:
    return {name: row for row in rows(system) for name in row.names}


def find(system: str, name: str) -> Row | None:
    """Return the row of a name, or of the nearest section above it that stands for everything in it."""
    named = _by_name(system)
    parts = name.split(".")
    sections = (".".join(parts[:length]) + ".*" for length in range(len(parts), 0, -1))
    return next((named[each] for each in (name, *sections) if each in named), None)


def _find_by_ending(name: str) -> Row | None:
    """Return the row of a shortened name of verl, such as rollout.gpu_memory_utilization, if only one is meant."""
    found = [row for full, row in _by_name("verl").items() if full.endswith(f".{name}")]
    return found[0] if len({row.ours for row in found}) == 1 else None


def explain_unknown(key: str, value: Any) -> str | None:
    """Explain an unknown key that is an option of verl or TRL, or a section of such options; None if it is neither."""
    key = key.lstrip("+~")  # Hydra's marks for added and deleted keys
    names = [name for name, _ in leaves_of({key: value})]
    found = [(name, row) for name in names if (row := _find_any(name))]
    told = [f"unknown key '{name}' of {row.owner}; {row.answer()}" for name, row in found[:_FEW]]
    if not told and key.split(".")[0] in _sections_of_verl():
        page = "docs/how-to/from-verl.md"
        return f"unknown key '{names[0]}' of verl; {page} lists the options that have a counterpart in dapo"
    left = len(names) - len(told)
    if told and left:
        told.append(f"{left} more such keys; `dapo convert FILE` converts a whole file")
    return "; ".join(told) or None


def explain_last_part(key: str) -> str:
    """Explain a key of which only the last part is an option of verl or TRL; the end of a sentence, or nothing."""
    leaf = key.rpartition(".")[2]
    row = find("trl", leaf) or _find_by_ending(leaf)
    if row is None:
        return ""
    return (f" of {row.owner}" if leaf == key else f" ('{leaf}' of {row.owner})") + f"; {row.answer()}"


def _find_any(name: str) -> Row | None:
    return find("trl", name) or find("verl", name) or (_find_by_ending(name) if "." in name else None)


@cache
def _sections_of_verl() -> frozenset[str]:
    """Return the names of verl's sections that are not ours, too."""
    ours = {row.ours.split(".")[0] for row in rows("verl") if row.ours}
    return frozenset(name.split(".")[0] for name in _by_name("verl")) - ours


def leaves_of(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings with their dotted names; an empty mapping is a value."""
    for key, value in values.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict) and value:
            yield from leaves_of(value, name)
        else:
            yield name, value
