"""What a judging process is given at once, how long it may take, and who is to blame when the process is lost."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from dapo.rewards.function import Sample, to_json, unjudged
from dapo.types import Prompt, Score

GRACE = 1.0  # an async reward keeps its own deadline; only one that blocks its loop is late by this much


@dataclass(frozen=True, slots=True)
class Kind:
    """What a worker found a function to be: for all responses at once, async, in need of token ids."""

    is_batched: bool = False
    is_async: bool = False
    wants_tokens: bool = False

    @property
    def is_sequential(self) -> bool:
        return not self.is_batched and not self.is_async


@dataclass(slots=True, eq=False)
class Job:
    """The responses to one prompt, and what is known of their scores."""

    spec: str
    kind: Kind
    prompt: Prompt
    samples: list[Sample]
    scores: dict[int, Score] = field(default_factory=dict)
    future: Future[list[Score]] = field(default_factory=Future)

    def fill(self, index: int, score: Score) -> None:
        self.scores[index] = score
        if len(self.scores) == len(self.samples):
            self.future.set_result([self.scores[i] for i in range(len(self.samples))])


class Blame(NamedTuple):
    """After a loss: responses that could not be judged, and tasks to give to another process."""

    charged: list[int]
    again: list[Task]


@dataclass(slots=True, eq=False)
class Task:
    """Responses of one job that travel in one message, less those judged since. `is_retry`: a process died of it."""

    job: Job
    indices: list[int]
    is_retry: bool = False

    def message(self) -> bytes:
        job, prompt = self.job, self.job.prompt
        content = {
            "spec": job.spec,
            "messages": prompt.messages,
            "answer": prompt.answer,
            "source": prompt.data_source,
            "extra": prompt.extra,
            "is_text": prompt.is_text,
            "samples": [(index, *job.samples[index]) for index in self.indices],
        }
        return to_json(content).encode() + b"\n"

    def split(self, parts: int) -> list[Task]:
        """Into about equal parts; what is judged in one call stays together."""
        if self.job.kind.is_batched:
            return [self]
        size = -(-len(self.indices) // parts)
        shares = [self.indices[start : start + size] for start in range(0, len(self.indices), size)]
        return [Task(self.job, share, self.is_retry) for share in shares]

    def seconds(self, timeout: float) -> float:
        """From its beginning to the first sign of life."""
        own = timeout * len(self.indices) if self.job.kind.is_batched else timeout
        return own + GRACE if self.job.kind.is_async else own

    def late(self, timeout: float) -> str:
        if not self.job.kind.is_batched:
            return f"timed out after {timeout:g} s"
        return f"timed out after {timeout * len(self.indices):g} s for {len(self.indices)} responses"

    def charge(self, indices: list[int], reason: str) -> None:
        for index in indices:
            self.job.fill(index, unjudged(reason))

    def blame(self, *, has_begun: bool, died: bool) -> Blame:
        """Who could not be judged, now that the process died, or was killed because it was late.

        In a sequence it is the first without a score. Of those judged side by side it can be any: they are tried again
        one by one. A death may have come from outside, so it takes two of them.
        """
        kind = self.job.kind
        suspects, others = (
            (self.indices[:1], self.indices[1:]) if kind.is_sequential and has_begun else (self.indices, [])
        )
        again = [Task(self.job, others)] if others else []
        if kind.is_async and not kind.is_batched and len(suspects) > 1:
            return Blame([], again + [Task(self.job, [index], is_retry=True) for index in suspects])
        if died and not self.is_retry:
            return Blame([], [*again, Task(self.job, suspects, is_retry=True)])
        return Blame(suspects, again)
