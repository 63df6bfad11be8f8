"""Query the events of a run, and the reasons why responses could not be judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dapo.types import Severity, event_severity
from dapo.view.source import Run, placeholders


@dataclass(frozen=True, slots=True)
class EventRow:
    id: int
    step: int
    time: float  # seconds since 1970
    kind: str
    message: str

    @property
    def severity(self) -> Severity:
        return event_severity(self.kind)


@dataclass(frozen=True, slots=True)
class UnjudgedReason:
    """One reason why responses could not be judged: how many, and in which steps they were sampled."""

    reason: str
    responses: int
    first_step: int
    last_step: int


def newest_events(run: Run, kinds: Sequence[str] = (), limit: int = 100) -> list[EventRow]:
    """Return the newest events of the given kinds (empty: all), the newest first."""
    condition = f"kind IN ({placeholders(kinds)})" if kinds else "1"
    query = f"SELECT id, step, time, kind, message FROM events WHERE {condition} ORDER BY id DESC LIMIT ?"
    with run.snapshot() as database:
        return [EventRow(*row) for row in database.execute(query, (*kinds, limit))]


def event_kinds(run: Run) -> dict[str, int]:
    """Count the events by kind."""
    with run.snapshot() as database:
        return dict(map(tuple, database.execute("SELECT kind, count(*) FROM events GROUP BY kind LIMIT 1000")))


def unjudged(run: Run) -> list[UnjudgedReason]:
    """Return the 100 most frequent reasons, the most frequent first."""
    query = (
        "SELECT error, responses, earliest.generated_step, latest.generated_step FROM"
        " (SELECT error, count(*) AS responses, min(serial) AS low, max(serial) AS high FROM rollouts"
        "  WHERE error IS NOT NULL GROUP BY error ORDER BY responses DESC, error LIMIT 100)"
        " JOIN groups AS earliest ON earliest.serial = low JOIN groups AS latest ON latest.serial = high"
        " ORDER BY responses DESC, error"
    )
    with run.snapshot() as database:
        return [UnjudgedReason(*row) for row in database.execute(query)]
