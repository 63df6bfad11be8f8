"""The parts of a run that hold weights, wherever their processes live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dapo.engine.protocol import Engine
from dapo.errors import LearnerLost
from dapo.policy.protocol import Learner
from dapo.rewards.protocol import Judge


def _nothing() -> None: ...


def _give_up(lost: LearnerLost, saved: Path | None) -> None:
    raise lost


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    policy: Learner
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]
    cache_bytes: int = 0  # that the engine's cache holds on the GPU of the policy
    release_cache: Callable[[], None] = _nothing  # gives them back until something is sampled again
    restart: Callable[[LearnerLost, Path | None], None] = _give_up  # the policy anew, from a checkpoint or the start
    judge: Judge | None = None  # where judging is placed elsewhere, too
