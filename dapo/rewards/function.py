"""Load a reward function, call it by whichever of three signatures it has, and validate what it returns."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import math
import numbers
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dapo.errors import RewardError
from dapo.rewards.thought import split_thought
from dapo.types import Prompt, Rollout, Score

RewardFunction = Callable[..., Any]

DOES_NOT_APPLY = "the reward does not apply here: it returned None"
CLOSED = "the judge was closed before it judged this response"
CLOSE_LIMIT = 5.0  # seconds that closing a judge waits for the calls in flight

# Scores are stored, checkpointed and sent between processes, so their size is bounded.
MAX_VALUE = 1e30  # its square, in the group's standard deviation, stays far below overflow
MAX_EXTRAS = 100
MAX_TEXT = 10_000  # characters of an extra
MAX_REASON = 500  # characters


class Sample(NamedTuple):
    """The part of a rollout that a reward function sees."""

    text: str
    tokens: Sequence[int] = ()


def load_function(spec: str) -> RewardFunction:
    """Import the function that `path/to/file.py:function` names."""
    path, colon, name = spec.rpartition(":")
    if not colon or not path or not name:
        raise RewardError(f"reward.use is '{spec}'; expected path/to/file.py:function")
    if not Path(path).is_file():
        raise RewardError(f"reward.use: there is no file {path}; relative paths start at the working directory")
    module_spec = importlib.util.spec_from_file_location(f"dapo_reward_{Path(path).stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise RewardError(f"reward.use: {path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    # Import as if the file were run from its own folder. Its functions can import files beside it, now and later, and
    # dataclasses find their module.
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RewardError(f"reward.use: {path} cannot be imported ({type(error).__name__}: {error})") from error
    function = getattr(module, name, None)
    if not callable(function):
        available = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value)) or "none"
        raise RewardError(f"reward.use: {path} has no function '{name}'; available: {available}")
    return function


class Reward:
    """A reward function with one of three signatures, called with the columns that it takes.

    - Ours: `reward(completion, answer, **row)`.
    - verl's: `compute_score(data_source, solution_str, ground_truth, extra_info=None)`.
    - TRL's: `f(prompts, completions, completion_ids=None, **columns)`, called once per group with lists. Prompts and
      completions are strings where the row's prompt was plain text, else lists of messages.

    The parameter names tell which one it is. A function of any signature can take `thought` and `reply`, the parts of
    the response (lists of them for TRL's). A response that cannot be judged gets a reason, not a score of 0.
    """

    def __init__(self, function: RewardFunction, think_tags: Sequence[str] | None = None) -> None:
        self.function = function
        self.think_tags = think_tags
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:
            raise RewardError(f"the reward {function!r} cannot be called as a function ({error})") from None
        self.takes_everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        # Arguments bound by partial; a column must not replace them.
        self.bound = set(function.keywords) if isinstance(function, partial) else set()
        self.is_batched = "completions" in self.names
        self.is_verl = "solution_str" in self.names and not self.is_batched
        self.is_async = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
        self.wants_tokens = self.is_batched and (self.takes_everything or "completion_ids" in self.names)
        if not (self.is_batched or self.is_verl or self.takes_everything or "completion" in self.names):
            raise RewardError(
                f"the reward function takes ({', '.join(sorted(self.names))}); expected reward(completion, answer, "
                "**row), compute_score(data_source, solution_str, ground_truth, extra_info) or f(completions, **row)"
            )

    def score(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Score]:
        """Call the function once: for one response, or for the whole group if it is batched."""
        try:
            return self._scores(self.function(**self._arguments(prompt, samples)), len(samples))
        except (Exception, SystemExit) as error:  # user code may raise anything: only these are unjudged
            return [unjudged(explain(error))] * len(samples)

    async def score_async(self, prompt: Prompt, samples: Sequence[Sample], timeout: float) -> list[Score]:
        clock = asyncio.timeout(timeout)
        try:
            async with clock:
                outcome = await self.function(**self._arguments(prompt, samples))
            return self._scores(outcome, len(samples))
        except (Exception, SystemExit) as error:
            reason = f"timed out after {timeout:g} s" if clock.expired() else explain(error)
            return [unjudged(reason)] * len(samples)

    def _arguments(self, prompt: Prompt, samples: Sequence[Sample]) -> dict[str, Any]:
        if self.is_batched:
            row = _columns(prompt, samples)
        elif self.is_verl:
            row = {
                "data_source": prompt.data_source,
                "solution_str": samples[0].text,
                "ground_truth": prompt.answer,
                "extra_info": prompt.extra.get("extra_info") or {},
            }
        else:
            row = {
                **prompt.extra,
                "prompt": list(prompt.messages),
                "data_source": prompt.data_source,
                "completion": samples[0].text,
                "answer": prompt.answer,
            }
        row |= self._parts(prompt, samples)
        taken = row if self.takes_everything else self.names & row.keys()
        return {name: row[name] for name in taken if name not in self.bound}

    def _parts(self, prompt: Prompt, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return what the function names of these: thought, reply, and whether the prompt opens a thought."""
        found: dict[str, Any] = {"opens_thought": prompt.opens_thought}
        if self.names & {"thought", "reply"}:
            splits = [split_thought(sample.text, self.think_tags, prompt.opens_thought) for sample in samples]
            thoughts, replies = zip(*splits, strict=True)
            found |= {"thought": list(thoughts), "reply": list(replies)}
            if not self.is_batched:
                found |= {"thought": thoughts[0], "reply": replies[0]}
        return {name: value for name, value in found.items() if name in self.names}

    def _scores(self, outcome: Any, n: int) -> list[Score]:
        if not self.is_batched:
            return [to_score(outcome)]
        values = list(outcome)
        if len(values) != n:
            raise ValueError(f"the reward returned {len(values)} scores for {n} completions")
        return [unjudged(DOES_NOT_APPLY) if value is None else to_score(value) for value in values]


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
    return {**columns, "completion_ids": [list(sample.tokens) for sample in samples], "trainer_state": None}


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
        if self.reward.is_async:
            self.loop = asyncio.new_event_loop()
            threading.Thread(target=self.loop.run_forever, name="dapo-reward", daemon=True).start()

    def submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Future[list[Score]]:
        samples = [Sample(rollout.text, rollout.tokens.tolist()) for rollout in rollouts]
        if self.loop is not None and not self.closed:
            return asyncio.run_coroutine_threadsafe(self._gather(prompt, samples), self.loop)
        future: Future[list[Score]] = Future()
        if self.closed:
            future.set_result([unjudged(CLOSED)] * len(samples))
        elif self.reward.is_batched:
            future.set_result(self.reward.score(prompt, samples))
        else:
            future.set_result([self.reward.score(prompt, [sample])[0] for sample in samples])
        return future

    async def _gather(self, prompt: Prompt, samples: list[Sample]) -> list[Score]:
        calls = [samples] if self.reward.is_batched else [[sample] for sample in samples]
        try:
            done = await asyncio.gather(
                *(self.reward.score_async(prompt, call, self.timeout * len(call)) for call in calls)
            )
        except asyncio.CancelledError:
            return [unjudged(CLOSED)] * len(samples)
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


def explain(error: BaseException) -> str:
    """Return the exception with the file and line that raised it."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    place = f"{Path(frame.f_code.co_filename).name}:{line}"
    if isinstance(error, MemoryError):
        return f"MemoryError: more than reward.memory_gb allows ({place})"
    try:
        message = str(error)
    except Exception:  # __str__ of a user's exception class may raise too
        message = "(its message cannot be shown)"
    return f"{type(error).__name__}: {message[:MAX_REASON]} ({place})"


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
    if getattr(value, "ndim", None) == 0:  # an array or tensor that holds one number
        value = value.item()
    if not isinstance(value, numbers.Real):
        return unjudged(f"the reward returned {type(value).__name__}, not a number")
    # In this form the check also catches NaN, and does not convert a huge integer to a float.
    if not (value <= MAX_VALUE and value >= -MAX_VALUE):  # pyright: ignore[reportOperatorIssue]
        shown = "an enormous number" if isinstance(value, numbers.Rational) else float(value)
        return unjudged(f"the reward returned {shown}; expected a finite number of at most {MAX_VALUE:g}")
    if acc is not None and acc not in (0, 1):
        return unjudged(f"the reward returned acc = {acc!r}, which must be 0 or 1")
    return Score(float(value), acc=None if acc is None else bool(acc), extras=extras)
