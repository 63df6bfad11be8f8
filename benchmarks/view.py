"""python -m benchmarks.view: how long each database query of the page takes.

A database of synthetic steps is written with RunDatabase.record_step. --folder keeps it for the next time. Every query
runs once with the file dropped from the system's cache, as far as the system allows it, and then several times more, of
which the slowest counts.
"""

from __future__ import annotations

import argparse
import os
import platform
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dapo.config import Config
from dapo.store.database import RunDatabase
from dapo.types import (
    EvalReport,
    EvalSample,
    Event,
    EventKind,
    Group,
    Prompt,
    Rollout,
    Score,
    StepReport,
    TokenStats,
    Verdict,
)
from dapo.view import curves, groups, health, prompts, runs, source, tokens
from dapo.view.groups import GroupFilter
from dapo.view.page.panels import PANELS
from dapo.view.source import Run

LIMIT_S = 1.0
N = 8  # responses per group
GROUPS = 64  # per step
PROMPTS = 6_400
WORDS = [
    "so",
    "the",
    "sum",
    "of",
    "both",
    "is",
    "then",
    "we",
    "add",
    "number",
    "seven",
    "and",
    "check",
    "it",
    "again",
    "which",
    "gives",
    "that",
    "x",
    "equals",
]
NEEDLE = "a needle in the haystack"
SOURCES = ("arithmetic", "geometry", "words")
CURVES = [name for panel in PANELS for name in panel.metrics]
CURVES += [f"timing_s/{name}" for name in ("generate", "reward", "train", "step")]
CURVES += ["loss", "lr", "ratio", "kl", "updates", "score/mean", "staleness/mean", "staleness/max"]


