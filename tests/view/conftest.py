from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.view import generate
from dapo import Trainer
from dapo.view.runs import find_run
from dapo.view.source import Run
from tests import runs

WAIT_MS = 30_000
OWN = ("http://127.0.0.1:", "file://", "data:", "blob:")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of four real training steps with evaluations. Its clips are so narrow that some tokens are clipped."""
    config = runs.load(
        tmp_path_factory.mktemp("trained"),
        run={"steps": 4, "name": "real"},
        algorithm={"clip_ratio_low": 0.002, "clip_ratio_high": 0.003, "clip_ratio_c": 1.004, "max_logprob_gap": 1.0},
        eval={"k": 2, "every": 2},
    )
    Trainer(config).train()
    return find_run(config.run_dir.parent, "real")


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of three synthetic steps: 192 groups of 8 responses to 30 prompts."""
    folder: Path = tmp_path_factory.mktemp("generated")
    generate(folder / "made_up", steps=3, console=Console(quiet=True), prompts=30)
    return find_run(folder, "made_up")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("there is no Chromium on this machine")
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=found, args=["--no-sandbox"])


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A browser tab that fails the test on a console error, a dialog, or a request to another host."""
    context = browser.new_context(viewport={"width": 1400, "height": 900}, accept_downloads=True)
    opened = context.new_page()
    opened.set_default_timeout(WAIT_MS)
    wrong: list[str] = []
    opened.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("dialog", lambda dialog: (wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
    opened.on("request", lambda request: wrong.append(request.url) if not request.url.startswith(OWN) else None)
    yield opened
    context.close()
    assert wrong == []
