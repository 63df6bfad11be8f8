"""Screenshots of every view, light and dark.

SCREENSHOTS_OF=runs/arithmetic takes them of that run, not of a tiny one, and writes them to docs/images.
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
# The view's path, an element that shows that it is loaded, and the height of the screenshot in pixels.
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
def shown_run(trained: Run) -> Run:
    chosen = os.environ.get("SCREENSHOTS_OF")
    return find_run(Path(chosen).parent, Path(chosen).name) if chosen else trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return IMAGES if "SCREENSHOTS_OF" in os.environ else tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def url(shown_run: Run) -> Iterator[str]:
    runs = shown_run.path.parent.parent.resolve()
    with running(Path(runs.name), cwd=runs.parent) as address:  # a relative path, because the page shows it
        yield address


@pytest.fixture(scope="module")
def response(shown_run: Run) -> tuple[int, int]:
    """Serial and sample index of the response with the most clipped tokens."""
    found = {}
    for row in groups(shown_run, GroupFilter(verdicts=("kept",)), limit=300, newest_first=True).rows:
        for sample in range(row.responses):
            parts = tokens(shown_run, row.serial, sample, str)
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
    page.wait_for_timeout(1_000)  # let animations finish
    taken = page.screenshot(path=file)
    assert 10_000 < len(taken) < MAX_BYTES, f"{file.name} has {len(taken):,} bytes"


@pytest.mark.parametrize("view", VIEWS)
def test_a_screenshot_of_every_view(
    view: str, tab: Any, url: str, shown_run: Run, response: tuple[int, int], folder: Path
):
    page, scheme = tab
    address, sign, height = VIEWS[view]
    page.set_viewport_size({"width": 1280, "height": height})
    serial, sample = response
    page.goto(url + address.format(name=shown_run.name, serial=serial, sample=sample))
    page.locator(sign).first.wait_for()
    if view == "prompts":
        page.get_by_role("button", name="flickering").click()
        page.wait_for_timeout(1_500)
        if not page.locator(sign).count():  # a short run has no flickering prompts
            page.get_by_role("button", name="hardest").click()
        page.locator(sign).nth(min(1, page.locator(sign).count() - 1)).locator(".ag-cell").first.click()
        page.locator(".history canvas").wait_for()
    if view == "tokens":
        page.get_by_role("button", name="ratio").click()
        page.locator(".tokens [class^=clip]").first.hover()
    shoot(page, folder / f"{view}-{scheme}.png")


def test_a_screenshot_of_the_report(tab: Any, shown_run: Run, folder: Path, tmp_path: Path):
    page, scheme = tab
    out = tmp_path / "it.html"
    command = [sys.executable, "-m", "dapo", "report", str(shown_run.path.parent), "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    page.goto(out.as_uri())
    page.locator(".chart canvas").first.wait_for()
    shoot(page, folder / f"report-{scheme}.png")
