"""Sample and score groups, turn by turn if an environment replies. Used by training and evaluation.

Without an environment, a response is one turn: requests and rollouts pass through.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dapo.config import Config
from dapo.engine.protocol import Engine
from dapo.environments.protocol import EnvironmentPool, Message, Reply
from dapo.errors import one_line
from dapo.model.template import TurnTemplate
from dapo.rewards.protocol import Judge
from dapo.system.progress import wait_visibly
from dapo.types import Ending, Extension, Phase, Prompt, Request, Rollout, SamplingParams, Score

Key = tuple[int, int]  # group serial and sample index
REWARD = "reward"  # of a turn, in its record


@dataclass(frozen=True, slots=True, eq=False)
class Environment:
    """The environments that reply to the model's turns, and the template that turns their messages into tokens."""

    pool: EnvironmentPool
    template: TurnTemplate | None  # None: an episode has one turn
    max_turn_tokens: int = 0  # 0: only the length of the whole response is limited

    @classmethod
    def of(cls, config: Config, pool: EnvironmentPool | None, tokenizer: Any) -> Environment | None:
        """Return None without a pool. Raises a ConfigError if the model's chat template cannot be continued."""
        if pool is None:
            return None
        template = None
        if config.environment.max_turns > 1:
            template = TurnTemplate(tokenizer, config.data.chat_template_kwargs, pool.tools)
        return cls(pool, template, config.environment.max_turn_tokens)

    def turn_limit(self, used: int, max_tokens: int) -> int:
        """Return the most tokens that the response may have after a turn that begins at `used` tokens."""
        return min(max_tokens, used + self.max_turn_tokens) if self.max_turn_tokens else max_tokens


@dataclass(slots=True, eq=False)
class _Group:
    """A group whose episodes have not all ended."""

    request: Request
    prompt: Prompt
    max_tokens: int  # of a whole response
    turns: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # by sample index, for the record
    running: set[int] = field(default_factory=set)  # sample indices


class _Asked(NamedTuple):
    """A turn that has ended, and the environment's reply to it."""

    rollout: Rollout
    turn: int  # counts from 1
    reply: Future[Reply]
    is_cut_off: bool  # there are no tokens left for another turn


class _MergedScores(Future[list[Score]]):
    """The scores of one group: from the environment where it gave one, otherwise from the judge.

    `result` waits on the judge's own future, because a remote judge reports events and faults only to a caller that
    waits there.
    """

    def __init__(
        self, rollouts: Sequence[Rollout], known: Mapping[int, Score | None], judged: Future[list[Score]] | None
    ) -> None:
        super().__init__()
        self.rollouts, self.known, self.judged = rollouts, known, judged

    def done(self) -> bool:
        return self.judged is None or self.judged.done()

    def result(self, timeout: float | None = None) -> list[Score]:
        rest = iter(self.judged.result(timeout) if self.judged is not None else ())
        return [_with_turns(self.known[rollout.index] or next(rest), rollout) for rollout in self.rollouts]


