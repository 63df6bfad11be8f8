"""The records that carry data along the road Prompt -> Rollout -> Score -> Group -> StepReport."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

FinishReason = Literal["stop", "length"]
Phase = Literal["train", "eval"]

# Verdicts that are not a reason for being dropped.
KEPT = "kept"
PADDED = "padded"  # dropped, but trained on to fill up a batch
CARRIED = "carried"  # kept, and waiting for a later step


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question: what the model is asked, and what its answers are judged against."""

    uid: str
    messages: tuple[Mapping[str, str], ...]
    tokens: tuple[int, ...]
    answer: Any
    data_source: str = "default"
    extra: Mapping[str, Any] = field(default_factory=dict)
    is_text: bool = False  # the row held plain text, not messages: some reward functions are then called with text


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens. Training allows temperature alone; truncation and greedy (0) are for evaluation."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Request:
    """A group to sample: `n` responses to one prompt."""

    serial: int
    prompt: tuple[int, ...]
    n: int
    params: SamplingParams
    phase: Phase = "train"


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One response with what the sampler knew when it drew each token."""

    serial: int
    index: int
    tokens: np.ndarray  # int32 [L], the stop token included
    logprobs: np.ndarray  # float32 [L], of the sampler, at the sampling temperature
    finish_reason: FinishReason
    weight_version: int  # of the weights that drew the first token
    text: str
    switches: tuple[int, ...] = ()  # tokens there were each time the weights went on by one version under way

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def versions(self) -> np.ndarray:
        """int32 [L]: the version of the weights that drew each token."""
        return self.weight_version + np.searchsorted(self.switches, np.arange(len(self)), side="right").astype(np.int32)


@dataclass(frozen=True, slots=True)
class Score:
    """What the judge said. With `error` set the rollout could not be judged, and has no reward."""

    value: float | None
    acc: bool | None = None
    error: str | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def judged(self) -> bool:
        return self.error is None


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A prompt with its n judged rollouts, and the verdict: kept, or the reason why not.

    The serial is the group's one identity in engine, records and database. Where a rollout was not judged its reward is
    NaN, its advantage 0, and it does not train.
    """

    serial: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]
    rewards: np.ndarray  # float64 [n], after overlong shaping and KL
    advantages: np.ndarray  # float64 [n]
    trains: np.ndarray  # bool [n], whether the rollout takes part in the loss
    verdict: str
    ref_logprobs: tuple[np.ndarray, ...] | None = None  # float32 [L] each, of the reference model

    @property
    def weight_version(self) -> int:
        """Of its oldest token."""
        return min(rollout.weight_version for rollout in self.rollouts)

    @property
    def kept(self) -> bool:
        return self.verdict in (KEPT, PADDED)

    @property
    def tokens(self) -> int:
        return sum(len(rollout) for rollout in self.rollouts)

    @property
    def trained_tokens(self) -> int:
        return sum(len(rollout) for rollout, trains in zip(self.rollouts, self.trains, strict=True) if trains)

    def with_verdict(self, verdict: str) -> Group:
        return replace(self, verdict=verdict)


class TokenStats(NamedTuple):
    """Per token of one rollout, as the policy saw it at its first update."""

    logprobs: np.ndarray  # float32 [L]
    entropy: np.ndarray  # float32 [L]


@dataclass(frozen=True, slots=True, eq=False)
class StepReport:
    """Every figure of one training step, and every group that was decided in it."""

    step: int
    metrics: Mapping[str, float]
    groups: tuple[Group, ...]
    token_stats: Mapping[tuple[int, int], TokenStats]  # (serial, index) -> of the trained rollouts
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class EvalSample:
    """One sample of an evaluation."""

    prompt: Prompt
    rollout: Rollout
    score: Score


@dataclass(frozen=True, slots=True, eq=False)
class EvalReport:
    """One evaluation of one dataset: the figures, and every sample behind them."""

    step: int
    name: str
    metrics: Mapping[str, float]
    samples: tuple[EvalSample, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """Something a person reading the run later should know: a warning, a resume, a stop."""

    kind: str
    message: str
    step: int
