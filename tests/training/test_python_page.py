"""Test that the code of docs/reference/python.md runs from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tests import runs

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "python.md"


def test_the_code_of_the_page_about_python_runs_from_top_to_bottom(tmp_path, monkeypatch, tiny_model, capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    code = "\n".join(blocks)
    recipe = runs.recipe(tmp_path)
    assert "recipes/guess_five.yaml" in code
    assert yaml.safe_load(recipe.read_text())["model"]
    code = code.replace("recipes/guess_five.yaml", str(recipe)).replace("Qwen/Qwen2.5-0.5B-Instruct", str(tiny_model))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    steps = {name: names[name].result.steps for name in ("trainer", "recipe", "watched", "looped", "longer")}
    assert steps == {"trainer": 3, "recipe": 2, "watched": 2, "looped": 3, "longer": 4}
    assert "small: " in capsys.readouterr().out
    assert names["watch"].verdicts
