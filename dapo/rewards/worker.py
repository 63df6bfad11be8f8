"""The worker process: import the rewards and judge the tasks that the pool sends. It may be killed at any moment.

Messages are JSON lines over two pipes of their own. Standard output is discarded. The pool keeps the tail of standard
error and puts it into the reason if the process dies.

Protocol: the pool first sends {"specs", "options"}, and the worker answers {"ready"} or {"refused"}. For each task the
worker sends {"begin"} when its imports are done, then [index, value, acc, error, extras] for each judged response.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import json
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from typing import Any

from dapo.config import RewardConfig
from dapo.config.functions import load_function
from dapo.errors import RewardError
from dapo.rewards.code import CodeRule
from dapo.rewards.function import Reward, RewardFunction, Sample, unjudged
from dapo.rewards.rules import RULES, make_rule
from dapo.system.lifeline import die_with_parent
from dapo.types import Prompt, Score

MAX_LINE = 2**20  # bytes

# Imported before {"begin"} is sent, because these imports can take longer than one response may.
_SLOW_IMPORTS = {"math": "mpmath", "gym": "reasoning_gym"}


def main(requests: int, answers: int, lifeline: int) -> None:
    faulthandler.enable()
    for fd in (requests, answers, lifeline):
        os.set_inheritable(fd, False)  # a program that a reward starts must not keep the pipes open
    die_with_parent(lifeline)
    with os.fdopen(requests, "rb") as lines:
        setup = json.loads(lines.readline())
        options = RewardConfig.model_validate_json(setup["options"])
        _limit_memory(options.memory_gb)
        worker = Worker(options, answers)
        if worker.load_all(setup["specs"]):
            for line in lines:
                worker.handle(json.loads(line))
    os.killpg(os.getpid(), signal.SIGKILL)  # the pool has closed the pipe: kill this process and everything it started


class Worker:
    def __init__(self, options: RewardConfig, answers: int) -> None:
        self.options = options
        self.answers = answers
        self.pid = os.getpid()
        self.rewards: dict[str, Reward] = {}
        # One loop for all tasks: connections that an async reward keeps open belong to it.
        self.loop = asyncio.new_event_loop()

    def load_all(self, specs: Sequence[str]) -> bool:
        """Load the rewards and report their properties, or why one cannot be used. Return whether all loaded."""
        try:
            rewards = {spec: self._load(spec) for spec in specs}
        except RewardError as error:
            self.send({"refused": f"{error}{self._memory_hint(str(error))}"})
            return False
        self.send({"ready": {spec: astuple(reward.kind) for spec, reward in rewards.items()}})
        return True

    def handle(self, task: Mapping[str, Any]) -> None:
        prompt = Prompt(
            "",
            tuple(task["messages"]),
            (),
            task["answer"],
            task["source"],
            task["extra"],
            task["is_text"],
            task["opens_thought"],
        )
        indices = [index for index, *_ in task["samples"]]
        samples = [Sample(*sample) for _, *sample in task["samples"]]
        try:
            reward = self._load(task["spec"])
        except RewardError as error:
            self.send({"begin": len(samples)})
            self._report(indices, [unjudged(str(error))] * len(samples))
            return
        self.send({"begin": len(samples)})
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

    def _memory_hint(self, sentence: str) -> str:
        is_memory = any(sign in sentence for sign in ("MemoryError", "failed to map", "Cannot allocate memory"))
        return f"; reward.memory_gb is {self.options.memory_gb:g}, perhaps too little" if is_memory else ""

    def _report(self, indices: list[int], scores: list[Score]) -> None:
        for index, score in zip(indices, scores, strict=True):
            self.send([index, score.value, score.acc, score.error, score.extras])

    def send(self, message: Any) -> None:
        if os.getpid() != self.pid:
            os._exit(0)  # a child that the reward forked, and that returned from the reward
        data = json.dumps(message).encode() + b"\n"
        if len(data) > MAX_LINE:
            index, *_ = message
            data = (
                json.dumps(
                    [index, None, None, f"the reward returned {len(data)} bytes, more than {MAX_LINE}", {}]
                ).encode()
                + b"\n"
            )
        while data:
            data = data[os.write(self.answers, data) :]


def _find_function(spec: str, options: RewardConfig) -> RewardFunction:
    if spec not in RULES:
        return load_function(spec, "reward.use", RewardError)
    if spec in _SLOW_IMPORTS:
        with suppress(ImportError):  # the rule itself reports what to install
            importlib.import_module(_SLOW_IMPORTS[spec])
    rule = make_rule(spec, options)
    if isinstance(rule, CodeRule):
        rule.sandbox.open()  # refuses to run without isolation
    return rule


def _limit_memory(gigabytes: float) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dumps
    if gigabytes > 0:
        limit = int(gigabytes * 2**30)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
