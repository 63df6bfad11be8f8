"""The records that carry data: Prompt -> Rollout -> Score -> Group -> StepReport."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Self

import numpy as np

FinishReason = Literal["stop", "length"]
Phase = Literal["train", "eval"]

Severity = Literal["info", "warning", "error"]


class Verdict(StrEnum):
    """The decision about a group: kept, or the reason why it was dropped."""

    KEPT = "kept"
    PADDED = "padded"  # dropped by the filter, but trained on to fill the batch (on_exhausted: pad)
    CARRIED = "carried"  # kept, and carried over to a later step; not decided yet
    STALE = "stale"  # carried over for too long
    SURPLUS = "surplus"  # kept, but the batch was full and nothing may be carried over
    # The filter metric is the same for all judged rollouts:
    ALL_WRONG = "all_wrong"
    ALL_RIGHT = "all_right"
    NO_VARIANCE = "no_variance"
    UNJUDGED = "unjudged"  # fewer than two judged rollouts
    NOTHING_TO_TRAIN = "nothing_to_train"  # the overlong filter left no rollout


FLAT = (Verdict.ALL_WRONG, Verdict.ALL_RIGHT, Verdict.NO_VARIANCE)  # all judged rollouts are the same to the filter


class Ending(StrEnum):
    """The reason why an episode ended."""

    ENVIRONMENT = "by the environment"
    NO_TURNS = "no turns left"
    NO_TOKENS = "no tokens left"
    FAILED = "with an error"


class EventKind(StrEnum):
    """The kinds of events, each with its severity."""

    _value_: str
    severity: Severity

    def __new__(cls, name: str, severity: Severity) -> Self:
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.severity = severity
        return kind

    DATA = "data", "info"
    PLAN = "plan", "info"
    SANDBOX = "sandbox", "info"
    CONFIGURATION = "configuration", "info"
    RESUMED = "resumed", "info"
    FINISHED = "finished", "info"
    INTERRUPTED = "interrupted", "info"
    DISK = "disk", "warning"
    MEMORY = "memory", "warning"
    TRACKER = "tracker", "warning"
    EXHAUSTED = "exhausted", "warning"
    UNJUDGED = "unjudged", "warning"
    LENGTH = "length", "warning"
    SOLVED = "solved", "warning"
    KERNELS = "kernels", "warning"
    WAITING = "waiting", "warning"
    WEIGHTS = "weights", "warning"
    WORKER = "worker", "warning"
    REWARD_WORKER = "reward worker", "warning"
    LEARNERS = "learners", "warning"
    STOPPED = "stopped", "error"


def event_severity(kind: str) -> Severity:
    """Return the severity of an event read from a database: info if another version of dapo recorded the kind."""
    try:
        return EventKind(kind).severity  # pyright: ignore[reportCallIssue]
    except ValueError:
        return "info"


# Prefixes of a score's extras: the score of one term of a weighted sum, and a metric that a reward function logged.
TERM = "score/"
METRIC = "metric/"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question with the gold answer that its responses are judged against."""

    uid: str
    messages: tuple[Mapping[str, str], ...]
    tokens: tuple[int, ...]
    answer: Any
    data_source: str = "default"
    extra: Mapping[str, Any] = field(default_factory=dict)
    is_text: bool = False  # the row had plain text, not messages; some reward functions then get text
    opens_thought: bool = False  # the tokens end with the tag that opens a thought, so responses start inside one


@dataclass(frozen=True, slots=True, eq=False)
class Outlook:
    """A prompt's features and forecast when it was drawn."""

    features_K: np.ndarray  # float64, projected
    forecast: float | None = None  # of its pass rate; None if the forecast knew too little


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """A prompt that was drawn for a new group."""

    prompt: Prompt
    chance: float = 1.0  # the probability with which the ledger drew it; without looking ahead
    outlook: Outlook | None = None  # None without looking ahead


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. Truncation (top_p, top_k) and greedy sampling (temperature 0) are only for evaluation."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 1
    stop: tuple[str, ...] = ()  # texts that end a response


@dataclass(frozen=True, slots=True)
class Request:
    """A group to sample: `n` responses to one prompt (token ids)."""

    serial: int
    prompt: tuple[int, ...]
    n: int
    params: SamplingParams
    phase: Phase = "train"
    turns: bool = False  # episodes: what `poll` returned can go on with `Engine.extend`, until `Engine.end`


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One response, with the log-probability that the sampler recorded for each token.

    In an episode of several turns, the tokens are all that follow the prompt: the model's, and those that the
    environment gave between its turns. Those are inputs only: they are not trained on and not counted.
    """

    serial: int
    index: int
    tokens: np.ndarray  # int32 [L], including the stop token
    logprobs: np.ndarray  # float32 [L], the sampler's, at the sampling temperature; 0 for given tokens
    finish_reason: FinishReason
    weight_version: int  # version of the weights that sampled the first token
    text: str  # of the last turn
    switches: tuple[int, ...] = ()  # switches[i]: tokens already there when the weights advanced for the i-th time
    given: tuple[tuple[int, int], ...] = ()  # half-open spans of the tokens that an environment gave
    # For the record, one entry per turn of the model in an environment: `text`, the environment's `messages`, the
    # `seconds` of its reply, and its `calls` of tools; the last has `ended`, an Ending.
    turns: tuple[Mapping[str, Any], ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sampled(self) -> int:
        """The number of the model's own tokens."""
        return len(self) - sum(end - start for start, end in self.given)

    @property
    def is_own(self) -> np.ndarray:
        """Whether each token is the model's own, bool [L]."""
        own = np.ones(len(self), bool)
        for start, end in self.given:
            own[start:end] = False
        return own

    @property
    def versions(self) -> np.ndarray:
        """The version of the weights that sampled each token, int64 [L]."""
        return token_versions(self.weight_version, self.switches, np.arange(len(self)))


