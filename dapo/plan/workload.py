"""What a step of a recipe asks for: groups, tokens and lengths. Lengths are log-normal up to the limit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dapo.config import Config
from dapo.errors import ConfigError
from dapo.plan.hardware import JUDGE_SECONDS, JUDGES

SIGMA = 0.8  # ASSUMED spread of the logarithm: one response in twenty is then longer than 3.7 times the median
MEAN_SHARE = 0.25  # ASSUMED mean response, of the longest
MEAN_PROMPT = 256  # ASSUMED, at most max_prompt_length
KEEP_RATE = 0.5  # ASSUMED share of the groups that teach, where dynamic sampling is on
_GRID = 2000


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Of responses, by the share of them that is longer than each of some lengths."""

    at_K: np.ndarray  # the middles of equal steps from 0 to the longest
    longer_K: np.ndarray
    width: float

    @classmethod
    def of(cls, mean: float, longest: int, sigma: float = SIGMA) -> Lengths:
        """Log-normal and cut off at `longest`, with this mean after the cut."""
        width = longest / _GRID
        at_K = (np.arange(_GRID) + 0.5) * width
        low, high = math.log(1e-3), math.log(1e6 * longest)
        while high - low > 1e-9:  # the mean grows with the median
            middle = (low + high) / 2
            low, high = (middle, high) if _longer(at_K, middle, sigma).sum() * width < mean else (low, middle)
        return cls(at_K, _longer(at_K, high, sigma), width)

    @property
    def mean(self) -> float:
        return float(self.longer_K.sum() * self.width)

    @property
    def longest(self) -> float:
        return self.width * len(self.at_K)

    @property
    def mean_square(self) -> float:
        return float(2 * (self.at_K * self.longer_K).sum() * self.width)

    @property
    def mean_age(self) -> float:
        """How far a response is, on average, at a moment when all slots have long been busy."""
        return self.mean_square / (2 * self.mean)

    def longest_of(self, count: float) -> float:
        """What the longest of so many responses reaches on average."""
        return float(any_of(self.longer_K, count).sum() * self.width)


def any_of(share_K: np.ndarray, count: float) -> np.ndarray:
    """How likely it is of at least one of `count`, where it is true of a share of all."""
    return -np.expm1(count * np.log1p(-np.minimum(share_K, 1 - 1e-12)))


def _longer(at_K: np.ndarray, log_median: float, sigma: float) -> np.ndarray:
    z_K = (np.log(at_K) - log_median) / sigma
    return np.array([0.5 * math.erfc(z / math.sqrt(2)) for z in z_K])


@dataclass(frozen=True, slots=True)
class Workload:
    """One step on average. `rounds` holds the groups that each round of sampling submits."""

    n: int
    prompt: float
    lengths: Lengths
    longest: int  # of prompt and response together, that there must be room for
    rounds: tuple[float, ...]
    trained_groups: float
    updates: int  # optimizer steps of one epoch
    epochs: int
    concurrent: int  # responses that one engine decodes side by side
    is_inflight: bool
    max_staleness: int
    keep_rate: float
    judges: int
    judge_seconds: float

    @property
    def generated_tokens(self) -> float:
        return sum(self.rounds) * self.n * self.lengths.mean

    @property
    def trained_tokens(self) -> float:
        return self.trained_groups * self.n * self.lengths.mean


def workload(
    config: Config,
    *,
    mean_response: float | None = None,
    mean_prompt: float | None = None,
    keep_rate: float | None = None,
    judge_seconds: float = JUDGE_SECONDS,
) -> Workload:
    """Averages that are not given are assumed: a share of the limits, and of the groups."""
    data = config.data
    mean = MEAN_SHARE * data.max_response_length if mean_response is None else mean_response
    prompt = min(data.max_prompt_length, MEAN_PROMPT) if mean_prompt is None else mean_prompt
    _check("--mean-response", mean, data.max_response_length, "data.max_response_length")
    _check("--mean-prompt", prompt, data.max_prompt_length, "data.max_prompt_length")
    _check("--keep-rate", 1 if keep_rate is None else keep_rate, 1, "every group")
    if not config.algorithm.filter_groups.enable:
        keep_rate = 1.0
    keep = KEEP_RATE if keep_rate is None else keep_rate
    rounds, kept = _rounds(config, keep)
    return Workload(
        n=config.rollout.n,
        prompt=prompt,
        lengths=Lengths.of(mean, data.max_response_length),
        longest=data.max_prompt_length + data.max_response_length,
        rounds=rounds,
        trained_groups=kept,
        updates=math.ceil(kept / config.mini_batch_size),
        epochs=config.optim.ppo_epochs,
        concurrent=config.rollout.max_concurrent or 1024,
        is_inflight=config.rollout.mode == "inflight",
        max_staleness=config.algorithm.max_staleness,
        keep_rate=keep,
        judges=config.cluster.reward_workers * (config.reward.workers or 1) or config.reward.workers or JUDGES,
        judge_seconds=judge_seconds,
    )


def _check(option: str, value: float, most: float, what: str) -> None:
    if not 0 < value <= most:
        raise ConfigError(f"{option} is {value:g}, but must lie above 0 and not above {most:g} ({what})")


def _rounds(config: Config, keep: float) -> tuple[tuple[float, ...], float]:
    """The groups of each round, and how many are trained on. Surplus is carried over where the recipe allows it."""
    target, size = config.data.train_batch_size, config.gen_batch_size
    limit = config.algorithm.filter_groups.max_num_gen_batches
    needed = math.ceil(target / (keep * size) - 1e-9)
    if limit > 0 and needed > limit:
        return (float(size),) * limit, limit * size * keep
    if config.algorithm.max_staleness == 0:
        return (float(size),) * needed, float(target)
    # Only as many as are likely to be missing: what is kept beyond the batch is trained on in the next step.
    return (float(size),) * (needed - 1) + (target / keep - (needed - 1) * size,), float(target)
