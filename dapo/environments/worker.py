"""The worker process of environments: keeps the state of episodes and replies to turns. It may be killed at any time.

Protocol: the pool first sends {"options", "unsafe"}, and the worker answers {"ready"} or {"refused"}.
After that it answers each call with [number, result]. A call names its episode. If this worker does not hold the
episode, the call includes the row, the first messages and the turns so far, and the worker replays them. {"end"}
forgets an episode.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dapo.config import TOOLS, EnvironmentConfig
from dapo.environments.environment import (
    End,
    Environment,
    Maker,
    Turn,
    finished,
    first_messages,
    load_maker,
    take_calls,
    to_messages,
)
from dapo.environments.guess import Guess
from dapo.environments.protocol import Message
from dapo.environments.tools import python_maker, tools_maker
from dapo.errors import DapoError, EpisodeError
from dapo.rewards.function import explain, to_score
from dapo.rewards.worker_side import MAX_LINE, Channel, end_worker, limit_memory, memory_hint


def main(requests: int, answers: int, lifeline: int) -> None:
    channel = Channel(requests, answers, lifeline)
    setup = channel.receive()
    options = EnvironmentConfig.model_validate_json(setup["options"])
    limit_memory(options.memory_gb)
    try:
        maker = _load(options, is_unsafe_allowed=setup["unsafe"])
    except DapoError as error:
        channel.send({"refused": f"{error}{memory_hint(str(error), 'environment.memory_gb', options.memory_gb)}"})
    else:
        names = ("tools", "is_async", "patience", "reads_thoughts")
        channel.send({"ready": {name: getattr(maker, name) for name in names}})
        asyncio.run(Worker(maker, options.timeout, channel).serve())
    end_worker()


def _load(options: EnvironmentConfig, *, is_unsafe_allowed: bool) -> Maker:
    assert options.use is not None
    if options.use == "guess":
        return Maker(Guess, is_async=False)
    if options.use == "python":
        return python_maker(options.timeout, options.memory_gb, is_unsafe_allowed=is_unsafe_allowed)
    return tools_maker(options.use) if options.use.startswith(TOOLS) else load_maker(options.use)


class Worker:
    def __init__(self, maker: Maker, timeout: float, channel: Channel) -> None:
        self.maker, self.timeout, self.channel = maker, timeout, channel
        self.episodes: dict[str, Any] = {}
        self.tasks: set[asyncio.Task[None]] = set()  # the event loop itself holds only weak references

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        while (call := await loop.run_in_executor(None, self.channel.receive)) is not None:
            if "end" in call:
                self.episodes.pop(call["end"], None)
                continue
            task = loop.create_task(self._handle(call))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _handle(self, call: Mapping[str, Any]) -> None:
        start, replies = time.monotonic(), 1
        if "turns" in call:  # the episode begins again, and its turns are repeated
            replies += 1 + len(call["turns"])
        clock = asyncio.timeout(self.timeout * replies if self.maker.is_async else None)
        try:
            async with clock:
                result = await self._result(call)
        except (Exception, SystemExit) as error:  # user code may raise anything; it ends only this episode
            reason = explain(error, "environment.memory_gb")
            result = {"error": f"timed out after {self.timeout:g} s" if clock.expired() else reason}
        self.channel.send(
            [call["number"], {**result, "seconds": time.monotonic() - start}],
            lambda size: [
                call["number"],
                {"error": f"the environment returned {size:,} bytes, more than {MAX_LINE:,}", "seconds": 0.0},
            ],
        )

    async def _result(self, call: Mapping[str, Any]) -> dict[str, Any]:
        if call["do"] == "first":
            _, messages = await self._begin(call["row"])
            return {"messages": messages}
        if "row" in call:
            self.episodes[call["episode"]] = await self._replay(call["row"], call["first"], call["turns"])
        environment = self.episodes[call["episode"]]
        found = None
        if call["do"] == "reply":
            found = await finished(environment.reply(call["text"]))
        reward = _reward(found) if isinstance(found, Turn) else None
        is_cut_off = call["is_last"] and not isinstance(found, End)
        if is_cut_off:
            found = await self._cut_off(environment)
        rest = {"calls": [call._asdict() for call in take_calls(environment)], "reward": reward}
        if isinstance(found, End):
            return {"score": _score(found), "is_cut_off": is_cut_off, **rest}
        return {"messages": _messages(found), **rest}

    async def _begin(self, row: dict[str, Any]) -> tuple[Environment, tuple[Message, ...]]:
        own = [dict(message) for message in row["prompt"]]
        environment = self.maker.make(row)
        start = getattr(environment, "start", None)
        found = await finished(start()) if start is not None else None
        return environment, first_messages(found, own)

    async def _replay(self, row: dict[str, Any], first: Sequence[Message], turns: Sequence[Any]) -> Environment:
        """Begin an episode of a lost process again, and replay its turns."""
        environment, messages = await self._begin(row)
        if list(messages) != list(first):
            raise EpisodeError(
                "the environment begins the same row with other messages than before; derive them from the row"
            )
        for text, given in turns:
            if list(_messages(await finished(environment.reply(text)))) != given:
                raise EpisodeError(
                    "the process of this episode was lost, and the environment gave other replies when its turns were "
                    "repeated; derive replies from the row and the turns only"
                )
        take_calls(environment)  # they are recorded already
        return environment

    async def _cut_off(self, environment: Any) -> End:
        if not hasattr(environment, "cut_off"):
            return End(0.0, acc=False)
        found = await finished(environment.cut_off())
        if not isinstance(found, End):
            raise EpisodeError(f"cut_off returned {type(found).__name__}; expected End(score)")
        return found


def _messages(found: Any) -> tuple[Message, ...]:
    return to_messages(found.messages if isinstance(found, Turn) else found)


def _reward(turn: Turn) -> float:
    score = to_score({"score": turn.reward})
    if score.error is not None:
        raise EpisodeError(score.error.replace("the reward returned", "the environment rewarded a turn with", 1))
    assert score.value is not None
    return score.value


def _score(end: End) -> list[Any] | None:
    if end.score is None:
        if end.acc is not None or end.extras:
            raise EpisodeError("the environment ended with End(acc or extras) but no score; give End(score, ...)")
        return None
    score = to_score({**end.extras, "score": end.score, "acc": end.acc})
    error = score.error and score.error.replace("the reward returned", "the environment ended with", 1)
    return [score.value, score.acc, error, dict(score.extras)]
