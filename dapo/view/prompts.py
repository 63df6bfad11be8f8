"""Rank prompts by their pass rates over a run (hardest, solved, flickering), and return the history of one."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from dapo.view.groups import question
from dapo.view.source import Progress, Run, read_progress

Order = Literal["hardest", "solved", "flickering"]

_GROUPS = """
SELECT prompt_uid, correct, answers FROM groups
JOIN (SELECT serial, sum(acc) AS correct, count(acc) AS answers FROM rollouts GROUP BY serial) USING (serial)
WHERE answers > 0 ORDER BY prompt_uid, generated_step, serial
"""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One line about a prompt. Pass rates count only the responses that were judged correct or wrong."""

    uid: str
    data_source: str
    question: str
    groups: int
    responses: int
    pass_rate: float
    first_pass_rate: float  # of its first group
    last_pass_rate: float  # of its last group
    solved_in_a_row: int  # latest consecutive groups in which every response was correct
    flips: int  # how often it changed from mostly correct to mostly wrong, or back


@dataclass(frozen=True, slots=True)
class PromptPage:
    rows: tuple[PromptRow, ...]
    total: int  # prompts on all pages


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """One group of a prompt."""

    serial: int
    step: int
    verdict: str
    judged: int
    pass_rate: float | None
    mean_score: float | None


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Statistics of all prompts, one array element per prompt."""

    uids: list[str]
    groups: np.ndarray
    responses: np.ndarray
    pass_rate: np.ndarray
    first: np.ndarray
    last: np.ndarray
    solved: np.ndarray
    flips: np.ndarray


_cache: dict[tuple[Path, int, Progress], _Table] = {}  # by path, inode and progress; holds one table


def prompts(run: Run, order: Order, offset: int = 0, limit: int = 50) -> PromptPage:
    """Return one page of prompts: lowest pass rate, longest solved, or most flips first."""
    if order not in get_args(Order):
        raise ValueError(f"there is no order '{order}'")
    with run.snapshot() as database:
        table = _cached_table(run, database)
        if order == "hardest":
            ranks, members = np.lexsort((-table.groups, table.pass_rate)), table.pass_rate < 1
        elif order == "solved":
            ranks, members = np.lexsort((-table.pass_rate, -table.solved)), table.solved > 0
        else:
            ranks, members = np.lexsort((table.groups, -table.flips)), table.flips > 0
        ranks = ranks[members[ranks]]
        rows = tuple(_row(database, table, int(index)) for index in ranks[offset : offset + limit])
        return PromptPage(rows, len(ranks))


def history(run: Run, uid: str, offset: int = 0, limit: int = 1000) -> list[HistoryPoint]:
    """Return the groups of one prompt in the order of their steps."""
    # The same as the SQL view prompt_history, which would aggregate the groups of all prompts first.
    query = (
        "SELECT serial, generated_step, verdict, sum(error IS NULL), avg(acc), avg(score)"
        " FROM groups JOIN rollouts USING (serial) WHERE prompt_uid = ?"
        " GROUP BY generated_step, serial ORDER BY generated_step, serial LIMIT ? OFFSET ?"
    )
    with run.snapshot() as database:
        return [HistoryPoint(*row) for row in database.execute(query, (uid, limit, offset))]


def _cached_table(run: Run, database: sqlite3.Connection) -> _Table:
    """Return the table of statistics, computed again only when something new was recorded.

    It takes about a second for a long run, and every page and order needs the same one.
    """
    key = run.path, run.path.stat().st_ino, read_progress(database)
    table = _cache.get(key)
    if table is None:
        table = _table(database)
        _cache.clear()  # keeps one table; safe if another thread does the same now
        _cache[key] = table
    return table


def _table(database: sqlite3.Connection) -> _Table:
    # Rows are groups sorted by prompt. starts[p] and ends[p] bound the rows of prompt p.
    rows = database.execute(_GROUPS).fetchall()
    uids = [row[0] for row in rows]
    correct, answers = (np.array([row[column] for row in rows], dtype=np.float64) for column in (1, 2))
    starts = np.array([i for i, uid in enumerate(uids) if i == 0 or uids[i - 1] != uid], dtype=np.int64)
    if not len(starts):
        return _Table([], *(np.zeros(0) for _ in range(7)))
    ends = np.append(starts[1:], len(rows))
    rate = correct / answers
    return _Table(
        uids=[uids[start] for start in starts],
        groups=ends - starts,
        responses=np.add.reduceat(answers, starts),
        pass_rate=np.add.reduceat(correct, starts) / np.add.reduceat(answers, starts),
        first=rate[starts],
        last=rate[ends - 1],
        solved=_streaks(rate == 1, starts, ends),
        flips=_flips(rate, starts),
    )


def _streaks(is_solved: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Count the consecutive solved groups at the end of each prompt's rows."""
    indices = np.arange(len(is_solved))
    last_unsolved = np.maximum.accumulate(np.where(is_solved, -1, indices))[ends - 1]
    return ends - 1 - np.maximum(last_unsolved, starts - 1)


def _flips(rate: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Count how often each prompt's rate crosses one half. A rate of exactly one half is on neither side."""
    prompt_of = np.searchsorted(starts, np.arange(len(rate)), side="right") - 1
    decided = np.flatnonzero(rate != 0.5)
    side, owner = rate[decided] > 0.5, prompt_of[decided]
    changes = (side[1:] != side[:-1]) & (owner[1:] == owner[:-1])
    return np.bincount(owner[1:][changes], minlength=len(starts))


def _row(database: sqlite3.Connection, table: _Table, index: int) -> PromptRow:
    uid = table.uids[index]
    source, messages = database.execute("SELECT data_source, messages FROM prompts WHERE uid = ?", (uid,)).fetchone()
    return PromptRow(
        uid=uid,
        data_source=source,
        question=question(messages),
        groups=int(table.groups[index]),
        responses=int(table.responses[index]),
        pass_rate=float(table.pass_rate[index]),
        first_pass_rate=float(table.first[index]),
        last_pass_rate=float(table.last[index]),
        solved_in_a_row=int(table.solved[index]),
        flips=int(table.flips[index]),
    )
