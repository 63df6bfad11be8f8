"""Pictures of every view, light and dark, as docs/images has them.

SCREENSHOTS_OF=runs/arithmetic makes those of the documentation anew, from that run instead of a tiny one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nicegui", reason="the page needs dapo[view]")

from dapo.view.groups import GroupFilter, groups
from dapo.view.runs import find_run
from dapo.view.source import Run
from dapo.view.tokens import tokens
from tests.view.test_server import ROOT, running

IMAGES = ROOT / "docs" / "images"
MAX_BYTES = 150_000
# An address, the sign that it is there, and how much of it is worth showing.
VIEWS = {
    "runs": ("", ".opens .ag-row", 280),
    "curves": ("run/{name}/curves", ".curves :not(.waiting) > div > canvas", 920),
    "groups": ("run/{name}/groups", ".groups .ag-row", 600),
    "group": ("run/{name}/groups/{serial}", ".responses .q-card", 720),
    "tokens": ("run/{name}/tokens/{serial}/{sample}", ".tokens span", 370),
    "prompts": ("run/{name}/prompts", ".prompts .ag-row", 920),
    "health": ("run/{name}/health", ".events .ag-row", 600),
}


@pytest.fixture(scope="module")
def pictured(trained: Run) -> Run:
    chosen = os.environ.get("SCREENSHOTS_OF")
    return find_run(Path(chosen).parent, Path(chosen).name) if chosen else trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return IMAGES if "SCREENSHOTS_OF" in os.environ else tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def url(pictured: Run) -> Iterator[str]:
    runs = pictured.path.parent.parent.resolve()
    with running(Path(runs.name), cwd=runs.parent) as address:  # the page says where the runs are
        yield address


@pytest.fixture(scope="module")
def response(pictured: Run) -> tuple[int, int]:
    """The one with most clipped tokens: its group, and its number there."""
    found = {}
    for row in groups(pictured, GroupFilter(verdicts=("kept",)), limit=300, newest_first=True).rows:
        for sample in range(row.responses):
            parts = tokens(pictured, row.serial, sample, str)
            clips = sum(clip is not None for clip in (parts.clips or ())) if parts else 0
            found.setdefault(clips, (row.serial, sample))
    return found[max(found)]


@pytest.fixture(params=["light", "dark"])
def tab(browser: Any, request: pytest.FixtureRequest) -> Iterator[tuple[Any, str]]:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme=request.param)
    page = context.new_page()
    page.set_default_timeout(30_000)
    yield page, request.param
    context.close()


def shoot(page: Any, file: Path) -> None:
    page.wait_for_timeout(1_000)  # what moves has come to rest
    taken = page.screenshot(path=file)
    assert 10_000 < len(taken) < MAX_BYTES, f"{file.name} has {len(taken):,} bytes"


@pytest.mark.parametrize("view", VIEWS)
def test_a_picture_of_every_view(view: str, tab: Any, url: str, pictured: Run, response: tuple[int, int], folder: Path):
    page, scheme = tab
    address, sign, height = VIEWS[view]
    page.set_viewport_size({"width": 1280, "height": height})
    serial, sample = response
    page.goto(url + address.format(name=pictured.name, serial=serial, sample=sample))
    page.locator(sign).first.wait_for()
    if view == "prompts":
        page.get_by_role("button", name="flickering").click()
        page.wait_for_timeout(1_500)
        if not page.locator(sign).count():  # a short run has none
            page.get_by_role("button", name="hardest").click()
        page.locator(sign).nth(min(1, page.locator(sign).count() - 1)).locator(".ag-cell").first.click()
        page.locator(".history canvas").wait_for()
    if view == "tokens":
        page.get_by_role("button", name="ratio").click()
        page.locator(".tokens [class^=clip]").first.hover()
    shoot(page, folder / f"{view}-{scheme}.png")


def test_a_picture_of_the_report(tab: Any, pictured: Run, folder: Path, tmp_path: Path):
    page, scheme = tab
    out = tmp_path / "it.html"
    command = [sys.executable, "-m", "dapo", "report", str(pictured.path.parent), "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    page.goto(out.as_uri())
    page.locator(".chart canvas").first.wait_for()
    shoot(page, folder / f"report-{scheme}.png")
