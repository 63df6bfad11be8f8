"""A small deterministic environment that runs in threads of this process, for tests of what samples and trains."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dapo.environments.protocol import Episode, Message, Reply, ToolCall
from dapo.types import Prompt, Score


class Letters:
    """Tells the model how many letters its turn had. An episode ends with an even number of them, or at `max_turns`.

    The score is the number of letters of all turns. An odd serial has no score from here at its end: the judge decides.
    `reward`: of each letter, for its turn. `delay`: replies arrive after up to so many seconds, in any order.
    """

    tools: tuple[Mapping[str, Any], ...] = ()

    def __init__(
        self,
        max_turns: int = 4,
        delay: float = 0.0,
        reply: str = "{count} letters",
        role: str = "user",
        reward: float | None = None,
    ):
        self.max_turns, self.delay, self.text, self.role, self.reward = max_turns, delay, reply, role, reward
        self.threads = ThreadPoolExecutor(8)
        self.lock = threading.Lock()
        self.totals: dict[Episode, int] = {}
        self.ended: list[Episode] = []
        self.most_at_once = 0
        self.at_once = 0

    def first_messages(self, prompt: Prompt) -> Future[tuple[Message, ...]]:
        return self.threads.submit(lambda: prompt.messages)

    def start(self, episode: Episode, prompt: Prompt) -> None:
        assert episode not in self.totals, "an episode was started twice"
        self.totals[episode] = 0

    def reply(self, episode: Episode, text: str, turn: int) -> Future[Reply]:
        return self.threads.submit(self._reply, episode, text, turn)

    def cut_off(self, episode: Episode, text: str, turn: int) -> Future[Reply]:
        return self.threads.submit(lambda: Reply(ended=True, score=Score(-1.0, acc=False)))

    def waiting_for(self) -> str:
        return "letters"

    def end(self, episode: Episode) -> None:
        self.totals.pop(episode, None)
        self.ended.append(episode)

    def close(self) -> None:
        self.threads.shutdown()

    def _reply(self, episode: Episode, text: str, turn: int) -> Reply:
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(random.uniform(0, self.delay))
        with self.lock:
            self.at_once -= 1
        count = sum(character.isalpha() for character in text)
        total = self.totals[episode] = self.totals[episode] + count
        calls = (ToolCall("count", text, str(count), 0.0, count == 0),)
        if count % 2 == 0 or turn == self.max_turns:
            score = None if episode[0] % 2 else Score(float(total), acc=total > 3)
            return Reply(ended=True, is_out_of_turns=count % 2 == 1, score=score, seconds=0.25, calls=calls)
        reward = None if self.reward is None else self.reward * count
        message = {"role": self.role, "content": self.text.format(count=count)}
        return Reply((message,), seconds=0.25, calls=calls, reward=reward)
