from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from dapo.doctor import Finding, check, is_usable, memory, print_table


@pytest.fixture(scope="module")
def findings() -> list[Finding]:
    return check()


def test_a_machine_that_runs_these_tests_is_usable(findings: list[Finding]) -> None:
    assert is_usable(findings)
    status = {finding.name: finding.status for finding in findings}
    assert status["torch"] == status["transformers"] == "ok"


def test_every_part_is_checked(findings: list[Finding]) -> None:
    names = {finding.name for finding in findings}
    assert {"python", "device", "cores", "memory", "disk for runs", "disk for cache", "SmolLM2", "vllm", "ray"} <= names
    assert {"tensorboard", "wandb", "trackio"} <= names


def test_every_problem_says_what_to_do(findings: list[Finding]) -> None:
    for finding in findings:
        if finding.status != "ok":
            assert any(verb in finding.detail for verb in ("install", "run ", "set ", "check ", "close ", "use "))


def test_a_missing_required_part_makes_the_machine_unusable_and_an_optional_one_does_not() -> None:
    assert is_usable([Finding("torch", "ok", "2"), Finding("vllm", "missing", "", optional=True)])
    assert is_usable([Finding("torch", "ok", "2"), Finding("memory", "warn", "")])
    assert not is_usable([Finding("torch", "missing", "")])


def test_the_table_shows_every_finding_and_takes_text_literally() -> None:
    console = Console(file=io.StringIO(), width=100)
    print_table(console, [Finding("torch", "ok", "2.0 [cpu]"), Finding("ray", "missing", "run `pip install ray`")])
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "2.0 [cpu]" in text
    assert "missing" in text
    assert "run `pip install ray`" in text


def test_memory_is_read_from_meminfo(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:  8 kB\nMemFree:  1 kB\nMemAvailable:  4 kB\n")
    assert memory(file) == (8 * 1024, 4 * 1024)


@pytest.mark.skipif(not hasattr(os, "sysconf"), reason="needs a POSIX system")
def test_without_meminfo_the_total_comes_from_sysconf(tmp_path: Path) -> None:
    total, available = memory(tmp_path / "none")
    assert total is not None
    assert total > 0
    assert available is None


def test_little_disk_space_is_a_warning_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapo.doctor.RUNS_NEEDED", 1 << 60)
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path / "not" / "there"))
    by_name = {finding.name: finding for finding in check(tmp_path / "runs")}
    assert by_name["disk for runs"].status == "warn"
    assert "set run.dir" in by_name["disk for runs"].detail
    assert by_name["disk for cache"].status == "ok"
