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
    """One reason why responses could not be judged: how many, and the first and last of their groups."""

    reason: str
    responses: int
    first_serial: int
    last_serial: int
    first_step: int  # step in which the first of these groups was sampled
    last_step: int  # step in which the last one was


def events(
    run: Run, kinds: Sequence[str] = (), after: int | None = None, limit: int = 100, *, newest_first: bool = False
) -> list[EventRow]:
    """Return the events of the given kinds (empty: all) that come after the event with the id `after`."""
    side, order = ("<", "DESC") if newest_first else (">", "ASC")
    conditions = f"kind IN ({placeholders(kinds)})" if kinds else "1"
    if after is not None:
        conditions += f" AND id {side} {int(after)}"
    query = f"SELECT id, step, time, kind, message FROM events WHERE {conditions} ORDER BY id {order} LIMIT ?"
    with run.snapshot() as database:
        return [EventRow(*row) for row in database.execute(query, (*kinds, limit))]


def event_kinds(run: Run) -> dict[str, int]:
    """Count the events by kind."""
    with run.snapshot() as database:
        return dict(map(tuple, database.execute("SELECT kind, count(*) FROM events GROUP BY kind LIMIT 1000")))


def unjudged(run: Run, offset: int = 0, limit: int = 100) -> list[UnjudgedReason]:
    """Return the reasons, the most frequent first."""
    query = (
        "SELECT reasons.*, earliest.generated_step, latest.generated_step FROM"
        " (SELECT error, count(*) AS responses, min(serial) AS low, max(serial) AS high FROM rollouts"
        "  WHERE error IS NOT NULL GROUP BY error ORDER BY responses DESC, error LIMIT ? OFFSET ?) AS reasons"
        " JOIN groups AS earliest ON earliest.serial = low JOIN groups AS latest ON latest.serial = high"
        " ORDER BY responses DESC, error"
    )
    with run.snapshot() as database:
        return [UnjudgedReason(*row) for row in database.execute(query, (limit, offset))]
