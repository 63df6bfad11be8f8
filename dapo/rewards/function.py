"""Call a reward function by the convention that its signature follows, and validate what it returns."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import json
import math
import numbers
import os
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from dapo.errors import DapoError, RewardError
from dapo.rewards.signature import OURS, TOKENS, TRL, VERL_BATCHED, Signature, kind_of
from dapo.rewards.thought import split_thought
from dapo.types import METRIC, Prompt, Rollout, Score

RewardFunction = Callable[..., Any]

DOES_NOT_APPLY = "the reward does not apply here: it returned None"
JUDGE_CLOSED = "the judge was closed before it judged this response"
CLOSE_LIMIT = 5.0  # seconds that closing a judge waits for the calls in flight

# Scores are stored, checkpointed and sent between processes, so their size is bounded.
MAX_VALUE = 1e30  # its square, in the group's standard deviation, stays far below overflow
MAX_EXTRAS = 100
MAX_TEXT = 10_000  # characters of an extra
MAX_REASON = 500  # characters

# Folders of Python, of packages and of dapo, in which no file of the user is.
_INSTALLED = tuple(
    f"{folder}{os.sep}"
    for folder in (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), Path(__file__).parents[1])
)


class Sample(NamedTuple):
    """The part of a rollout that a reward function sees."""

    text: str
    tokens: Sequence[int] = ()
    version: int = 0  # of the weights that sampled it: the number of steps before


class Reward:
    """A reward function, called by whichever convention its parameter names follow.

    - Ours: `reward(completion, answer, **row)`.
    - verl's: `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, or batched
      `compute_score(data_sources, solution_strs, ground_truths, extra_infos)`.
    - TRL's: `f(prompts, completions, completion_ids=None, **columns)`, called once per group with lists. Prompts and
      completions are strings where the row's prompt was plain text, else lists of messages.

    A function of any signature can take `thought` and `reply`, the parts of the response (lists of them if it is called
    once per group). A response that cannot be judged gets a reason, not a score of 0.
    """

    def __init__(
        self, function: RewardFunction, think_tags: Sequence[str] | None = None, *, is_rule: bool = False
    ) -> None:
        self.function = function
        self.think_tags = think_tags
        self.signature = Signature.of(function)
        self.kind = kind_of(function, self.signature, is_rule=is_rule)

    def score(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Score]:
        """Call the function once: for one response, or for the whole group if it is batched."""
        log = _Log(len(samples))
        try:
            return self._scores(self.function(**self._arguments(prompt, samples, log)), log)
        except (Exception, SystemExit) as error:  # user code may raise anything: only these are unjudged
            return [unjudged(explain(error))] * len(samples)

    async def score_async(self, prompt: Prompt, samples: Sequence[Sample], timeout: float) -> list[Score]:
        log = _Log(len(samples))
        clock = asyncio.timeout(timeout)
        try:
            async with clock:
                outcome = await self.function(**self._arguments(prompt, samples, log))
            return self._scores(outcome, log)
        except (Exception, SystemExit) as error:
            reason = f"timed out after {timeout:g} s" if clock.expired() else explain(error)
            return [unjudged(reason)] * len(samples)

    def _arguments(self, prompt: Prompt, samples: Sequence[Sample], log: _Log) -> dict[str, Any]:
        convention = self.signature.convention
        if convention is TRL:
            row = _columns(prompt, samples) | {"log_extra": log.extra, "log_metric": log.metric}
        elif convention is OURS:
            row = {
                **prompt.extra,
                "prompt": list(prompt.messages),
                "data_source": prompt.data_source,
                "completion": samples[0].text,
                "answer": prompt.answer,
            }
        else:
            row = {
                "data_source": prompt.data_source,
                "solution_str": samples[0].text,
                "ground_truth": prompt.answer,
                "extra_info": dict(prompt.extra.get("extra_info") or {}),  # a copy, because functions add to it
            }
            if convention is VERL_BATCHED:
                row = {f"{name}s": [copy.copy(value) for _ in samples] for name, value in row.items()}
                row["solution_strs"] = [sample.text for sample in samples]
        return self.signature.select(row | self._parts(prompt, samples))

    def _parts(self, prompt: Prompt, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return what the function names of these: thought, reply, and whether the prompt opens a thought."""
        names, found = self.signature.names, {"opens_thought": prompt.opens_thought}
        if names & {"thought", "reply"}:
            splits = [split_thought(sample.text, self.think_tags, prompt.opens_thought) for sample in samples]
            thoughts, replies = zip(*splits, strict=True)
            found |= {"thought": list(thoughts), "reply": list(replies)}
            if not self.kind.is_batched:
                found |= {"thought": thoughts[0], "reply": replies[0]}
        return {name: value for name, value in found.items() if name in names}

    def _scores(self, outcome: Any, log: _Log) -> list[Score]:
        if not self.kind.is_batched:
            return [to_score(outcome)]
        if isinstance(outcome, str | Mapping) or not isinstance(outcome, Iterable):
            raise RewardError(
                f"{self._name()} returned {type(outcome).__name__}; expected a list, one score per completion"
            )
        values = list(outcome)
        if len(values) != log.size:
            raise RewardError(
                f"{self._name()} returned {len(values)} scores for {log.size} completions; expected one per completion"
            )
        return [self._batched_score(value, logged) for value, logged in zip(values, log.by_response(), strict=True)]

    def _name(self) -> str:
        """Return the function's name with its place in the user's file."""
        function = self.function
        inner = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
        code = getattr(inner, "__code__", None)
        name = getattr(inner, "__name__", type(inner).__name__)
        return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else name

    def _batched_score(self, value: Any, logged: Mapping[str, Any]) -> Score:
        number = _to_number(value)
        is_nan = isinstance(number, float) and math.isnan(number)
        if value is None or (is_nan and self.signature.convention is TRL):  # for TRL, NaN is None
            return unjudged(DOES_NOT_APPLY)
        return to_score({**logged, **(value if isinstance(value, Mapping) else {"score": value})})


