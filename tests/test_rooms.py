"""The rooms of the house: which part of the package may import which."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "dapo"
VOCABULARY = {"types", "config", "errors"}

# A room may use the vocabulary, itself, and what is named here.
MAY_USE = {
    "types": set(),
    "config": set(),
    "errors": set(),
    "algorithm": set(),
    "data": {"model"},
    "rewards": {"model"},
    "store": set(),
    "model": set(),
    "engine": {"model"},
    "policy": {"algorithm", "model"},
    "view": {"store"},
}


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[1] for name in names if name.startswith("dapo.")}
    return found


@pytest.mark.parametrize("room", MAY_USE)
def test_a_room_imports_only_what_it_may(room):
    files = [PACKAGE / f"{room}.py"] if room in VOCABULARY else sorted((PACKAGE / room).rglob("*.py"))
    assert files
    for path in files:
        allowed = MAY_USE[room] | {room} | (VOCABULARY if room not in ("types", "errors") else set())
        assert imported_rooms(path) <= allowed, path
