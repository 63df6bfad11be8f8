"""Query the groups of a run: filtered pages of groups, and one group in full."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dapo.errors import CheckpointError
from dapo.store.encoding import from_json, messages_from_json, switches_from_json
from dapo.view.search import TextSearch
from dapo.view.source import Run

SEARCH_S = 0.5
_QUESTION = 300  # characters
_MAX_ROWS = 1_000  # verdicts, sources, or responses of a group: a page has no use for more
_CHUNK = 64  # groups searched together; older versions of SQLite accept at most 999 values in a query


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """Conditions on a group. Steps are those in which it was sampled; all bounds are inclusive."""

    first_step: int | None = None
    last_step: int | None = None
    verdicts: tuple[str, ...] = ()  # any of these; empty: all verdicts
    min_accuracy: float | None = None  # correct responses / responses that were judged correct or wrong
    max_accuracy: float | None = None
    data_source: str | None = None
    prompt_uid: str | None = None
    error: str | None = None  # at least one response could not be judged for this reason
    text: str = ""  # occurs in the prompt or a response, ignoring case


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One line about a group. Each mean is over the responses that have the value."""

    serial: int
    prompt_uid: str
    data_source: str
    question: str  # the beginning of the prompt's last message
    generated_step: int
    decided_step: int | None
    verdict: str
    responses: int
    judged: int
    accuracy: float | None
    reward: float | None
    length: float


@dataclass(frozen=True, slots=True)
class GroupPage:
    """One page of groups. A text search that ran out of time may have found few rows, or none, so far."""

    rows: tuple[GroupRow, ...]
    after: int | None  # serial after which the next page starts; None on the last page


@dataclass(frozen=True, slots=True)
class Response:
    sample: int
    text: str
    score: float | None
    acc: bool | None
    reward: float | None
    advantage: float | None
    trains: bool
    length: int
    finish_reason: str
    weight_version: int
    switches: tuple[int, ...]
    error: str | None
    extracted: str | None
    extras: Mapping[str, Any]
    has_tokens: bool

    @property
    def parts(self) -> tuple[str, str | None]:
        """Thought and reply. The thought is empty if there is none, and the reply None if the thought does not end."""
        start = self.extras.get("reply_start", 0)
        if start is None:
            return self.text, None
        if type(start) is not int or start < 0:  # not written by a run
            return "", self.text
        return self.text[:start], self.text[start:]


@dataclass(frozen=True, slots=True)
class GroupDetail:
    """Everything recorded about a group, except the per-token arrays."""

    serial: int
    prompt_uid: str
    data_source: str
    generated_step: int
    decided_step: int | None
    verdict: str
    messages: tuple[Mapping[str, Any], ...]
    answer: Any
    extra: Mapping[str, Any]
    responses: tuple[Response, ...]


def groups(
    run: Run,
    wanted: GroupFilter | None = None,
    after: int | None = None,
    limit: int = 50,
    *,
    newest_first: bool = False,
    search_seconds: float = SEARCH_S,
) -> GroupPage:
    """Return one page of groups in the order of their serials, starting after the serial `after`.

    A text search looks at the groups that meet the other conditions. It stops after about `search_seconds`, because a
    run may hold gigabytes of text. The page's `after` says where to continue.
    """
    wanted = wanted or GroupFilter()
    conditions, values = _conditions(wanted)
    if after is not None:
        conditions.append("serial < ?" if newest_first else "serial > ?")
        values.append(after)
    query = (
        f"SELECT serial, prompt_uid FROM groups WHERE {' AND '.join(conditions)}"
        f" ORDER BY serial {'DESC' if newest_first else 'ASC'}"
    )
    deadline = time.monotonic() + search_seconds
    found: list[int] = []
    with run.snapshot() as database:
        search = TextSearch(database, wanted.text)
        candidates = database.execute(query, values)
        while chunk := candidates.fetchmany(_CHUNK):
            hits = search.hits(chunk)
            for serial, _ in chunk:
                found += [serial] if serial in hits else []
                if len(found) >= limit:
                    return GroupPage(_rows(database, found), serial)
            if wanted.text and time.monotonic() > deadline:
                return GroupPage(_rows(database, found), chunk[-1]["serial"])
        return GroupPage(_rows(database, found), None)


def count_groups(run: Run, wanted: GroupFilter | None = None) -> int | None:
    """Count the groups that match; None for a text search, which would have to read every response."""
    wanted = wanted or GroupFilter()
    if wanted.text:
        return None
    conditions, values = _conditions(wanted)
    with run.snapshot() as database:
        # sum(1), not count(*): see dapo.view.source.read_progress.
        query = f"SELECT coalesce(sum(1), 0) FROM groups WHERE {' AND '.join(conditions)}"
        return database.execute(query, values).fetchone()[0]


def verdicts(run: Run) -> dict[str, int]:
    """Count the groups by verdict."""
    with run.snapshot() as database:
        query = f"SELECT verdict, count(*) FROM groups GROUP BY verdict ORDER BY verdict LIMIT {_MAX_ROWS}"
        return dict(map(tuple, database.execute(query)))


