"""Build the judge that `reward.use` names: a rule, function, reward model or endpoint, or a weighted sum of them."""

from __future__ import annotations

import difflib
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit

from dapo.config import PYTHON, RewardConfig
from dapo.errors import RewardError, did_you_mean
from dapo.rewards.endpoint import MAX_IN_FLIGHT, EndpointJudge
from dapo.rewards.function import DOES_NOT_APPLY, FunctionJudge, RewardFunction, to_score, unjudged
from dapo.rewards.pool import WorkerPool
from dapo.rewards.protocol import Judge
from dapo.rewards.reward_model import RewardModelJudge
from dapo.rewards.rules import RULES
from dapo.rewards.sandbox.sandbox import DESCRIPTIONS, Sandbox
from dapo.rewards.signature import ANSWER_COLUMNS, TOKENS, Kind
from dapo.types import TERM, Prompt, Rollout, Score

# What Python programs give as rewards: a function object or what `reward.use` names, several, or several with weights.
RewardLike = RewardFunction | str
RewardFunctions = RewardLike | Sequence[RewardLike] | Mapping[RewardLike, float]


AUTO = "auto"
KINDS = f"{AUTO}, {', '.join(RULES)}, path/to/file.py:function, model:PATH or http://..."


def build_judge(options: RewardConfig, rewards: RewardFunctions | None = None) -> Judge:
    """Return the judge for these options. `rewards` replace `reward.use`; function objects run in this process."""
    functions: Mapping[str, RewardFunction] = {}
    if rewards is not None:
        use, functions = reward_terms(rewards)
        options = options.model_copy(update={"use": use})
    specs = judge_specs(options)
    for spec in specs:
        if spec not in functions:
            _check(spec)
    with ExitStack() as opened:  # if a later judge fails to open, close those before it
        pool = _pool(options)
        if pool is not None:
            opened.callback(pool.close)
        judges: list[Judge] = []
        for spec in specs:
            judges.append(
                FunctionJudge(functions[spec], options.timeout, options.think_tags)
                if spec in functions
                else _open(spec, options, pool)
            )
            opened.callback(judges[-1].close)
        opened.pop_all()
    if isinstance(options.use, str):
        return judges[0]
    names = short_names(specs)
    return WeightedSum([_Term(n, w, j) for n, w, j in zip(names, options.use.values(), judges, strict=True)])


def reward_terms(rewards: RewardFunctions) -> tuple[str | dict[str, float], dict[str, RewardFunction]]:
    """Return `reward.use` for what a Python program gives, and the function objects behind its `python:` names.

    Several rewards without weights have weight 1.
    """
    is_single = isinstance(rewards, str) or callable(rewards)
    several: Any = [rewards] if is_single else rewards
    if not isinstance(several, Iterable):
        raise RewardError(f"the reward is {several!r}; expected a function, a list of them, or a mapping to weights")
    if not several:
        raise RewardError("the list of reward functions is empty; expected at least one function")
    several = several if isinstance(several, Mapping) else [*several]
    for reward in several:
        if not isinstance(reward, str) and not callable(reward):
            raise RewardError(f"the list of rewards has a {type(reward).__name__}; expected a function, or {KINDS}")
    weights = several if isinstance(several, Mapping) else dict.fromkeys(several, 1.0)
    use: dict[str, float] = {}
    functions: dict[str, RewardFunction] = {}
    for reward, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise RewardError(f"the weight of the reward {_name(reward)} is {weight!r}; expected a number")
        spec = reward if isinstance(reward, str) else f"{PYTHON}{function_name(reward)}"
        if spec in use:
            spec = f"{spec} {len(use) + 1}"
        use[spec] = float(weight)
        if not isinstance(reward, str):
            functions[spec] = reward
    return (next(iter(use)) if is_single else use), functions


def _name(reward: RewardLike) -> str:
    return reward if isinstance(reward, str) else function_name(reward)


