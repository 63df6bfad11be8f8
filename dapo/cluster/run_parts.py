"""The parts of a run that may live in other processes: policy, engine and judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dapo.engine.protocol import Engine
from dapo.errors import LearnerLost
from dapo.policy.protocol import Learner
from dapo.rewards.protocol import Judge


def _give_up(lost: LearnerLost, saved: Path | None) -> None:
    raise lost


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    policy: Learner
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]
    restart: Callable[[LearnerLost, Path | None], None] = _give_up  # restarts the policy from a checkpoint
    judge: Judge | None = None  # None: the trainer builds a local one
