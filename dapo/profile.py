"""`dapo profile`: the time of a training step, kernel by kernel, separately for sampling and training."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from dapo.config import Config
from dapo.training.trainer import Trainer

WARM_UP_STEPS = 2  # not measured: compilation, graph capture and the allocator's first growth happen here
TOP = 10
_NAME_WIDTH = 60


@dataclass(slots=True)
class Kernel:
    """An operator (CPU) or a kernel or copy (GPU): its number of calls, and its total time without its children."""

    name: str
    calls: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Phase:
    """The measurements of one part of the step."""

    name: str
    seconds: float = 0.0
    traces: list[Path] = field(default_factory=list)
    _kernels: dict[str, Kernel] = field(default_factory=dict)

    def add(self, name: str, calls: int, seconds: float) -> None:
        kernel = self._kernels.setdefault(name, Kernel(name))
        kernel.calls += calls
        kernel.seconds += seconds

    @property
    def kernels(self) -> list[Kernel]:
        """All kernels, the most expensive first."""
        return sorted(self._kernels.values(), key=lambda kernel: -kernel.seconds)

    @property
    def kernel_seconds(self) -> float:
        return sum(kernel.seconds for kernel in self._kernels.values())


def profile(config: Config, out: Path, steps: int = 1) -> tuple[Phase, Phase]:
    """Train a few steps in a temporary directory, and write Chrome traces of the last `steps` into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dapo-profile-") as folder:
        trainer = Trainer(_in_folder(config, folder, WARM_UP_STEPS + steps), quiet=True)
        try:
            for _ in range(WARM_UP_STEPS):
                trainer.train_step()
                trainer.empty_in_a_row = 0  # do not stop: steps without anything to learn from can be profiled, too
            sampling = _Recorder(Phase("sampling"), out, steps)
            training = _Recorder(Phase("training"), out, steps)
            trainer.sampler.fill = sampling.around(trainer.sampler.fill)
            trainer.policy.update = training.around(trainer.policy.update)
            for _ in range(steps):
                trainer.train_step()
                trainer.empty_in_a_row = 0
        finally:
            trainer.close()
    return sampling.phase, training.phase


def print_phase(console: Console, phase: Phase) -> None:
    total = phase.kernel_seconds
    table = Table(title=f"{phase.name}: {phase.seconds:.3f} s under the profiler, {total:.3f} s in kernels")
    table.add_column("kernel")
    for heading in ("calls", "ms", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    for kernel in phase.kernels[:TOP]:
        share = 100 * kernel.seconds / total if total else 0.0
        # In a narrow terminal, shorten the name and not the numbers.
        name = Text(kernel.name[:_NAME_WIDTH], no_wrap=True, overflow="ellipsis")
        table.add_row(name, f"{kernel.calls:,}", f"{1e3 * kernel.seconds:,.2f}", f"{share:.1f}%")
    console.print(table)
    for trace in phase.traces:
        console.print(f"trace: {trace}", markup=False, highlight=False, soft_wrap=True)


class _Recorder:
    """Profiles every call of one function, and writes a trace of each."""

    def __init__(self, phase: Phase, out: Path, expected: int) -> None:
        self.phase = phase
        self.out = out
        self.expected = expected
        self.has_gpu = torch.cuda.is_available()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def profiled(*args: Any, **kwargs: Any) -> Any:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.has_gpu else [])]
            with torch_profile(activities=activities) as session:
                start = time.perf_counter()
                result = function(*args, **kwargs)
                if self.has_gpu:
                    torch.cuda.synchronize()
                self.phase.seconds += time.perf_counter() - start
            self._keep(session)
            return result

        return profiled

    def _keep(self, session: Any) -> None:
        number = f"-{len(self.phase.traces) + 1}" if self.expected > 1 else ""
        trace = self.out / f"{self.phase.name}{number}.json.gz"
        session.export_chrome_trace(str(trace))
        self.phase.traces.append(trace)
        for name, (calls, seconds) in _own_times(session.key_averages(), self.has_gpu).items():
            self.phase.add(name, calls, seconds)


def _own_times(events: Sequence[Any], has_gpu: bool) -> dict[str, tuple[int, float]]:
    """Return calls and seconds by name. Annotations are left out: they span kernels that are counted already."""
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    wanted = DeviceType.CUDA if has_gpu else DeviceType.CPU
    for event in events:
        if event.device_type != wanted or event.is_user_annotation:
            continue
        microseconds = event.self_device_time_total if has_gpu else event.self_cpu_time_total
        calls, seconds = found[event.key]
        found[event.key] = (calls + event.count, seconds + microseconds / 1e6)
    return found


def _in_folder(config: Config, folder: str, steps: int) -> Config:
    """Return the same configuration for another directory, without evaluations and checkpoints."""
    run = config.run.model_copy(update={"dir": folder, "steps": steps, "save_every": 0})
    evaluation = config.eval.model_copy(update={"k": 0, "every": 0, "best_metric": None})
    return config.model_copy(update={"run": run, "eval": evaluation})
