"""The floor plan: which room may import which, checked for every import of every module, also inside functions."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "dapo"
VOCABULARY = {"types", "errors"}

# Every room may use the vocabulary, itself, and what is named here. Nothing here leads in a circle.
MAY_USE: dict[str, set[str]] = {
    "types": set(),
    "errors": set(),
    "config": set(),
    "algorithm": set(),
    "kernels": {"system"},
    "system": set(),
    "model": {"config", "kernels", "system"},
    "data": {"config", "environments", "model", "system"},
    "rewards": {"config", "model", "system"},
    "environments": {"config", "rewards"},
    "store": {"config", "system"},
    "terminal": {"config", "store"},
    "checkpoint": {"config", "model", "store", "system", "terminal"},
    "engine": {"config", "kernels", "model", "system"},
    "policy": {"algorithm", "checkpoint", "config", "kernels", "model", "system"},
    "sampling": {"algorithm", "checkpoint", "config", "data", "engine", "environments", "model", "rewards", "system"},
    "cluster": {"config", "engine", "model", "policy", "rewards", "system"},
    "evaluation": {
        "algorithm", "checkpoint", "cluster", "config", "data", "engine", "environments", "model", "rewards",
        "sampling", "store", "system", "terminal",
    },
    "plan": {"config", "engine", "model", "system"},
    "view": {"algorithm", "store", "system"},
    "training": {
        "checkpoint", "cluster", "config", "data", "engine", "environments", "evaluation", "model", "policy",
        "rewards", "sampling", "store", "system", "terminal",
    },
    "ablation": {
        "algorithm", "checkpoint", "cluster", "config", "evaluation", "model", "store", "system", "terminal",
        "training", "view",
    },
    "commands": {
        "ablation", "checkpoint", "cluster", "config", "data", "engine", "environments", "evaluation", "model", "plan",
        "policy", "profile", "rewards", "sampling", "store", "system", "terminal", "training", "view",
    },
}  # fmt: skip
ROOT_FILES = {"__init__", "__main__", "types", "errors", "cli", "doctor", "profile"}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """The rooms that a file imports from, wherever in the file, also as `from dapo import room` and relatively."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides its room"
            module = node.module or ""
            names = [f"dapo.{alias.name}" for alias in node.names] if module == "dapo" else [module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("dapo.")}
    return found - {"__version__"}  # a constant of the package itself


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem in VOCABULARY)


def test_the_root_holds_only_the_vocabulary_and_the_commands():
    assert {path.stem for path in PACKAGE.glob("*.py")} == ROOT_FILES
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == MAY_USE.keys() - VOCABULARY


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_its_room_may(path):
    room = room_of(path)
    allowed = MAY_USE[room] | {room} | (VOCABULARY if room not in VOCABULARY else set())
    assert imported_rooms(path) <= allowed


def test_the_rooms_have_an_order_without_circles():
    order = list(TopologicalSorter(MAY_USE).static_order())
    assert order.index("config") < order.index("model") < order.index("policy") < order.index("training")


def test_every_permission_is_used():
    used: dict[str, set[str]] = {room: set() for room in MAY_USE}
    for path in FILES:
        used[room_of(path)] |= imported_rooms(path) - {room_of(path)} - VOCABULARY
    assert used == {room: rooms - VOCABULARY for room, rooms in MAY_USE.items()}


def test_what_learns_samples_judges_and_records_do_not_know_each_other():
    apart = {"engine", "rewards", "policy", "store"}
    for room in apart:
        assert not MAY_USE[room] & (apart - {room})