class Episodes:
    """Drives the episodes of all groups in flight.

    The environments work while the engine decodes. If the engine is repeatable, every reply is read after the next
    poll, even if it arrives earlier, so that the order of events depends on counts alone. With other engines, replies
    are read as they arrive.
    """

    def __init__(
        self,
        engine: Engine,
        judge: Judge,
        environment: Environment | None = None,
        on_wait: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.engine, self.judge, self.environment, self.on_wait = engine, judge, environment, on_wait
        self.groups: dict[int, _Group] = {}
        self.decoding: set[Key] = set()
        self.asked: dict[Key, _Asked] = {}  # in the order in which the turns ended
        self.scores: dict[Key, Score] = {}  # given by environments, until `score` takes them
        self.wait_seconds = 0.0  # spent waiting for replies with nothing to decode, since `take_wait`

    def submit(self, prompts: Mapping[int, Prompt], n: int, params: SamplingParams, phase: Phase = "train") -> None:
        """Begin to sample groups. `prompts` are by serial."""
        requests = [Request(serial, prompt.tokens, n, params, phase) for serial, prompt in prompts.items()]
        if self.environment is not None:
            first = replace(params, max_tokens=self.environment.turn_limit(0, params.max_tokens))
            requests = [replace(request, params=first, turns=True) for request in requests]
            for request in requests:
                group = _Group(request, prompts[request.serial], params.max_tokens, running=set(range(n)))
                self.groups[request.serial] = group
                self.decoding |= {(request.serial, index) for index in range(n)}
        self.engine.submit(requests)

    def poll(self) -> list[Rollout]:
        """Return the rollouts that ended since the last call, waiting for at least one unless nothing is in flight."""
        if self.environment is None:
            return self.engine.poll()
        ended: list[Rollout] = []
        while not ended and (self.decoding or self.asked):
            rollouts = self.engine.poll(wait=not self.asked) if self.decoding else []
            due = self._due()
            for rollout in rollouts:
                key, group = (rollout.serial, rollout.index), self.groups[rollout.serial]
                self.decoding.remove(key)
                if not rollout.given:
                    self.environment.pool.start(key, group.prompt)
                # A turn that ends exactly at the limit is complete. There is just no room for another one.
                is_cut_off = rollout.finish_reason == "length" and len(rollout) >= group.max_tokens
                self._ask(self.environment, rollout, len(rollout.given) + 1, is_cut_off=is_cut_off)
            ended += self._go_on(self.environment, due)
        return ended

    def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Future[list[Score]]:
        """Return the environments' scores, and the judge's for other rollouts. Rewards of turns are added to each."""
        known = {r.index: self.scores.pop((r.serial, r.index), None) for r in rollouts}
        others = [rollout for rollout in rollouts if known[rollout.index] is None]
        if self.environment is None and len(others) == len(rollouts):
            return self._submit(prompt, rollouts)
        return _MergedScores(rollouts, known, self._submit(prompt, others) if others else None)

    def _submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Future[list[Score]]:
        self.on_wait("waiting for rewards")  # a function given as an object is called at once, and may be slow
        return self.judge.submit(prompt, rollouts)

    def cancel(self, serials: Iterable[int]) -> None:
        gone = set(serials)
        self.engine.cancel(gone)
        if self.environment is None:
            return
        for serial in gone & self.groups.keys():
            for index in self.groups.pop(serial).running:
                self.environment.pool.end((serial, index))
        self.decoding = {key for key in self.decoding if key[0] not in gone}
        self.asked = {key: asked for key, asked in self.asked.items() if key[0] not in gone}
        self.scores = {key: score for key, score in self.scores.items() if key[0] not in gone}

    def take_wait(self) -> float:
        """Return the seconds spent waiting for environments since the last call."""
        seconds, self.wait_seconds = self.wait_seconds, 0.0
        return seconds

    def _ask(self, environment: Environment, rollout: Rollout, turn: int, *, is_cut_off: bool) -> None:
        """Let the environment reply to a turn, or end the episode if it is cut off."""
        key = rollout.serial, rollout.index
        call = environment.pool.cut_off if is_cut_off else environment.pool.reply
        self.asked[key] = _Asked(rollout, turn, call(key, rollout.text, turn), is_cut_off)

    def _due(self) -> list[Key]:
        """Return the turns whose replies are to be read now."""
        if self.engine.is_repeatable or not self.asked:
            return [*self.asked]
        if not self.decoding:
            self._wait([*self.asked], for_all=False)
        return [key for key, asked in self.asked.items() if asked.reply.done()]

    def _wait(self, keys: Sequence[Key], *, for_all: bool = True) -> None:
        assert self.environment is not None
        start = time.perf_counter()
        replies = [self.asked[key].reply for key in keys]
        wait_visibly(replies, self.on_wait, self.environment.pool.waiting_for, for_all=for_all, then="sampling")
        self.wait_seconds += time.perf_counter() - start

    def _go_on(self, environment: Environment, due: Sequence[Key]) -> list[Rollout]:
        """Continue the episodes whose replies are due, and return those that ended."""
        self._wait(due)
        ended: list[Rollout] = []
        extensions: list[Extension] = []
        for key in due:
            asked, group = self.asked.pop(key), self.groups[key[0]]
            rollout, (reply, tokens) = asked.rollout, self._read(environment, asked)
            used = len(rollout) + len(tokens)
            is_full = not reply.ended and used >= group.max_tokens  # no room for a token of the model
            turns = group.turns.setdefault(rollout.index, [])
            if len(turns) < asked.turn:
                turns.append(_record(rollout, reply, () if is_full else reply.messages))
            if reply.ended:
                ended.append(self._end(environment, group, asked, reply))
            elif is_full:
                self._ask(environment, rollout, asked.turn, is_cut_off=True)
            else:
                limit = environment.turn_limit(used, group.max_tokens)
                extensions.append(Extension(group.request, rollout, tokens, limit))
                self.decoding.add(key)
        if ended:
            self.engine.end([(rollout.serial, rollout.index) for rollout in ended])
        if extensions:
            self.engine.extend(extensions)
        return ended

    def _read(self, environment: Environment, asked: _Asked) -> tuple[Reply, tuple[int, ...]]:
        """Return a reply with the tokens to append. A template that rejects it ends the episode."""
        reply = asked.reply.result()
        if reply.ended:
            return reply, ()
        assert environment.template is not None, "the pool ends an episode after environment.max_turns"
        try:
            return reply, environment.template.between(reply.messages, int(asked.rollout.tokens[-1]))
        except Exception as error:  # templates raise any exception
            message = f"the model's chat template rejects the environment's messages ({one_line(error)})"
            return replace(reply, messages=(), ended=True, score=Score(None, error=message)), ()

    def _end(self, environment: Environment, group: _Group, asked: _Asked, reply: Reply) -> Rollout:
        rollout, key = asked.rollout, (asked.rollout.serial, asked.rollout.index)
        environment.pool.end(key)
        group.running.remove(rollout.index)
        if not group.running:
            del self.groups[rollout.serial]
        if reply.score is not None:
            self.scores[key] = reply.score
        # A turn that was cut off at environment.max_turn_tokens has ended like any other.
        reason = "length" if asked.is_cut_off else "stop"
        *turns, last = group.turns[rollout.index]
        return replace(rollout, turns=(*turns, {**last, "ended": _ending(asked, reply)}), finish_reason=reason)


def _ending(asked: _Asked, reply: Reply) -> Ending:
    if reply.score is not None and reply.score.error is not None:
        return Ending.FAILED
    if asked.is_cut_off:
        return Ending.NO_TOKENS
    return Ending.NO_TURNS if reply.is_out_of_turns else Ending.ENVIRONMENT


def _with_turns(score: Score, rollout: Rollout) -> Score:
    """Add the rewards of the turns to the episode's score, and record their sum as an extra."""
    rewards = [turn[REWARD] for turn in rollout.turns if REWARD in turn]
    if not rewards or score.value is None:
        return score
    return replace(score, value=score.value + sum(rewards), extras={**score.extras, "turn_rewards": sum(rewards)})


def _record(rollout: Rollout, reply: Reply, messages: Sequence[Message]) -> dict[str, Any]:
    reward = {} if reply.reward is None else {REWARD: reply.reward}
    return {
        "text": rollout.text,
        "messages": [dict(message) for message in messages],
        "seconds": reply.seconds,
        "calls": [call._asdict() for call in reply.calls],
        **reward,
    }
