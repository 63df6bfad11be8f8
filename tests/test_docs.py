"""What the documentation points to exists, and the README's example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import runs

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_linked_and_every_test_named_exists(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    for name in re.findall(r"\b(test_[a-z0-9_]{12,})\b(?!\.py)", text):
        assert f"def {name}(" in tests, name
    for name in re.findall(r"(?:dapo|tests|recipes|docs)/[\w/]+\.(?:py|yaml|md)", text):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize(
    "name", re.findall(r"`dapo/([\w/]+\.py)` `([\w.]+)`", (ROOT / "docs/algorithm.md").read_text())
)
def test_every_function_named_beside_a_formula_exists(name):
    file, function = name
    source = (ROOT / "dapo" / file).read_text(encoding="utf-8")
    for part in function.split("."):
        assert re.search(rf"(def|class) {part}\b", source), f"{file}: {part}"


def test_the_python_example_of_the_readme_trains(tmp_path, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    recipe = runs.recipe(tmp_path, run={"steps": 1})
    assert '"recipes/guess_five.yaml"' in example
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(example.replace("recipes/guess_five.yaml", str(recipe)), names)
    assert names["result"].steps == 1