def token_versions(first: int, switches: Sequence[int], positions_T: np.ndarray) -> np.ndarray:
    """Return the version of the weights that sampled each position, int64 [T]; see `Rollout.switches`."""
    return first + np.searchsorted(switches, positions_T, side="right")


@dataclass(frozen=True, slots=True, eq=False)
class Extension:
    """The next turn of an episode: tokens that the environment gave after what was sampled so far."""

    request: Request
    rollout: Rollout  # as `Engine.poll` returned it
    tokens: tuple[int, ...]
    max_tokens: int  # greatest length of the response, all its turns and given tokens included


@dataclass(frozen=True, slots=True)
class Score:
    """The judge's result for one rollout. If `error` is set, the rollout could not be judged and has no reward."""

    value: float | None
    acc: float | None = None  # right (True) or wrong (False), or a share, if the judge says so
    error: str | None = None  # why it could not be judged
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def judged(self) -> bool:
        return self.error is None

    @property
    def components(self) -> dict[str, float]:
        """The scores of a weighted sum's terms, and the other numbers that the reward returned, by name."""
        return {
            name.removeprefix(TERM): float(value)
            for name, value in self.extras.items()
            if isinstance(value, int | float) and name != "extracted" and not name.startswith(METRIC)
        }


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A prompt with its n scored rollouts and the verdict: kept, or the reason why it was dropped.

    The serial identifies the group in the engine, the records and the database. A rollout that could not be judged has
    reward NaN and advantage 0, and is not part of the loss.
    """

    serial: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]
    rewards: np.ndarray  # float64 [n], after length shaping and the KL term
    advantages: np.ndarray  # float64 [n]
    trains: np.ndarray  # bool [n], whether the rollout is part of the loss
    verdict: str  # a Verdict, or the reason that a group filter of the user gave
    ref_logprobs: tuple[np.ndarray, ...] | None = None  # float32 [L] each, the reference model's
    chance: float = 1.0  # the probability with which the ledger drew the prompt; without looking ahead
    start_logprobs: tuple[np.ndarray, ...] | None = None  # float32 [L] each, the trainer's before the step's updates

    @property
    def weight_version(self) -> int:
        """The weight version of the group's oldest token."""
        return min(rollout.weight_version for rollout in self.rollouts)

    @property
    def kept(self) -> bool:
        return self.verdict in (Verdict.KEPT, Verdict.PADDED)

    @property
    def tokens(self) -> int:
        """The number of tokens that the model sampled."""
        return sum(rollout.sampled for rollout in self.rollouts)

    @property
    def trained_tokens(self) -> int:
        return sum(rollout.sampled for rollout, trains in zip(self.rollouts, self.trains, strict=True) if trains)

    def with_verdict(self, verdict: str) -> Group:
        return replace(self, verdict=verdict)


class TokenStats(NamedTuple):
    """Per-token values of one rollout under the policy, at the rollout's first update."""

    logprobs: np.ndarray  # float32 [L]
    entropy: np.ndarray  # float32 [L]


@dataclass(frozen=True, slots=True, eq=False)
class StepReport:
    """The metrics of one training step, and every group that was decided in it."""

    step: int
    metrics: Mapping[str, float]
    groups: tuple[Group, ...] = field(repr=False)
    token_stats: Mapping[tuple[int, int], TokenStats] = field(repr=False)  # (serial, index) of each trained rollout
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class EvalSample:
    """One sample of an evaluation."""

    prompt: Prompt
    rollout: Rollout
    score: Score


@dataclass(frozen=True, slots=True, eq=False)
class EvalReport:
    """One evaluation of one dataset: its metrics and all its samples."""

    step: int
    name: str
    metrics: Mapping[str, float]
    samples: tuple[EvalSample, ...] = field(repr=False)

    @property
    def is_judged(self) -> bool:
        """Whether any response could be judged."""
        return any(sample.score.judged for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Event:
    """A warning, a resume, a stop, or something else that the reader of a run should know."""

    kind: EventKind
    message: str
    step: int


OnEvent = Callable[[EventKind, str], None]  # reports an event: its kind and message
