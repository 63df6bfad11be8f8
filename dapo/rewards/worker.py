"""The worker process: import the rewards and judge the tasks that the pool sends. It may be killed at any moment.

Protocol: the pool first sends {"specs", "options"}, and the worker answers {"ready"} or {"refused"}. For each task the
worker sends {"begin"} when its imports are done, then [index, value, acc, error, extras] for each judged response.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from typing import Any

from dapo.config import RewardConfig
from dapo.config.functions import load_function
from dapo.errors import RewardError
from dapo.rewards.function import Reward, RewardFunction, Sample, unjudged
from dapo.rewards.rules import RULES, make_rule
from dapo.rewards.worker_side import MAX_LINE, Channel, end_worker, limit_memory, memory_hint
from dapo.types import Prompt, Score

# Imported before {"begin"} is sent, because these imports can take longer than one response may.
_SLOW_IMPORTS = {"math": "mpmath", "gym": "reasoning_gym"}


def main(requests: int, answers: int, lifeline: int) -> None:
    channel = Channel(requests, answers, lifeline)
    setup = channel.receive()
    options = RewardConfig.model_validate_json(setup["options"])
    limit_memory(options.memory_gb)
    worker = Worker(options, channel)
    if worker.load_all(setup["specs"]):
        for task in channel.messages():
            worker.handle(task)
    end_worker()


class Worker:
    def __init__(self, options: RewardConfig, channel: Channel) -> None:
        self.options = options
        self.channel = channel
        self.rewards: dict[str, Reward] = {}
        # One loop for all tasks: connections that an async reward keeps open belong to it.
        self.loop = asyncio.new_event_loop()

    def load_all(self, specs: Sequence[str]) -> bool:
        """Load the rewards and report their properties, or why one cannot be used. Return whether all loaded."""
        try:
            rewards = {spec: self._load(spec) for spec in specs}
        except RewardError as error:
            hint = memory_hint(str(error), "reward.memory_gb", self.options.memory_gb)
            self.channel.send({"refused": f"{error}{hint}"})
            return False
        self.channel.send({"ready": {spec: astuple(reward.kind) for spec, reward in rewards.items()}})
        return True

    def handle(self, task: Mapping[str, Any]) -> None:
        row = (task[name] for name in ("answer", "source", "extra", "is_text", "opens_thought"))
        prompt = Prompt("", tuple(task["messages"]), (), *row)
        indices = [index for index, *_ in task["samples"]]
        samples = [Sample(*sample) for _, *sample in task["samples"]]
        try:
            reward = self._load(task["spec"])
        except RewardError as error:
            self.channel.send({"begin": len(samples)})
            self._report(indices, [unjudged(str(error))] * len(samples))
            return
        self.channel.send({"begin": len(samples)})
        if reward.kind.is_async:
            self.loop.run_until_complete(self._handle_async(reward, prompt, indices, samples))
        elif reward.kind.is_batched:
            self._report(indices, reward.score(prompt, samples))
        else:
            for index, sample in zip(indices, samples, strict=True):
                self._report([index], reward.score(prompt, [sample]))

    async def _handle_async(self, reward: Reward, prompt: Prompt, indices: list[int], samples: list[Sample]) -> None:
        async def call(indices: list[int], samples: list[Sample]) -> None:
            timeout = self.options.timeout * len(samples)
            self._report(indices, await reward.score_async(prompt, samples, timeout))

        if reward.kind.is_batched:
            await call(indices, samples)
        else:
            await asyncio.gather(*(call([i], [sample]) for i, sample in zip(indices, samples, strict=True)))

    def _load(self, spec: str) -> Reward:
        if spec not in self.rewards:
            function, tags = _find_function(spec, self.options), self.options.think_tags
            self.rewards[spec] = Reward(function, tags, is_rule=spec in RULES)
        return self.rewards[spec]

    def _report(self, indices: list[int], scores: list[Score]) -> None:
        for index, score in zip(indices, scores, strict=True):
            message = [index, score.value, score.acc, score.error, score.extras]
            self.channel.send(message, partial(_too_long, index))


def _too_long(index: int, size: int) -> list[Any]:
    return [index, None, None, f"the reward returned {size} bytes, more than {MAX_LINE}", {}]


def _find_function(spec: str, options: RewardConfig) -> RewardFunction:
    if spec not in RULES:
        return load_function(spec, "reward.use", RewardError)
    if spec in _SLOW_IMPORTS:
        with suppress(ImportError):  # the rule itself reports what to install
            importlib.import_module(_SLOW_IMPORTS[spec])
    return make_rule(spec, options)
