from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import torch
from rich.console import Console

from dapo.doctor import Finding, _cpu_kernels, check, is_usable, memory, print_table
from dapo.kernels import native
from tests.kernels.ways import needs_native


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
    assert {"tensorboard", "wandb", "trackio", "CPU kernels"} <= names


def test_every_problem_says_what_to_do(findings: list[Finding]) -> None:
    for finding in findings:
        if finding.status != "ok":
            assert any(verb in finding.detail for verb in ("install", "run ", "set ", "check ", "close ", "use "))


@pytest.mark.parametrize(
    ("flags", "compiler", "status", "words"),
    [
        ({"sse2"}, None, "ok", "float32"),
        (native.INSTRUCTIONS[torch.float32], "no-such-compiler", "warn", "install"),
        (native.INSTRUCTIONS[torch.bfloat16], "false", "warn", "install"),
        pytest.param(native.INSTRUCTIONS[torch.float32], None, "ok", "for float32", marks=needs_native),
        pytest.param(native.INSTRUCTIONS[torch.bfloat16], None, "ok", "bfloat16", marks=needs_native),
    ],
)
def test_the_kernels_for_a_cpu_are_checked(flags, compiler, status, words, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(native, "_loaded", native._loaded.__wrapped__)
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path))
    if compiler is not None:
        monkeypatch.setenv("CC", compiler)
    found = _cpu_kernels()
    assert found.status == status and words in found.detail


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
    (tmp_path / "meminfo").write_text("MemTotal:  8 kB\nMemFree:  1 kB\nMemAvailable:  4 kB\n")
    assert memory(tmp_path, tmp_path / "no_groups") == (8 * 1024, 4 * 1024)


GROUPS = {
    "0::/pod/task": ("pod/task", "memory.max", "memory.current", "inactive_file"),
    "4:memory:/pod/task": ("memory/pod/task", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "0::/on/the/host": ("", "memory.max", "memory.current", "inactive_file"),  # the container's own group is the root
}


@pytest.mark.parametrize("line", GROUPS)
def test_a_container_has_the_memory_of_its_group(tmp_path: Path, line: str) -> None:
    folder, limit, used, cache = GROUPS[line]
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal:  8000 kB\nMemAvailable:  4000 kB\n")
    (tmp_path / "self" / "cgroup").write_text(f"7:cpu:/\n{line}\n")
    group = tmp_path / "groups" / folder
    group.mkdir(parents=True)
    (group / limit).write_text("1000000\n")
    (group / used).write_text("700000\n")
    (group / "memory.stat").write_text(f"anon 5\n{cache} 100000\n")  # which the system can take back
    assert memory(tmp_path, tmp_path / "groups") == (1_000_000, 400_000)
    (group / limit).write_text("max\n")
    assert memory(tmp_path, tmp_path / "groups") == (8000 * 1024, 4000 * 1024)


@pytest.mark.skipif(not hasattr(os, "sysconf"), reason="needs a POSIX system")
def test_without_meminfo_the_total_comes_from_sysconf(tmp_path: Path) -> None:
    total, available = memory(tmp_path / "none")
    assert total is not None
    assert total > 0
    assert available is None


@pytest.mark.usefixtures("no_home")
def test_a_user_without_a_home_folder_is_told_to_name_the_cache() -> None:
    findings = check()
    by_name = {finding.name: finding for finding in findings}
    assert is_usable(findings)
    for name in ("disk for cache", "SmolLM2"):
        assert by_name[name].status == "warn" and "set DAPO_CACHE" in by_name[name].detail


def test_little_disk_space_is_a_warning_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapo.doctor.RUNS_NEEDED", 1 << 60)
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path / "not" / "there"))
    by_name = {finding.name: finding for finding in check(tmp_path / "runs")}
    assert by_name["disk for runs"].status == "warn"
    assert "set run.dir" in by_name["disk for runs"].detail
    assert by_name["disk for cache"].status == "ok"
