"""A reward is a plain function `reward(completion, answer, **row)`; here it is found, called, and its answer judged."""

from __future__ import annotations

import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dapo.errors import RewardError
from dapo.types import Prompt, Rollout, Score

RewardFunction = Callable[..., Any]


def load_function(spec: str) -> RewardFunction:
    """`path/to/file.py:function`"""
    path, colon, name = spec.rpartition(":")
    if not colon or not path or not name:
        raise RewardError(f"reward.function is '{spec}'; expected path/to/file.py:function")
    if not Path(path).is_file():
        raise RewardError(f"reward.function: there is no file {path}; relative paths start at the working directory")
    module_spec = importlib.util.spec_from_file_location(f"dapo_reward_{Path(path).stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise RewardError(f"reward.function: {path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    # As if it were run from its folder: files beside it can be imported, and dataclasses find their module.
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise RewardError(f"reward.function: {path} cannot be imported ({type(error).__name__}: {error})") from error
    finally:
        sys.path.pop(0)
    function = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value)) or "none"
        raise RewardError(f"reward.function: {path} has no function '{name}'; there are: {there}")
    return function


class FunctionJudge:
    """Calls a reward with as much of the row as its signature takes. What it cannot judge gets a reason, not a 0."""

    def __init__(self, function: RewardFunction) -> None:
        self.function = function
        parameters = inspect.signature(function).parameters.values()
        self.takes_everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if not self.takes_everything and "completion" not in self.names:
            raise RewardError(
                f"the reward function takes ({', '.join(sorted(self.names))}); "
                "expected reward(completion, answer, **row)"
            )

    def __call__(self, prompt: Prompt, rollout: Rollout) -> Score:
        row = {
            **prompt.extra,
            "prompt": list(prompt.messages),
            "data_source": prompt.data_source,
            "completion": rollout.text,
            "answer": prompt.answer,
        }
        try:
            outcome = self.function(**{k: v for k, v in row.items() if self.takes_everything or k in self.names})
        except Exception as error:  # a user's code may raise anything: it costs this rollout, and is counted
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name}:{frame.lineno}"
            return Score(None, error=f"{type(error).__name__}: {error} ({place})")
        return to_score(outcome)


def to_score(outcome: Any) -> Score:
    """A number, or a mapping with `score` and optionally `acc` and named extras."""
    if not isinstance(outcome, Mapping):
        return _checked(outcome, None, {})
    if "score" not in outcome:
        return Score(None, error=f"the reward returned a dict without 'score' (keys: {', '.join(map(str, outcome))})")
    extras = {str(key): _plain(value) for key, value in outcome.items() if key not in ("score", "acc")}
    return _checked(outcome["score"], outcome.get("acc"), extras)


def _plain(value: Any) -> Any:
    """Extras are stored and checkpointed as JSON: plain values stay, array scalars become numbers, the rest text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return float(value) if isinstance(value, numbers.Real) else str(value)


def _checked(value: Any, acc: Any, extras: Mapping[str, Any]) -> Score:
    if not isinstance(value, numbers.Real):
        return Score(None, error=f"the reward returned {type(value).__name__}, not a number")
    if not math.isfinite(value):
        return Score(None, error=f"the reward returned {float(value)}")
    if acc is not None and acc not in (0, 1):
        return Score(None, error=f"the reward returned acc = {acc!r}, which must be 0 or 1")
    return Score(float(value), acc=None if acc is None else bool(acc), extras=extras)