class _Log:
    """Collects what a TRL function logs about one group: columns with a value per response, and metrics of the group.

    Both become extras of the scores. The name of a metric starts with METRIC.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.columns: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def extra(self, column: str, values: Iterable[Any]) -> None:
        found = list(values)
        if len(found) != self.size:
            raise ValueError(f"log_extra('{column}') got {len(found)} values for {self.size} completions")
        # The score's own entries cannot be logged over.
        self.columns[f"log/{column}" if column in ("score", "acc") else str(column)] = found

    def metric(self, name: str, value: float) -> None:
        self.metrics.setdefault(f"{METRIC}{name}", []).append(float(value))

    def by_response(self) -> list[dict[str, Any]]:
        means = {name: sum(values) / len(values) for name, values in self.metrics.items()}
        return [{name: values[i] for name, values in self.columns.items()} | means for i in range(self.size)]


def _to_number(value: Any) -> Any:
    """Return the number in an array or tensor that holds one; other values as they are."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _columns(prompt: Prompt, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the row in TRL's form: each column is a list with one entry per response."""
    row = {
        "answer": prompt.answer,
        "ground_truth": prompt.answer,
        "solution": prompt.answer,
        "data_source": prompt.data_source,
        **prompt.extra,
    }
    columns: dict[str, Any] = {name: [value] * len(samples) for name, value in row.items()}
    if prompt.is_text:
        columns["prompts"] = [prompt.messages[-1]["content"] for _ in samples]
        columns["completions"] = [sample.text for sample in samples]
    else:
        columns["prompts"] = [[dict(message) for message in prompt.messages] for _ in samples]
        columns["completions"] = [[{"role": "assistant", "content": sample.text}] for sample in samples]
    columns[TOKENS] = [list(sample.tokens) for sample in samples]
    # Of transformers' TrainerState only the step, for functions that change during a run.
    return {**columns, "trainer_state": SimpleNamespace(global_step=samples[0].version)}


