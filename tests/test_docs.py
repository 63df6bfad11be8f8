"""Test that links of the documentation work, and that its site is complete and loads nothing from the network."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dapo.config import option_names
from tests.pages import PAGES, ROOT, anchors, name_of

SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_linked_and_every_test_named_exists(page: Path):
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", text):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or linked.suffix != ".md" or anchor in anchors(linked), f"{target}#{anchor}"
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    for name in re.findall(r"\b(test_[a-z0-9_]{12,})\b(?!\.py)", text):
        assert f"def {name}(" in tests, name
    for name in re.findall(r"(?:dapo|tests|recipes|docs)/[\w/.-]+\.(?:py|yaml|md|ipynb)", text):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize(
    "name", re.findall(r"`dapo/([\w/]+\.py)` `([\w.]+)`", (ROOT / "docs/explanation/algorithm.md").read_text())
)
def test_every_function_named_beside_a_formula_exists(name):
    file, function = name
    source = (ROOT / "dapo" / file).read_text(encoding="utf-8")
    for part in function.split("."):
        assert re.search(rf"(def|class) {part}\b", source), f"{file}: {part}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8")) <= 10_000


def test_the_number_of_options_in_the_comparison_is_right():
    (stated,) = re.findall(
        r"\| options \| (\d+),", (ROOT / "docs/explanation/comparison.md").read_text(encoding="utf-8")
    )
    assert int(stated) == len(option_names())


def test_the_page_of_commands_is_that_of_the_command_line(tmp_path: Path):
    target = "reference/cli.md"
    command = ["-m", "typer", "dapo.cli", "utils", "docs", "--name", "dapo", "--title", "Command line"]
    subprocess.run(
        [sys.executable, *command, "--output", tmp_path / "cli.md"], check=True, capture_output=True, cwd=ROOT
    )
    page = (ROOT / "docs" / target).read_text(encoding="utf-8")
    assert page == (tmp_path / "cli.md").read_text(encoding="utf-8"), "make reference writes it again"


def listed(entries: list[Any]) -> list[str]:
    values = [value for entry in entries for value in entry.values()]
    return [page for value in values for page in (listed(value) if isinstance(value, list) else [value])]


def test_the_navigation_lists_every_page_once():
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed(SITE["nav"])) == sorted(pages)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical", reason="the site is built with the extra docs")
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_the_site_has_every_page_and_a_search_index(site: Path):
    index = (site / "search.json").read_text(encoding="utf-8")
    for page in listed(SITE["nav"]):
        target = page.replace(".md", ".html")
        assert (site / target).exists()
        assert target in index


def test_the_site_loads_nothing_from_the_network(site: Path):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(
            r"<(?:script|link|img|iframe|source)\b[^>]*(?:src|href|srcset)=[\"']?(?:https?:)?//", text
        ), page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet
