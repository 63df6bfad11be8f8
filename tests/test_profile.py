"""Tests of `dapo profile` on a CPU, with a real run of a tiny model."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from dapo.config import Config
from dapo.profile import TOP, Phase, print_phase, profile
from tests import runs

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    command = [sys.executable, "-m", "dapo", "profile", runs.recipe(folder), "optim.lr=1e-4", "--out", folder / "out"]
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def names(trace: Path) -> set[str]:
    return {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}


def test_each_phase_has_its_own_trace_and_only_training_has_a_backward_pass(profiled):
    folder, _ = profiled
    sampling, training = (names(folder / "out" / f"{phase}.json.gz") for phase in ("sampling", "training"))
    assert any("Backward" in str(name) for name in training)
    assert not any("Backward" in str(name) for name in sampling)
    assert "aten::mm" in sampling & training


def test_the_command_prints_ten_kernels_of_each_phase(profiled):
    _, printed = profiled
    for phase in ("sampling:", "training:"):
        assert phase in printed
    assert printed.count("% │") == 2 * TOP
    assert "aten::mm" in printed


def test_the_run_directory_stays_untouched(profiled):
    folder, _ = profiled
    assert not (folder / "runs").exists()


def test_each_profiled_step_has_a_trace_and_their_kernels_are_summed(tmp_path):
    config = Config.load(runs.recipe(tmp_path), ["reward.workers=1"])
    once, twice = (profile(config, tmp_path / f"out{n}", steps=n)[1] for n in (1, 2))
    assert [trace.name for trace in twice.traces] == ["training-1.json.gz", "training-2.json.gz"]
    assert all(trace.exists() for trace in twice.traces)
    assert _calls(twice, "aten::embedding") > _calls(once, "aten::embedding") > 0


def _calls(phase: Phase, name: str) -> int:
    return next(kernel.calls for kernel in phase.kernels if kernel.name == name)


def test_the_table_is_sorted_by_time_and_shows_shares_of_all_kernels():
    phase = Phase("sampling", seconds=1.0)
    phase.add("short", 1, 0.1)
    phase.add("n" * 80, 2, 0.3)
    phase.add("short", 1, 0.1)
    console = Console(width=120, record=True)
    print_phase(console, phase)
    lines = [line for line in console.export_text().splitlines() if "%" in line]
    assert "n" * 60 in lines[0] and "n" * 61 not in lines[0] and "60.0%" in lines[0]
    assert "200.00" in lines[1] and "40.0%" in lines[1]
