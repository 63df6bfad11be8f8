"""A unit of judging work: what a worker gets in one message, its time limit, and what happens if the worker is lost."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from dapo.rewards.function import Sample, to_json, unjudged
from dapo.rewards.signature import Kind
from dapo.types import Prompt, Score

GRACE = 1.0  # seconds; async rewards time out inside the worker, so only one that blocks its loop runs this far over


@dataclass(slots=True, eq=False)
class Job:
    """The responses to one prompt, and the scores received so far."""

    spec: str
    kind: Kind
    prompt: Prompt
    samples: list[Sample]
    scores: dict[int, Score] = field(default_factory=dict)
    future: Future[list[Score]] = field(default_factory=Future)

    def fill(self, index: int, score: Score) -> None:
        """Record one score; the last one completes the future."""
        self.scores[index] = score
        if len(self.scores) == len(self.samples):
            self.future.set_result([self.scores[i] for i in range(len(self.samples))])


class Blame(NamedTuple):
    """The outcome of losing a worker: responses that become unjudged, and tasks to try again."""

    failed: list[int]
    retries: list[Task]


@dataclass(slots=True, eq=False)
class Task:
    """Responses of one job that are sent to a worker in one message.

    `indices`: the responses that have no score yet. `is_retry`: a worker was lost while judging these.
    """

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
            "opens_thought": prompt.opens_thought,
            "samples": [(index, *job.samples[index]) for index in self.indices],
        }
        return to_json(content).encode() + b"\n"

    def split(self, parts: int) -> list[Task]:
        """Split into at most `parts` near-equal tasks. A task for a batched reward stays whole: it is one call."""
        if self.job.kind.is_batched:
            return [self]
        size = -(-len(self.indices) // parts)
        shares = [self.indices[start : start + size] for start in range(0, len(self.indices), size)]
        return [Task(self.job, share, self.is_retry) for share in shares]

    def time_limit(self, timeout: float) -> float:
        """Return the seconds allowed from the begin message to the first score."""
        own = timeout * self.job.kind.patience * (len(self.indices) if self.job.kind.is_batched else 1)
        return own + GRACE if self.job.kind.is_async else own

    def timeout_reason(self, timeout: float) -> str:
        if not self.job.kind.is_batched:
            return f"timed out after {timeout * self.job.kind.patience:g} s"
        return f"timed out after {timeout * len(self.indices):g} s for {len(self.indices)} responses"

    def mark_unjudged(self, indices: list[int], reason: str) -> None:
        for index in indices:
            self.job.fill(index, unjudged(reason))

    def assign_blame(self, *, has_begun: bool, died: bool) -> Blame:
        """Decide which responses become unjudged after their worker died (`died`) or missed its deadline.

        Judged in sequence, the first response without a score is at fault. Judged concurrently (async), it can be any
        of them, so each is tried again alone. A death may have an outside cause, so only the second one counts.
        """
        kind = self.job.kind
        suspects, others = (
            (self.indices[:1], self.indices[1:]) if kind.is_sequential and has_begun else (self.indices, [])
        )
        retries = [Task(self.job, others)] if others else []
        if kind.is_async and not kind.is_batched and len(suspects) > 1:
            return Blame([], retries + [Task(self.job, [index], is_retry=True) for index in suspects])
        if died and not self.is_retry:
            return Blame([], [*retries, Task(self.job, suspects, is_retry=True)])
        return Blame(suspects, retries)
