"""The workload of one step: groups, tokens and response lengths, which are log-normal up to the limit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dapo.config import AUTO_WORKERS, Config
from dapo.errors import ConfigError
from dapo.plan.hardware import JUDGE_SECONDS

SIGMA = 0.8  # ASSUMED spread of the logarithm: one response in twenty is then longer than 3.7 times the median
MEAN_SHARE = 0.25  # ASSUMED mean response length, as a share of data.max_response_length
MEAN_PROMPT = 256  # ASSUMED tokens, but at most data.max_prompt_length
KEEP_RATE = 0.5  # ASSUMED share of groups that dynamic sampling keeps
_GRID = 2000  # number of lengths at which the distribution is tabulated


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Distribution of response lengths on a grid of K lengths. Expectations are integrals of P(length > x) over x."""

    at_K: np.ndarray  # grid: midpoints of K equal intervals from 0 to the longest
    longer_K: np.ndarray  # share of responses that are longer
    width: float  # of an interval, in tokens

    @classmethod
    def of(cls, mean: float, longest: int, sigma: float = SIGMA) -> Lengths:
        """Return a log-normal distribution cut off at `longest`, with this mean after the cut."""
        width = longest / _GRID
        at_K = (np.arange(_GRID) + 0.5) * width
        low, high = math.log(1e-3), math.log(1e6 * longest)
        while high - low > 1e-9:  # bisect the log of the median, with which the mean grows
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
        """Mean tokens generated so far by the responses in the slots, in the steady state: E[L^2] / (2 E[L])."""
        return self.mean_square / (2 * self.mean)

    def longest_of(self, count: float) -> float:
        """Return the expected length of the longest of `count` responses."""
        return float(any_of(self.longer_K, count).sum() * self.width)


def any_of(share_K: np.ndarray, count: float) -> np.ndarray:
    """Return 1 - (1 - share)^count: the probability that a property holds for any of `count`, given its share."""
    return -np.expm1(count * np.log1p(-np.minimum(share_K, 1 - 1e-12)))


def _longer(at_K: np.ndarray, log_median: float, sigma: float) -> np.ndarray:
    z_K = (np.log(at_K) - log_median) / sigma
    return np.array([0.5 * math.erfc(z / math.sqrt(2)) for z in z_K])


@dataclass(frozen=True, slots=True)
class Workload:
    """An average step."""

    n: int
    prompt: float  # mean tokens
    lengths: Lengths  # of responses
    longest: int  # most tokens of prompt and response together
    rounds: tuple[float, ...]  # groups submitted in each round of sampling
    trained_groups: float
    updates: int  # per epoch
    epochs: int
    concurrent: int  # most responses that one engine decodes at once
    is_inflight: bool
    max_staleness: int
    keep_rate: float
    judges: int
    judge_seconds: float
    uses_ledger: bool
    looks_ahead: bool  # which only a single process can

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
    """Return the workload of a recipe. Averages that are not given are assumed."""
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
        longest=config.longest,
        rounds=rounds,
        trained_groups=kept,
        updates=math.ceil(kept / config.mini_batch_size),
        epochs=config.optim.ppo_epochs,
        concurrent=config.concurrent,
        is_inflight=config.rollout.mode == "inflight",
        max_staleness=config.algorithm.max_staleness,
        keep_rate=keep,
        judges=config.cluster.reward_workers * (config.reward.workers or 1) or config.reward.workers or AUTO_WORKERS,
        judge_seconds=judge_seconds,
        uses_ledger=config.algorithm.ledger.enable,
        looks_ahead=config.algorithm.ledger.lookahead > 1,
    )


def _check(option: str, value: float, most: float, what: str) -> None:
    if not 0 < value <= most:
        raise ConfigError(f"{option} is {value:g}, but must be above 0 and at most {most:g} ({what})")


def _rounds(config: Config, keep: float) -> tuple[tuple[float, ...], float]:
    """Return the groups of each round, and how many are trained on. Surplus is carried over if the recipe allows it."""
    target, limit = config.data.train_batch_size, config.algorithm.filter_groups.max_num_gen_batches
    size = config.gen_batch_size if config.algorithm.max_staleness == 0 else config.largest_round
    needed = math.ceil(target / (keep * size) - 1e-9)
    most = limit * config.gen_batch_size
    if limit > 0 and needed * size > most:
        return _cut(most, size), min(float(target), most * keep)
    if config.algorithm.max_staleness == 0:
        return (float(size),) * needed, float(target)
    # With carry-over the rounds submit only the groups that the batch is expected to need.
    return _cut(target / keep, size), float(target)


def _cut(groups: float, size: int) -> tuple[float, ...]:
    """Cut into rounds of `size` groups and a rest."""
    whole = math.ceil(groups / size - 1e-9) - 1
    return (float(size),) * whole + (groups - whole * size,)