class FunctionJudge:
    """Judges in the training process with a function that was passed as an object.

    A function object cannot be sent to another process. A sync function has no deadline. An async function has one: it
    runs in its own thread, a whole group concurrently.
    """

    def __init__(self, function: RewardFunction, timeout: float, think_tags: Sequence[str] | None = None) -> None:
        self.reward = Reward(function, think_tags)
        self.timeout = timeout
        self.loop: asyncio.AbstractEventLoop | None = None
        self.closed = False
        if self.reward.kind.is_async:
            self.loop = asyncio.new_event_loop()
            threading.Thread(target=self.loop.run_forever, name="dapo-reward", daemon=True).start()

    def submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Future[list[Score]]:
        samples = [Sample(r.text, r.tokens.tolist(), r.weight_version) for r in rollouts]
        if self.loop is not None and not self.closed:
            return asyncio.run_coroutine_threadsafe(self._gather(prompt, samples), self.loop)
        future: Future[list[Score]] = Future()
        if self.closed:
            future.set_result([unjudged(JUDGE_CLOSED)] * len(samples))
        elif self.reward.kind.is_batched:
            future.set_result(self.reward.score(prompt, samples))
        else:
            future.set_result([self.reward.score(prompt, [sample])[0] for sample in samples])
        return future

    async def _gather(self, prompt: Prompt, samples: list[Sample]) -> list[Score]:
        calls = [samples] if self.reward.kind.is_batched else [[sample] for sample in samples]
        try:
            done = await asyncio.gather(
                *(self.reward.score_async(prompt, call, self.timeout * len(call)) for call in calls)
            )
        except asyncio.CancelledError:
            return [unjudged(JUDGE_CLOSED)] * len(samples)
        return [score for scores in done for score in scores]

    def close(self) -> None:
        was_closed, self.closed = self.closed, True
        loop = self.loop
        if loop is not None and not was_closed:
            cancellation = asyncio.run_coroutine_threadsafe(_cancel_other_tasks(), loop)
            cancellation.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
            wait([cancellation], CLOSE_LIMIT)  # a function that blocks the loop is abandoned: its thread is a daemon


async def _cancel_other_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def unjudged(reason: str) -> Score:
    return Score(None, error=_truncate(reason, MAX_REASON))


def explain(error: BaseException, memory_option: str = "reward.memory_gb") -> str:
    """Return the exception with its place in the user's files; one of ours is a sentence by itself."""
    if isinstance(error, DapoError):
        return str(error)
    place = _place(error)
    if isinstance(error, MemoryError):
        return f"MemoryError: more than {memory_option} allows ({place})"
    try:
        message = str(error)
    except Exception:  # __str__ of a user's exception class may raise too
        message = "(its message cannot be shown)"
    return f"{type(error).__name__}: {message[:MAX_REASON]} ({place})"


def _place(error: BaseException) -> str:
    """Return the innermost file and line of the user; if there is none, the line that raised."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in places if not file.startswith(("<", *_INSTALLED))]
    file, line = (own or places)[-1]
    return f"{Path(file).name}:{line}"


def to_score(outcome: Any) -> Score:
    """Validate a function's result: a number, or a mapping with `score` and optionally `acc` and named extras."""
    if not isinstance(outcome, Mapping):
        return _validated(outcome, None, {})
    if "score" not in outcome:
        return unjudged(f"the reward returned a dict without 'score' (keys: {', '.join(map(str, outcome))})")
    if len(outcome) > MAX_EXTRAS:
        return unjudged(f"the reward returned a dict with {len(outcome)} entries, more than {MAX_EXTRAS}")
    extras = {
        _truncate(str(key), MAX_REASON): _to_plain_value(value)
        for key, value in outcome.items()
        if key not in ("score", "acc")
    }
    return _validated(outcome["score"], outcome.get("acc"), extras)


def to_json(value: Any) -> str:
    """Encode a row for a judge: arrays become lists, and values that JSON does not know become text."""
    return json.dumps(value, default=lambda other: other.tolist() if hasattr(other, "tolist") else str(other))


def _to_plain_value(value: Any) -> Any:
    """Convert an extra for JSON: plain values stay, array scalars become numbers, everything else becomes text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else str(float(value))
    return _truncate(value if isinstance(value, str) else str(value), MAX_TEXT)


def _truncate(text: str, limit: int) -> str:
    """Cut the text to `limit` characters and replace lone surrogates, which no file or database accepts."""
    text = text if len(text) <= limit else text[:limit] + "…"
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _validated(value: Any, acc: Any, extras: Mapping[str, Any]) -> Score:
    value, acc = _to_number(value), _to_number(acc)
    if not isinstance(value, numbers.Real):
        return unjudged(f"the reward returned {type(value).__name__}, not a number")
    # In this form the check also catches NaN, and does not convert a huge integer to a float.
    if not (value <= MAX_VALUE and value >= -MAX_VALUE):  # pyright: ignore[reportOperatorIssue]
        shown = "an enormous number" if isinstance(value, numbers.Rational) else float(value)
        return unjudged(f"the reward returned {shown}; expected a finite number of at most {MAX_VALUE:g}")
    if acc is None:
        return Score(float(value), extras=extras)
    if not isinstance(acc, numbers.Real) or not (acc >= 0 and acc <= 1):  # pyright: ignore[reportOperatorIssue]
        return unjudged(f"the reward returned acc = {acc!r}; expected a number from 0 to 1")
    return Score(float(value), acc=bool(acc) if acc in (0, 1) else float(acc), extras=extras)
