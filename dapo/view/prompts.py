"""Rank prompts by their pass rates over a run (hardest, solved, flickering), and return the history of one."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from typing import Any, Literal

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
    groups: int
    responses: int
    pass_rate: float
    first_pass_rate: float  # of its first group
    last_pass_rate: float  # of its last group
    solved_in_a_row: int  # latest consecutive groups in which every response was correct
    flips: int  # how often it changed from mostly correct to mostly wrong, or back
    data_source: str = ""  # this and the question are read for the rows of a page only
    question: str = ""


@dataclass(frozen=True, slots=True)
class PromptPage:
    rows: tuple[PromptRow, ...]
    total: int  # prompts on all pages


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """One group of a prompt."""

    step: int
    pass_rate: float | None


_cache: dict[tuple[Path, int, Progress], list[PromptRow]] = {}  # by path, inode and progress; holds one list


def prompts(run: Run, order: Order, offset: int = 0, limit: int = 50) -> PromptPage:
    """Return one page of prompts: lowest pass rate, longest solved, or most flips first."""
    with run.snapshot() as database:
        every = _all_prompts(run, database)
        if order == "hardest":
            ranked = sorted((row for row in every if row.pass_rate < 1), key=lambda row: (row.pass_rate, -row.groups))
        elif order == "solved":
            solved = (row for row in every if row.solved_in_a_row)
            ranked = sorted(solved, key=lambda row: (-row.solved_in_a_row, -row.pass_rate))
        elif order == "flickering":
            ranked = sorted((row for row in every if row.flips), key=lambda row: (-row.flips, row.groups))
        else:
            raise ValueError(f"there is no order '{order}'")
        return PromptPage(tuple(_with_text(database, row) for row in ranked[offset : offset + limit]), len(ranked))


def history(run: Run, uid: str) -> list[HistoryPoint]:
    """Return the groups of one prompt in the order of their steps, at most 1,000."""
    # The same as the SQL view prompt_history, which would aggregate the groups of all prompts first.
    query = (
        "SELECT generated_step, avg(acc) FROM groups JOIN rollouts USING (serial) WHERE prompt_uid = ?"
        " GROUP BY generated_step, serial ORDER BY generated_step, serial LIMIT 1000"
    )
    with run.snapshot() as database:
        return [HistoryPoint(*row) for row in database.execute(query, (uid,))]


def _all_prompts(run: Run, database: sqlite3.Connection) -> list[PromptRow]:
    """Return every prompt that was judged, computed again only when something new was recorded.

    It takes about a second for a long run, and every page and order needs the same list.
    """
    key = run.path, run.path.stat().st_ino, read_progress(database)
    rows = _cache.get(key)
    if rows is None:
        by_prompt = groupby(database.execute(_GROUPS), key=lambda row: row["prompt_uid"])
        rows = [_prompt(uid, list(found)) for uid, found in by_prompt]
        _cache.clear()  # keeps one list; safe if another thread does the same now
        _cache[key] = rows
    return rows


def _prompt(uid: str, found: list[Any]) -> PromptRow:
    """Summarize the groups of a prompt, which are in the order of their steps."""
    rates = [group["correct"] / group["answers"] for group in found]
    answers = sum(group["answers"] for group in found)
    sides = [rate > 0.5 for rate in rates if rate != 0.5]  # a rate of exactly one half is on neither side
    return PromptRow(
        uid=uid,
        groups=len(found),
        responses=answers,
        pass_rate=sum(group["correct"] for group in found) / answers,
        first_pass_rate=rates[0],
        last_pass_rate=rates[-1],
        solved_in_a_row=sum(1 for _ in takewhile(lambda rate: rate == 1, reversed(rates))),
        flips=sum(before != after for before, after in pairwise(sides)),
    )


def _with_text(database: sqlite3.Connection, row: PromptRow) -> PromptRow:
    query = "SELECT data_source, messages FROM prompts WHERE uid = ?"
    source, messages = database.execute(query, (row.uid,)).fetchone()
    return replace(row, data_source=source, question=question(messages))
