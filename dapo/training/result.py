"""The result of a run: evaluations, trained model, step metrics, and the recorded environment."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from dapo.checkpoint import folder as checkpoint
from dapo.config import ModelConfig
from dapo.errors import CheckpointError, counted
from dapo.model.loading import load_model
from dapo.model.lora import plain_copy
from dapo.policy.policy import Policy
from dapo.policy.protocol import Learner, UpdateResult
from dapo.sampling.accounting import Sampled
from dapo.store.database import versions
from dapo.terminal.evaltable import summary
from dapo.types import EvalReport


@dataclass(frozen=True, slots=True, eq=False)
class RunResult:
    """The result of a finished or interrupted run; everything else is in the run directory."""

    run_dir: Path
    steps: int
    before: tuple[EvalReport, ...]  # one per set, before the first step
    after: tuple[EvalReport, ...]  # the latest evaluation after a step, one per set; empty if there was none
    signal: int | None  # the signal that ended the run early, after its step was finished and saved
    seconds: float  # spent on training steps, without evaluation and saving, also before a resume

    def __repr__(self) -> str:
        """Return a few lines, as a notebook shows them."""
        lines = [f"RunResult of {self.run_dir}: {counted(self.steps, 'step')}, {self.seconds:.0f} s of training"]
        for report in (*self.before, *self.after):
            when = f"after step {report.step}" if report.step else "before"
            lines.append(f"  {report.name} {when}: {summary(report.metrics)}")
        return "\n".join(lines)


def trained_model(policy: Learner, source: ModelConfig, checkpoints: Path) -> PreTrainedModel:
    """Return the policy's current model. If other processes learn, load the newest checkpoint."""
    if isinstance(policy, Policy):
        return plain_copy(policy.model)
    saved = checkpoint.newest(checkpoints)
    if saved is None:
        raise CheckpointError(f"{checkpoints}: has no checkpoint yet to load the model from")
    return load_model(source.model_copy(update={"path": str(saved)}), attention="sdpa").model


def environment() -> dict[str, str]:
    """Return what else the exact results on a CPU depend on besides the options. A resume reports what differs."""
    return versions() | {
        "threads": str(torch.get_num_threads()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def step_metrics(sampled: Sampled, update: UpdateResult, *, train: float, total: float) -> dict[str, float]:
    """Return the metrics of one step. `train` and `total` are seconds."""
    generate, reward = sampled.generate_seconds, sampled.reward_seconds
    return {
        **sampled.metrics(),
        **update.metrics,
        "timing_s/generate": generate,
        "timing_s/reward": reward,
        "timing_s/train": train,
        "timing_s/step": total,
        "throughput/generated_tokens_per_s": sampled.tokens["tokens/generated"] / max(generate, 1e-9),
        "throughput/trained_tokens_per_s": sampled.tokens["tokens/trained"] / max(train, 1e-9),
        "time_share/generate": generate / max(total, 1e-9),
        "time_share/reward": reward / max(total, 1e-9),
        "time_share/train": train / max(total, 1e-9),
    }


def close_all(*parts: Any) -> None:
    """Close in reverse order, and all of them even if one fails."""
    with ExitStack() as stack:
        for part in parts:
            stack.callback(part.close)
