"""python -m benchmarks.gpu_memory: real training on small GPUs, made by limiting the memory of the process.

Arms: all weights of a 1.5B model in 24 GB, LoRA of a 1.5B model in 12 GB, LoRA of a 7B shape in 24 GB. Each trains
whole steps of GSM8K's sizes (64 prompts x 16 responses, at most 512 + 512 tokens) with the default options in a process
of its own, and prints the limit, the peak that `dapo plan` predicts, the measured peak, and the seconds of a step.
Weights are random, so that responses have all 512 tokens; `--model PATH` trains real ones. `--large` also trains the
arm without a limit, which shows what the limit costs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PretrainedConfig

from benchmarks.gpu_common import (
    QWEN2_1_5B,
    QWEN2_7B,
    Row,
    StepMetrics,
    default_device,
    print_rows,
    save_random,
    step_seconds,
)
from benchmarks.gpu_step import REWARD, random_questions
from dapo.config import Config
from dapo.model.memory import CONTEXT_BYTES, GIB
from dapo.plan.estimate import estimate
from dapo.plan.hardware import Gpu
from dapo.plan.workload import workload
from dapo.training.trainer import Trainer
from dapo.types import EventKind, StepReport

MOST_OFF = 0.1  # the largest relative error of a predicted peak


@dataclass(frozen=True, slots=True)
class Arm:
    what: str
    shape: PretrainedConfig
    rank: int  # of LoRA; 0: all weights
    card: float  # bytes


ARMS = {
    "full-1.5b": Arm("all weights of 1.5B in 24 GB", QWEN2_1_5B, 0, 24e9),
    "lora-1.5b": Arm("LoRA of 1.5B in 12 GB", QWEN2_1_5B, 16, 12e9),
    "lora-7b": Arm("LoRA of 7B in 24 GB", QWEN2_7B, 16, 24e9),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of a step."""

    prompts: int = 64
    n: int = 16
    prompt_tokens: int = 128
    max_tokens: int = 512  # of a prompt, and of a response
    steps: int = 2


@dataclass(frozen=True, slots=True)
class Measured:
    """Memory and time of one arm. Bytes are those of the whole process, CUDA's context included."""

    predicted: float
    reserved: float  # by torch at its peak, and the context
    allocated: float  # in tensors at the peak, and the context
    seconds: list[float]
    plan: str  # the run's message about how it divides memory
    notes: list[str]  # events about memory, and metrics of the last step


class _Steps(StepMetrics):
    """A reporter that also keeps the warnings about memory."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def step(self, report: StepReport) -> None:
        super().step(report)
        self.notes += [event.message for event in report.events if event.kind is EventKind.MEMORY]


def write_recipe(folder: Path, arm: Arm, sizes: Sizes, model: str | None, device: torch.device) -> Path:
    if model is None:
        model = str(save_random(folder / "model", arm.shape, device, torch.bfloat16))
        if device.type == "cuda":
            torch.cuda.empty_cache()
        words = sizes.prompt_tokens  # one token each
    else:
        words = sizes.prompt_tokens // 5
    questions = random_questions(4 * sizes.prompts, words, arm.shape.vocab_size)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, questions)), encoding="utf-8")
    values: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / "runs"), "steps": sizes.steps, "save_every": 0},
        "model": {"path": model, "lora": {"rank": arm.rank}, "dtype": "bfloat16"},
        "data": {
            "train": str(folder / "data.jsonl"), "train_batch_size": sizes.prompts,
            "max_prompt_length": sizes.max_tokens, "max_response_length": sizes.max_tokens,
        },
        "rollout": {"n": sizes.n},
        "reward": {"use": f"{folder / 'reward.py'}:reward"},
        "optim": {"ppo_mini_batch_size": max(1, sizes.prompts // 4)},
        "algorithm": {"filter_groups": {"enable": False}},
    }  # fmt: skip
    path = folder / "memory.yaml"
    path.write_text(json.dumps(values), encoding="utf-8")  # JSON is YAML
    return path


def predicted_peak(config: Config, card: float, sizes: Sizes) -> float:
    gpu = Gpu("h200", card, 4.8e12, 450e9, 50e9)  # only the memory matters here
    work = workload(config, mean_response=sizes.max_tokens, mean_prompt=sizes.prompt_tokens)
    return max(estimate(config, work, gpu, 1).memory.peak)


def limit_memory(card: float, device: torch.device) -> None:
    """Let this process use as much memory as a card of so many bytes has, besides CUDA's context."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (card - CONTEXT_BYTES) / total), device)