def data_sources(run: Run) -> list[str]:
    with run.snapshot() as database:
        query = f"SELECT DISTINCT data_source FROM prompts ORDER BY 1 LIMIT {_MAX_ROWS}"
        return [source for (source,) in database.execute(query)]


def extremes(run: Run, count: int) -> tuple[list[int], list[int]]:
    """Return the serials of the `count` groups with the highest mean reward, and of those with the lowest.

    The newest of equal groups come first. A group in the first list is left out of the second.
    """
    ranked = "SELECT serial FROM rollouts WHERE reward IS NOT NULL GROUP BY serial ORDER BY avg(reward) {}, serial DESC"
    with run.snapshot() as database:
        best, worst = (
            [serial for (serial,) in database.execute(f"{ranked.format(way)} LIMIT ?", (count,))]
            for way in ("DESC", "ASC")
        )
    return best, [serial for serial in worst if serial not in best]


def group(run: Run, serial: int) -> GroupDetail:
    with run.snapshot() as database:
        row = database.execute(
            "SELECT serial, prompt_uid, data_source, generated_step, decided_step, verdict, messages, answer, extra"
            " FROM groups JOIN prompts ON uid = prompt_uid WHERE serial = ?",
            (serial,),
        ).fetchone()
        if row is None:
            raise CheckpointError(f"{run.path}: there is no group {serial} (it may have been undone by a resume)")
        responses = database.execute(
            "SELECT *, EXISTS (SELECT 1 FROM rollout_tokens AS stored"
            "   WHERE (stored.serial, stored.sample) = (rollouts.serial, rollouts.sample)) AS has_tokens"
            f" FROM rollouts WHERE serial = ? ORDER BY sample LIMIT {_MAX_ROWS}",
            (serial,),
        )
        stored = {
            "messages": tuple(messages_from_json(row["messages"])),
            "answer": from_json(row["answer"], object),
            "extra": from_json(row["extra"], dict),
        }
        return GroupDetail(**{**dict(row), **stored}, responses=tuple(map(_response, responses)))


def question(messages: str) -> str:
    """Return the beginning of the last message. `messages` is JSON, as stored."""
    parsed = messages_from_json(messages)
    return str(parsed[-1].get("content", ""))[:_QUESTION] if parsed else ""


def _conditions(wanted: GroupFilter) -> tuple[list[str], list[Any]]:
    """Return the SQL conditions and their values for everything except the text."""
    accuracy = "(SELECT avg(acc) FROM rollouts WHERE rollouts.serial = groups.serial)"
    parts: list[tuple[str, tuple[Any, ...] | None]] = [
        ("generated_step >= ?", _optional(wanted.first_step)),
        ("generated_step <= ?", _optional(wanted.last_step)),
        (f"verdict IN ({', '.join('?' * len(wanted.verdicts))})", wanted.verdicts or None),
        (f"{accuracy} >= ?", _optional(wanted.min_accuracy)),
        (f"{accuracy} <= ?", _optional(wanted.max_accuracy)),
        ("prompt_uid IN (SELECT uid FROM prompts WHERE data_source = ?)", _optional(wanted.data_source)),
        ("prompt_uid = ?", _optional(wanted.prompt_uid)),
        ("serial IN (SELECT serial FROM rollouts WHERE error = ?)", _optional(wanted.error)),
    ]
    active = [(condition, values) for condition, values in parts if values is not None]
    return ["1", *(condition for condition, _ in active)], [value for _, values in active for value in values]


def _optional(value: Any) -> tuple[Any, ...] | None:
    """Wrap a condition's value; None means that the condition is not set."""
    return None if value is None else (value,)


def _rows(database: sqlite3.Connection, serials: list[int]) -> tuple[GroupRow, ...]:
    query = (
        "SELECT serial, prompt_uid, data_source, messages, generated_step, decided_step, verdict,"
        " count(*) AS responses, sum(error IS NULL) AS judged, avg(acc) AS accuracy, avg(reward) AS reward,"
        " avg(length) AS mean_length"
        " FROM groups JOIN prompts ON uid = prompt_uid JOIN rollouts USING (serial) WHERE serial = ? GROUP BY serial"
    )
    rows = [row for serial in serials for row in database.execute(query, (serial,))]
    return tuple(_row(**dict(row)) for row in rows)


def _row(messages: str, mean_length: float, **known: Any) -> GroupRow:
    return GroupRow(question=question(messages), length=mean_length, **known)


def _response(row: sqlite3.Row) -> Response:
    return Response(
        sample=row["sample"],
        text=row["text"],
        score=row["score"],
        acc=None if row["acc"] is None else bool(row["acc"]),
        reward=row["reward"],
        advantage=row["advantage"],
        trains=bool(row["trains"]),
        length=row["length"],
        finish_reason=row["finish_reason"],
        weight_version=row["weight_version"],
        switches=tuple(switches_from_json(row["switches"])),
        error=row["error"],
        extracted=row["extracted"],
        extras=from_json(row["extras"], dict),
        has_tokens=bool(row["has_tokens"]),
    )