class Pool:
    """Long random texts and arrays. Each response is a slice of them, which is much faster than new random values."""

    def __init__(self, seed: int, prompts: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.text = " ".join(self.rng.choice(WORDS, 200_000))
        self.tokens = self.rng.integers(0, 50_000, 200_000, dtype=np.int32)
        self.logprobs = -self.rng.exponential(0.4, 200_000).astype(np.float32)
        self.noise = self.rng.normal(0, 0.15, 200_000).astype(np.float32)
        self.prompts = [self.prompt(index) for index in range(prompts)]
        self.ease = self.rng.beta(0.6, 0.9, prompts)  # base pass rate of each prompt

    def prompt(self, index: int) -> Prompt:
        content = f"Question {index}: {self.slice(self.text, 300)}"
        return Prompt(f"p{index:06d}", ({"role": "user", "content": content},), (1, 2, 3), index, SOURCES[index % 3])

    def slice(self, values: Any, length: int) -> Any:
        start = int(self.rng.integers(len(values) - length))
        return values[start : start + length]

    def rollout(self, serial: int, index: int, version: int) -> Rollout:
        length = int(self.rng.integers(20, 380))
        arrays = self.slice(self.tokens, length), self.slice(self.logprobs, length)
        reason = "length" if length > 370 else "stop"
        return Rollout(serial, index, *arrays, reason, version, self.slice(self.text, 4 * length))


def synthetic_group(pool: Pool, serial: int, step: int, chance_of_error: float = 0.002) -> Group:
    which = int(pool.rng.integers(len(pool.prompts)))
    is_right = pool.rng.random(N) < min(1.0, pool.ease[which] * (0.5 + step / 1_000))
    fails = pool.rng.random(N) < chance_of_error
    scores = tuple(
        Score(None, None, f"timed out after {10 + step % 3} s") if failed else Score(float(right), bool(right))
        for right, failed in zip(is_right, fails, strict=True)
    )
    rewards = np.where(fails, np.nan, is_right - 0.1 * pool.rng.random(N))
    judged = is_right[~fails]
    verdict = Verdict.ALL_RIGHT if judged.all() else Verdict.KEPT if judged.any() else Verdict.ALL_WRONG
    advantages = np.where(fails, 0.0, (rewards - np.nanmean(rewards)) / (np.nanstd(rewards) + 1e-6))
    rollouts = tuple(pool.rollout(serial, index, step - 1) for index in range(N))
    return Group(serial, pool.prompts[which], rollouts, scores, rewards, advantages, ~fails, verdict)


def synthetic_step(pool: Pool, step: int, waiting: list[Group]) -> tuple[StepReport, list[Group]]:
    """Make a step, and return its report and the two groups that it carries over to the next step."""
    fresh = [synthetic_group(pool, (step - 1) * GROUPS + index, step) for index in range(GROUPS)]
    carried = [group for group in fresh if group.verdict == Verdict.KEPT][-2:]
    groups = [group.with_verdict(Verdict.CARRIED) if group in carried else group for group in fresh] + waiting
    stats = {
        (group.serial, rollout.index): TokenStats(
            rollout.logprobs + pool.slice(pool.noise, len(rollout)), -0.7 * rollout.logprobs
        )
        for group in groups
        if group.kept
        for rollout in group.rollouts
    }
    rewards = np.concatenate([group.rewards for group in fresh])
    counts: dict[str, float] = {}
    for group in groups:
        kind = "trained" if group.kept else f"dropped/{group.verdict}"
        counts[f"tokens/{kind}"] = counts.get(f"tokens/{kind}", 0) + group.tokens
    metrics = {"reward/mean": float(np.nanmean(rewards)), **counts}
    metrics = {name: float(pool.rng.exponential()) for name in CURVES} | metrics
    events = (Event(EventKind.UNJUDGED, f"some of step {step} could not be judged", step),) if step % 3 == 0 else ()
    return StepReport(step, metrics, tuple(groups), stats, events), carried


def synthetic_evaluation(pool: Pool, step: int, name: str) -> EvalReport:
    samples = tuple(
        EvalSample(pool.prompts[index], pool.rollout(index, 0, step), Score(1.0, True)) for index in range(30)
    )
    value = float(pool.rng.random())
    return EvalReport(step, name, {"avg@8": value, "avg@8/low": value - 0.1, "avg@8/high": value + 0.1}, samples)


def generate(folder: Path, steps: int, console: Console, prompts: int = PROMPTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.db"
    config = Config.parse({"run": {"name": "made_up", "steps": steps}, "model": {"path": "m"}, "data": {"train": "d"}})
    pool = Pool(0, prompts)
    waiting: list[Group] = []
    with RunDatabase.create(path, config.to_yaml(), {}) as database:
        for step in track(range(1, steps + 1), "writing steps", console=console):
            report, waiting = synthetic_step(pool, step, waiting)
            database.record_step(report)
            if step % 50 == 0:
                for name in ("held_out", "other"):
                    database.record_eval(synthetic_evaluation(pool, step, name))
        database.record_event(Event(EventKind.FINISHED, NEEDLE, steps))
    return path


def queries(run: Run) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield every query of dapo.view in its most expensive form: at the end of the list, or with nothing to find."""
    serial, uid = _a_trained_response(run)
    last = GroupFilter(first_step=source.progress(run).step)
    nowhere = GroupFilter(min_accuracy=0.99, max_accuracy=0.991)
    yield "runs: summary", lambda: runs.summary(run.path.parent, run.name)
    yield "progress", lambda: source.progress(run)
    yield "configuration", lambda: source.configuration(run)
    yield "metric names", lambda: curves.metric_names(run)
    yield "all curves", lambda: curves.curves(run, curves.metric_names(run))
    yield "reward spread, 100 steps", lambda: curves.spread(run)
    yield "verdicts over steps", lambda: curves.verdicts_over_steps(run)
    yield "tokens over steps", lambda: curves.tokens_over_steps(run)
    yield "evaluations", lambda: curves.evaluations(run)
    yield "groups: first page", lambda: groups.groups(run)
    yield "groups: newest", lambda: groups.groups(run, newest_first=True)
    yield "groups: last page", lambda: groups.groups(run, after=source.progress(run).groups - 50)
    yield "groups: of the last step", lambda: groups.groups(run, last)
    yield "groups: rare verdict", lambda: groups.groups(run, GroupFilter(verdicts=(Verdict.CARRIED,)))
    yield "groups: accuracy that no group has", lambda: groups.groups(run, nowhere)
    yield "groups: unknown source", lambda: groups.groups(run, GroupFilter(data_source="unknown"))
    yield "groups: one source", lambda: groups.groups(run, GroupFilter(data_source=SOURCES[1]), newest_first=True)
    yield "groups: one reason", lambda: groups.groups(run, GroupFilter(error="timed out after 10 s"))
    yield "groups: common text", lambda: groups.groups(run, GroupFilter(text="THE SUM"))
    yield "groups: text that no group has", lambda: groups.groups(run, GroupFilter(text=NEEDLE))
    yield "groups: the same, not ASCII", lambda: groups.groups(run, GroupFilter(text=f"{NEEDLE} ä"))
    yield "groups: count", lambda: groups.count_groups(run)
    yield "groups: count by accuracy", lambda: groups.count_groups(run, GroupFilter(min_accuracy=0.5))
    yield "groups: count by source", lambda: groups.count_groups(run, GroupFilter(data_source=SOURCES[1]))
    yield "groups: verdicts", lambda: groups.verdicts(run)
    yield "groups: sources", lambda: groups.data_sources(run)
    yield "one group", lambda: groups.group(run, serial)
    yield "one group as JSON", lambda: groups.group_json(groups.group(run, serial))
    yield "tokens of a response", lambda: tokens.tokens(run, serial, 0, str)
    yield "prompts: hardest", lambda: prompts.prompts(run, "hardest")
    yield "prompts: solved", lambda: prompts.prompts(run, "solved")
    yield "prompts: flickering, deep", lambda: prompts.prompts(run, "flickering", offset=500)
    yield "history of a prompt", lambda: prompts.history(run, uid)
    yield "the whole SQL view prompt_history", lambda: _whole_history(run)
    yield "events", lambda: health.newest_events(run)
    yield "events of a kind that no event has", lambda: health.newest_events(run, kinds=["other"])
    yield "event kinds", lambda: health.event_kinds(run)
    yield "unjudged reasons", lambda: health.unjudged(run)


def _a_trained_response(run: Run) -> tuple[int, str]:
    with run.snapshot() as database:
        query = "SELECT serial, prompt_uid FROM groups WHERE verdict = 'kept' ORDER BY serial DESC LIMIT 1"
        return tuple(database.execute(query).fetchone())


def _whole_history(run: Run) -> Any:
    with run.snapshot() as database:
        return database.execute("SELECT sum(judged), sum(correct), avg(mean_score) FROM prompt_history").fetchone()


def drop_from_cache(path: Path) -> None:
    """Ask the system to drop the file from its page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def search_all(run: Run) -> None:
    page = groups.groups(run, GroupFilter(text=NEEDLE))
    while page.after is not None:
        page = groups.groups(run, GroupFilter(text=NEEDLE), after=page.after)


def seconds(query: Callable[[], Any]) -> float:
    start = time.perf_counter()
    query()
    return time.perf_counter() - start


@contextmanager
def database_in(folder: Path | None, steps: int, console: Console) -> Iterator[Path]:
    """Yield the path of the database, generated unless `folder` has it from an earlier time."""
    with tempfile.TemporaryDirectory() as temporary:
        path = (folder or Path(temporary)) / "made_up" / "run.db"
        if not path.exists():
            start = time.perf_counter()
            generate(path.parent, steps, console)
            console.print(f"written in {time.perf_counter() - start:.0f} s")
        yield path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000, help=f"of {GROUPS * N} responses each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep the database here (about 1.8 MB per step)")
    options = parser.parse_args()
    console = Console(width=120)
    with database_in(options.folder, options.steps, console) as path:
        run = runs.find_run(path.parent.parent, "made_up")
        table = Table(title=f"{path.stat().st_size / 1e9:.2f} GB, {source.progress(run).groups * N:,} responses")
        for heading in ("query", "from disk, s", f"slowest of {options.repeats}, s", ""):
            table.add_column(heading, justify="left" if heading == "query" else "right")
        for name, query in queries(run):
            drop_from_cache(path)
            cold, warm = seconds(query), max(seconds(query) for _ in range(options.repeats))
            table.add_row(name, f"{cold:.3f}", f"{warm:.3f}", "" if warm < LIMIT_S else f"over {LIMIT_S} s")
        console.print(table)
        console.print(f"search of all groups for a text that none has: {seconds(lambda: search_all(run)):.1f} s")
    console.print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"SQLite {sqlite3.sqlite_version}; 'from disk' only if the system honors the request to drop its cache"
    )


if __name__ == "__main__":
    main()