def measure(arm: Arm, sizes: Sizes, model: str | None, device: torch.device, *, is_limited: bool = True) -> Measured:
    on_gpu = device.type == "cuda"
    card = arm.card if is_limited or not on_gpu else torch.cuda.get_device_properties(device).total_memory
    with tempfile.TemporaryDirectory() as name:
        recipe = write_recipe(Path(name), arm, sizes, model, device)
        config = Config.load(recipe)
        predicted = predicted_peak(config, card, sizes)
        limit_memory(card, device)  # after the random weights were made
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        metrics = _Steps()
        trainer = Trainer(config, reporter=metrics)
        try:
            plan = "; ".join(note for _, note in trainer.policy.notes(trainer.engine.cache_bytes)) or "no GPU"
            seconds = [step_seconds(trainer, device) for _ in range(sizes.steps)]
            notes = metrics.notes + [f"{key} {value:.4g}" for key, value in metrics.steps[-1].items() if _is_shown(key)]
        finally:
            trainer.close()
    reserved, allocated = (torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()) if on_gpu else (0, 0)
    free, total = torch.cuda.mem_get_info(device) if on_gpu else (0, CONTEXT_BYTES)
    context = total - free - (torch.cuda.memory_reserved() if on_gpu else 0)  # if nothing else uses the GPU
    return Measured(predicted, reserved + context, allocated + context, seconds, plan, notes)


def _is_shown(name: str) -> bool:
    return name.startswith(
        ("timing_s/", "throughput/mfu", "engine/restarts", "engine/kv_occupancy", "logprob_gap/mean")
    )


def run_apart(name: str, sizes: Sizes, model: str | None, *, is_limited: bool) -> Measured | None:
    """Measure an arm in a process of its own, whose output is shown. None: it failed."""
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        options = [f"--{key.replace('_', '-')}={value}" for key, value in asdict(sizes).items()]
        options += [f"--model={model}"] if model else []
        options += [] if is_limited else ["--large"]
        command = [sys.executable, "-m", "benchmarks.gpu_memory", "--inside", name, "--out", result.name, *options]
        if subprocess.run(command, check=False).returncode != 0:
            return None
        return Measured(**json.loads(Path(result.name).read_text()))


def rows(name: str, found: Measured, *, is_limited: bool) -> list[Row]:
    arm = ARMS[name]
    what = arm.what if is_limited else f"  {arm.what.rpartition(' in ')[0]}, no limit"
    off = abs(found.reserved - found.predicted) / found.reserved
    most = arm.card / GIB if is_limited else None
    note = f"{found.plan}; {'; '.join(found.notes)}"
    return [
        Row(f"{what}: peak", found.reserved / GIB, "GiB", most, most, lower_is_better=True, note=note),
        Row("  in tensors", found.allocated / GIB, "GiB"),
        Row("  predicted", found.predicted / GIB, "GiB"),
        Row("  error of the prediction", 100 * off, "%", 100 * MOST_OFF, 100 * MOST_OFF, lower_is_better=True),
        Row("  last step", found.seconds[-1], "s", note=f"all steps: {', '.join(f'{s:.1f}' for s in found.seconds)} s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*ARMS], default=[*ARMS])
    parser.add_argument("--model", help="real weights, as in model.path; default: random weights of the arm's shape")
    parser.add_argument("--large", action="store_true", help="also without a limit")
    parser.add_argument("--inside", choices=[*ARMS], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    given = parser.parse_args()
    sizes = Sizes(given.prompts, given.n, given.prompt_tokens, given.max_tokens, given.steps)
    if given.inside:
        found = measure(ARMS[given.inside], sizes, given.model, default_device(), is_limited=not given.large)
        given.out.write_text(json.dumps(asdict(found)))
        return
    console, table, failed = Console(width=140), list[Row](), list[str]()
    for name in given.only:
        for is_limited in (True, False) if given.large else (True,):
            start = time.perf_counter()
            result = run_apart(name, sizes, given.model, is_limited=is_limited)
            console.print(f"{name}: {time.perf_counter() - start:.0f} s in all", highlight=False)
            table += rows(name, result, is_limited=is_limited) if result else []
            failed += [] if result else [name]
    print_rows("training within a limit on memory, bf16", table)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
