"""A recipe of a tiny model with held-out questions, and plans of ablations on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dapo.ablation.plan import Budget, Plan, make_plan
from tests import runs


def write_recipe(folder: Path, **sections: dict[str, Any]) -> Path:
    """Write a recipe that evaluates on eight questions after every second step, and return its path."""
    sections["eval"] = {"k": 2, "every": 2, "data": {"held_out": str(folder / "eval.jsonl")}} | sections.get("eval", {})
    path = runs.recipe(folder, **sections)
    rows = [{"prompt": f"other {'y' * i}", "answer": i} for i in range(8)]
    (folder / "eval.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def plan_of(recipe: Path, *arms: str, out: Path | None = None, **changes: Any) -> Plan:
    """Return the plan of two steps and one seed, unless `changes` say otherwise."""
    values: dict[str, Any] = {"overrides": (), "families": (), "seeds": 1, "budget": Budget("steps", 2)} | changes
    return make_plan(recipe, arms=arms, out=out or recipe.parent / "ablation", **values)
