from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.view import generate
from dapo import Trainer
from dapo.view.runs import find_run
from dapo.view.source import Run
from tests import runs


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
