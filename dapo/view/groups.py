"""Query the groups of a run: filtered pages of groups, and one group in full."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dapo.errors import CheckpointError
from dapo.store.encoding import from_json, messages_from_json, switches_from_json, to_json, turns_from_json
from dapo.view.source import Run, placeholders

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


_ALL = GroupFilter()


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
    turns: tuple[
        Mapping[str, Any], ...
    ]  # of an episode: the model's text, what the environment gave, and calls of tools
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
    wanted: GroupFilter = _ALL,
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
    conditions, values = _conditions(wanted)
    if after is not None:
        conditions += f" AND serial {'<' if newest_first else '>'} ?"
        values.append(after)
    order = "DESC" if newest_first else "ASC"
    query = f"SELECT serial, prompt_uid FROM groups WHERE {conditions} ORDER BY serial {order}"
    deadline = time.monotonic() + search_seconds
    found: list[int] = []
    with run.snapshot() as database:
        search = _TextSearch(database, wanted.text)
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


def count_groups(run: Run, wanted: GroupFilter = _ALL) -> int | None:
    """Count the groups that match; None for a text search, which would have to read every response."""
    if wanted.text:
        return None
    conditions, values = _conditions(wanted)
    with run.snapshot() as database:
        # sum(1), not count(*): see dapo.view.source.read_progress.
        return database.execute(f"SELECT coalesce(sum(1), 0) FROM groups WHERE {conditions}", values).fetchone()[0]


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
            "SELECT sample, text, score, acc, reward, advantage, trains, length, finish_reason, weight_version,"
            "   switches, error, extracted, extras, turns, EXISTS (SELECT 1 FROM rollout_tokens AS stored"
            "   WHERE (stored.serial, stored.sample) = (rollouts.serial, rollouts.sample)) AS has_tokens"
            f" FROM rollouts WHERE serial = ? ORDER BY sample LIMIT {_MAX_ROWS}",
            (serial,),
        )
        decoded = {
            "messages": tuple(messages_from_json(row["messages"])),
            "answer": from_json(row["answer"], object),
            "extra": from_json(row["extra"], dict),
            "responses": tuple(map(_response, responses)),
        }
        return GroupDetail(**{**dict(row), **decoded})


def group_json(found: GroupDetail) -> str:
    """Return the group as strict JSON. NaN and infinities become strings, as in the database."""
    return to_json(asdict(found))


def question(messages: str) -> str:
    """Return the beginning of the last message. `messages` is JSON, as stored."""
    parsed = messages_from_json(messages)
    return str(parsed[-1].get("content", ""))[:_QUESTION] if parsed else ""


def _conditions(wanted: GroupFilter) -> tuple[str, list[Any]]:
    """Return an SQL condition and its values for everything except the text."""
    accuracy = "(SELECT avg(acc) FROM rollouts WHERE rollouts.serial = groups.serial)"
    optional = {
        "generated_step >= ?": wanted.first_step,
        "generated_step <= ?": wanted.last_step,
        f"{accuracy} >= ?": wanted.min_accuracy,
        f"{accuracy} <= ?": wanted.max_accuracy,
        "prompt_uid IN (SELECT uid FROM prompts WHERE data_source = ?)": wanted.data_source,
        "prompt_uid = ?": wanted.prompt_uid,
        "serial IN (SELECT serial FROM rollouts WHERE error = ?)": wanted.error,
    }
    active = {condition: value for condition, value in optional.items() if value is not None}
    verdicts = [f"verdict IN ({placeholders(wanted.verdicts)})"] if wanted.verdicts else []
    return " AND ".join(["1", *verdicts, *active]), [*wanted.verdicts, *active.values()]


def _rows(database: sqlite3.Connection, serials: list[int]) -> tuple[GroupRow, ...]:
    query = (
        "SELECT serial, prompt_uid, data_source, messages, generated_step, decided_step, verdict,"
        " count(*) AS responses, sum(error IS NULL) AS judged, avg(acc) AS accuracy, avg(reward) AS reward,"
        " avg(length) AS mean_length"
        " FROM groups JOIN prompts ON uid = prompt_uid JOIN rollouts USING (serial) WHERE serial = ? GROUP BY serial"
    )
    rows = [dict(row) for serial in serials for row in database.execute(query, (serial,))]
    return tuple(GroupRow(question=question(row.pop("messages")), length=row.pop("mean_length"), **row) for row in rows)


def _response(row: sqlite3.Row) -> Response:
    decoded = {
        "acc": None if row["acc"] is None else row["acc"] == 1,
        "trains": bool(row["trains"]),
        "switches": tuple(switches_from_json(row["switches"])),
        "extras": from_json(row["extras"], dict),
        "turns": tuple(turns_from_json(row["turns"])),
        "has_tokens": bool(row["has_tokens"]),
    }
    return Response(**{**dict(row), **decoded})


class _TextSearch:
    """A case-insensitive substring search.

    It runs in Python: SQLite's LIKE is hardly faster, stops at a NUL, ignores case only in ASCII, and would see prompts
    as escaped JSON. A full-text index would be larger than the text and slow down training.
    """

    def __init__(self, database: sqlite3.Connection, text: str) -> None:
        self.database = database
        self.needle = text.lower()
        self.by_prompt: dict[str, bool] = {}  # whether the prompt has the text, by its uid

    def hits(self, chunk: Sequence[sqlite3.Row]) -> set[int]:
        """Return the serials of the groups in `chunk` that have the text."""
        if not self.needle:
            return {row["serial"] for row in chunk}
        unsearched = list({row["prompt_uid"] for row in chunk} - self.by_prompt.keys())
        for uid, messages in self._select("uid, messages FROM prompts WHERE uid", unsearched):
            contents = (str(message.get("content", "")) for message in messages_from_json(messages))
            self.by_prompt[uid] = any(self.needle in content.lower() for content in contents)
        in_prompt = {row["serial"] for row in chunk if self.by_prompt.get(row["prompt_uid"])}
        others = [row["serial"] for row in chunk if row["serial"] not in in_prompt]
        responses = self._select("serial, text, turns FROM rollouts WHERE serial", others)
        return in_prompt | {serial for serial, text, turns in responses if self._is_in(text, turns)}

    def _is_in(self, text: str, turns: str) -> bool:
        if self.needle in text.lower():
            return True
        for turn in turns_from_json(turns):  # the text of an episode is its last turn
            said = [turn["text"], *(str(message.get("content", "")) for message in turn["messages"])]
            if any(self.needle in each.lower() for each in said):
                return True
        return False

    def _select(self, columns: str, keys: Sequence[Any]) -> sqlite3.Cursor:
        return self.database.execute(f"SELECT {columns} IN ({placeholders(keys)})", keys)
