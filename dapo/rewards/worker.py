"""One judging process: it imports the rewards, judges what it is sent, and may be killed at any moment.

It speaks JSON lines over two pipes that are none of 0, 1 and 2. Standard output goes nowhere, so that printing costs
nothing; of standard error the pool keeps the last lines, which go into the reason if the process dies.
First comes {"specs", "options"}, answered by {"ready"} or {"refused"}. Each task is then answered by {"begin"} once all
that it needs is imported, and by one list [index, value, acc, error, extras] per response, as soon as it is judged.
"""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import importlib
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dapo.config import RewardConfig
from dapo.errors import RewardError
from dapo.rewards.function import Reward, RewardFunction, Sample, load_function, unjudged
from dapo.rewards.rules import RULES, make_rule
from dapo.types import Prompt, Score

MAX_LINE = 2**20

# What a rule imports at its first use, which may take longer than a response has.
_HEAVY = {"math": "math_verify", "gym": "reasoning_gym"}


def main(requests: int, answers: int, life: int) -> None:
    faulthandler.enable()
    for fd in (requests, answers, life):
        os.set_inheritable(fd, False)  # programs that a reward starts must not hold the pipes open
    _end_with(life)
    with os.fdopen(requests, "rb") as lines:
        setup = json.loads(lines.readline())
        options = RewardConfig.model_validate_json(setup["options"])
        _limit_memory(options.memory_gb)
        worker = Worker(options, answers)
        if worker.load_all(setup["specs"]):
            for line in lines:
                worker.handle(json.loads(line))
    os.killpg(os.getpid(), signal.SIGKILL)  # the pool is gone: take along whatever a reward has started


class Worker:
    def __init__(self, options: RewardConfig, answers: int) -> None:
        self.options = options
        self.answers = answers
        self.pid = os.getpid()
        self.rewards: dict[str, Reward] = {}
        self.loop = asyncio.new_event_loop()  # one for life: what an async reward keeps open belongs to its loop

    def load_all(self, specs: Sequence[str]) -> bool:
        """Say what kind of functions these are, or why they cannot be used."""
        try:
            rewards = {spec: self._load(spec) for spec in specs}
        except RewardError as error:
            self.send({"refused": f"{error}{self._memory_hint(str(error))}"})
            return False
        self.send({"ready": {spec: [r.is_batched, r.is_async, r.wants_tokens] for spec, r in rewards.items()}})
        return True

    def handle(self, task: Mapping[str, Any]) -> None:
        prompt = Prompt("", tuple(task["messages"]), (), task["answer"], task["source"], task["extra"], task["is_text"])
        indices = [index for index, *_ in task["samples"]]
        samples = [Sample(text, tokens) for _, text, tokens in task["samples"]]
        try:
            reward = self._load(task["spec"])
        except RewardError as error:
            self.send({"begin": len(samples)})
            self._report(indices, [unjudged(str(error))] * len(samples))
            return
        self.send({"begin": len(samples)})
        if reward.is_async:
            self.loop.run_until_complete(self._handle_async(reward, prompt, indices, samples))
        elif reward.is_batched:
            self._report(indices, reward.score(prompt, samples))
        else:
            for index, sample in zip(indices, samples, strict=True):
                self._report([index], reward.score(prompt, [sample]))

    async def _handle_async(self, reward: Reward, prompt: Prompt, indices: list[int], samples: list[Sample]) -> None:
        async def call(indices: list[int], samples: list[Sample]) -> None:
            timeout = self.options.timeout * len(samples)
            self._report(indices, await reward.score_async(prompt, samples, timeout))

        if reward.is_batched:
            await call(indices, samples)
        else:
            await asyncio.gather(*(call([i], [sample]) for i, sample in zip(indices, samples, strict=True)))

    def _load(self, spec: str) -> Reward:
        if spec not in self.rewards:
            self.rewards[spec] = Reward(_find(spec, self.options))
        return self.rewards[spec]

    def _memory_hint(self, sentence: str) -> str:
        is_memory = any(sign in sentence for sign in ("MemoryError", "failed to map", "Cannot allocate memory"))
        return f"; reward.memory_gb is {self.options.memory_gb:g}, perhaps too little" if is_memory else ""

    def _report(self, indices: list[int], scores: list[Score]) -> None:
        for index, score in zip(indices, scores, strict=True):
            self.send([index, score.value, score.acc, score.error, score.extras])

    def send(self, message: Any) -> None:
        if os.getpid() != self.pid:
            os._exit(0)  # a child that the reward forked, and that came back from it
        data = json.dumps(message).encode() + b"\n"
        if len(data) > MAX_LINE:
            index, *_ = message
            data = (
                json.dumps([index, None, None, f"the reward returned {len(data)} bytes of extras", {}]).encode() + b"\n"
            )
        while data:
            data = data[os.write(self.answers, data) :]


def _find(spec: str, options: RewardConfig) -> RewardFunction:
    if spec not in RULES:
        return load_function(spec)
    if spec in _HEAVY:
        with suppress(ImportError):  # the rule says what to install, if it comes to that
            importlib.import_module(_HEAVY[spec])
    return make_rule(spec, options)


def _end_with(life: int) -> None:
    """Have the kernel kill this process group when the training process, which holds the other end, is gone.

    The end of `requests` says so too, but a reward in an endless loop would not read it, a thread that did might never
    get the interpreter, and a signal at the parent's death would leave alone what the reward has started.
    """
    if sys.platform == "linux":
        fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([life], [], [], 0)[0]:
        sys.exit("the training process is gone")


def _limit_memory(gigabytes: float) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if gigabytes > 0:
        limit = int(gigabytes * 2**30)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