def function_name(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _pool(options: RewardConfig) -> WorkerPool | None:
    """Return the workers for rules and functions from files, or None if there are none."""
    local = [spec for spec in judge_specs(options) if not _is_url(spec) and not spec.startswith(("model:", PYTHON))]
    return WorkerPool(["math" if spec == AUTO else spec for spec in local], options) if local else None


def judge_kinds(options: RewardConfig, judge: Judge | None) -> list[tuple[str, Kind]]:
    """Return name and properties of each judge. `judge` None: it runs elsewhere, and is loaded here to inspect it."""
    if judge is None:
        pool = _pool(options.model_copy(update={"workers": 1}))
        if pool is not None:
            pool.close()
        kinds = [*pool.kinds.items()] if pool is not None else []
        return kinds + [(spec, Kind(sees=None)) for spec in judge_specs(options) if _is_url(spec)]
    if isinstance(judge, WeightedSum):
        return [pair for term in judge.terms for pair in judge_kinds(options, term.judge)]
    if isinstance(judge, FunctionJudge):
        return [(function_name(judge.reward.function), judge.reward.kind)]
    if isinstance(judge, PooledJudge):
        return [*judge.pool.kinds.items()]
    return [(judge.url, Kind(sees=None))] if isinstance(judge, EndpointJudge) else []


def columns_seen(kinds: Iterable[tuple[str, Kind]]) -> Collection[str] | None:
    """Return the columns, besides the gold answer, by which the judges can tell rows apart; None: all of them."""
    seen: set[str] = set()
    for _, kind in kinds:
        if kind.sees is None:
            return None
        seen.update(kind.sees)
    return seen


def check_columns(
    kinds: Iterable[tuple[str, Kind]], columns: Collection[str], *, has_answers: bool = True, has_tokens: bool = True
) -> None:
    """Raise if a reward function has a parameter that neither its convention nor a column of the data provides.

    `has_answers`: some rows have a gold answer.
    """
    given = {"prompt", *columns, *(["answer"] if has_answers else [])}
    known = ", ".join(sorted(given - {"data_source"}))
    for name, kind in kinds:
        if kind.gold is not None and not has_answers:
            raise RewardError(
                f"reward.use: {name} takes the gold answer as '{kind.gold}', but no row has one (columns: {known})"
                f"{_answer_hint(columns)}"
            )
        for column in kind.needs:
            if column == TOKENS and not has_tokens:
                raise RewardError(f"reward.use: {name} takes '{TOKENS}'; give them, or name the --model to count with")
            if column != TOKENS and column not in columns:
                raise RewardError(
                    f"reward.use: {name} takes '{column}', which is not a column of the data (columns: "
                    f"{known}); rename the parameter, give it a default, or add the column (data.columns "
                    "renames columns before the reward sees them)"
                )


def _answer_hint(columns: Collection[str]) -> str:
    """Name the column that is most likely the gold answer under another name."""
    if any(name in columns for name in ANSWER_COLUMNS):
        return ""  # they are all null
    found = [(close, name) for name in ANSWER_COLUMNS for close in difflib.get_close_matches(name, columns, n=1)]
    if found:
        (close, name) = max(found, key=lambda pair: difflib.SequenceMatcher(None, *pair).ratio())
        return f"; did you mean '{close}'? data.columns='{{{name}: {close}}}' renames it"
    return f"; name its column {', '.join(ANSWER_COLUMNS[:-1])} or {ANSWER_COLUMNS[-1]}, or rename it with data.columns"


def judge_specs(options: RewardConfig) -> list[str]:
    return [options.use] if isinstance(options.use, str) else [*options.use]


def isolation_note(options: RewardConfig, environment: str | None = None, *, is_judging: bool = True) -> str | None:
    """Say how programs are isolated on this machine, if the reward or the environment runs any here."""
    if environment != "python" and not (is_judging and "code" in judge_specs(options)):
        return None
    with closing(Sandbox(is_unsafe_allowed=options.code_unsafe)) as sandbox:
        sandbox.open()
        return DESCRIPTIONS[sandbox.isolation]


def uses_reward_model(options: RewardConfig) -> bool:
    return any(spec.startswith("model:") for spec in judge_specs(options))


def max_concurrent_groups(options: RewardConfig) -> int:
    """Return how many groups keep a judge busy: one per process plus one queued, or an endpoint's requests."""
    return MAX_IN_FLIGHT if any(map(_is_url, judge_specs(options))) else options.workers + 1


def _open(spec: str, options: RewardConfig, pool: WorkerPool | None) -> Judge:
    if _is_url(spec):
        return EndpointJudge(spec, options.timeout)
    if spec.startswith("model:"):
        return RewardModelJudge(spec.removeprefix("model:"), options.model)
    assert pool is not None
    return PooledJudge(pool, spec)


def _is_url(spec: str) -> bool:
    return spec.startswith(("http://", "https://"))


def check_judges(options: RewardConfig) -> None:
    """Raise if reward.use names something that is no judge."""
    for spec in judge_specs(options):
        _check(spec)


def _check(spec: str) -> None:
    """Raise if the spec names no kind of judge. Files and models are checked when they are opened."""
    kind, _, rest = spec.partition(":")
    if spec.startswith(PYTHON):
        raise RewardError(
            f"reward.use is '{spec}': the reward of this run was a Python function; pass it to Trainer again, or name "
            "it as path/to/file.py:function"
        )
    if _is_url(spec):
        return _check_url(spec)
    if spec == AUTO or spec in RULES or ".py" in spec:
        return None
    if kind == "model" and rest:
        return None
    hint = did_you_mean(spec, [AUTO, *RULES]) or ";"
    raise RewardError(f"reward.use is '{spec}', which is not a judge{hint} expected {KINDS}")


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0  # raises ValueError if the port is not a number
        reason = "it has no host" if not has_host else ""
    except ValueError as error:
        reason = str(error)
    if not url.isascii() or not url.isprintable() or " " in url:
        reason = "a URL has only ASCII characters and no spaces"
    if reason:
        raise RewardError(f"reward.use is {url!r}, which is not an endpoint URL ({reason})")


def short_names(specs: Sequence[str]) -> list[str]:
    """Return the recorded names of a sum's terms: short names where they are unique, else full specs."""
    names = [_short(spec) for spec in specs]
    count = Counter(names)
    return [name if count[name] == 1 else spec for name, spec in zip(names, specs, strict=True)]


def _short(spec: str) -> str:
    if _is_url(spec):
        return urlsplit(spec).hostname or spec
    if spec.startswith("model:"):
        return PurePath(spec.removeprefix("model:")).name
    return spec.rpartition(":")[2]


class PooledJudge:
    """One reward that runs in a pool's workers. `auto` is `gym` for reasoning-gym questions and `math` for others."""

    def __init__(self, pool: WorkerPool, spec: str) -> None:
        self.pool = pool
        self.spec = spec

    def submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Future[list[Score]]:
        spec = self.spec
        if spec == AUTO:
            spec = "gym" if prompt.data_source.startswith("gym:") else "math"
        return self.pool.submit(spec, prompt, rollouts)

    def close(self) -> None:
        self.pool.close()


@dataclass(frozen=True, slots=True)
class _Term:
    name: str
    weight: float
    judge: Judge


class WeightedSum:
    """Several judges whose scores are added. A response that one of them cannot judge is unjudged."""

    def __init__(self, terms: Sequence[_Term]) -> None:
        self.terms = terms

    def submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Future[list[Score]]:
        total: Future[list[Score]] = Future()
        total.set_running_or_notify_cancel()
        lock = threading.Lock()
        missing = len(self.terms)
        parts = [term.judge.submit(prompt, rollouts) for term in self.terms]

        def on_part_done(_: Future[list[Score]]) -> None:
            nonlocal missing
            with lock:
                missing -= 1
                is_last = missing == 0
            if is_last:
                columns = [part.result() for part in parts]
                total.set_result([self._add(scores) for scores in zip(*columns, strict=True)])

        for part in parts:
            part.add_done_callback(on_part_done)
        return total

    def _add(self, scores: Sequence[Score]) -> Score:
        value, acc, extras = 0.0, None, {}
        own_scores: dict[str, Any] = {}
        for term, score in zip(self.terms, scores, strict=True):
            if score.error == DOES_NOT_APPLY:
                continue
            if score.value is None:
                return unjudged(f"{term.name}: {score.error}")
            value += term.weight * score.value
            own_scores[f"{TERM}{term.name}"] = score.value
            acc = score.acc if acc is None else acc
            # Where two judges name the same extra, the first that is not None counts.
            extras = {**score.extras, **{k: v for k, v in extras.items() if v is not None}}
        if not own_scores:
            return unjudged(DOES_NOT_APPLY)
        return replace(to_score({"score": value, "acc": acc}), extras={**extras, **own_scores})

    def close(self) -> None:
        for term in self.terms:
            term.judge.close()
