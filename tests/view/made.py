"""Make small run databases for tests through the real writer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dapo.config import Config
from dapo.store.database import RunDatabase
from dapo.types import Event, Group, Prompt, Rollout, Score, StepReport, TokenStats

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \u202e right to left",
    "before\0after",
    "x" * 2**20 + "end",
    "%_\\'\"; DROP TABLE groups; --",
)


def create(folder: Path, *overrides: str, name: str = "made") -> RunDatabase:
    """Create a database in folder/name with the options of a run; `overrides` are SECTION.OPTION=YAML."""
    (folder / name).mkdir(parents=True)
    values: dict[str, Any] = {
        "run": {"name": name, "store_tokens": "all"}, "model": {"path": "some/model"}, "data": {"train": "d"}
    }  # fmt: skip
    for override in overrides:
        key, value = override.split("=")
        section, option = key.split(".")
        values.setdefault(section, {})[option] = yaml.safe_load(value)
    return RunDatabase.create(folder / name / "run.db", Config.parse(values).to_yaml(), {})


def make_group(
    serial: int,
    accs: Sequence[bool | None] = (True, False),
    uid: str | None = None,
    verdict: str = "kept",
    texts: Sequence[str] | None = None,
    **prompt: Any,
) -> Group:
    """Make a group with one response for each of `accs`; None means that it could not be judged."""
    rng = np.random.default_rng(serial)
    rollouts, scores = [], []
    for index, acc in enumerate(accs):
        length = 3 + index
        arrays = rng.integers(0, 100, length, dtype=np.int32), -rng.exponential(size=length).astype(np.float32)
        text = texts[index] if texts else f"response {index} of {serial}"
        rollouts.append(Rollout(serial, index, *arrays, "stop", serial // 10, text))
        is_unjudged = acc is None
        scores.append(
            Score(None, None, "timed out") if is_unjudged else Score(float(acc), acc, None, {"extracted": acc})
        )
    judged = np.array([acc is not None for acc in accs])
    values = np.array([np.nan if acc is None else float(acc) for acc in accs])
    known = {
        "messages": ({"role": "user", "content": f"question {serial}"},),
        "tokens": (1,),
        "answer": serial,
        **prompt,
    }
    return Group(
        serial, Prompt(uid or f"p{serial}", **known), tuple(rollouts), tuple(scores), values - 0.25,
        np.where(judged, values - 0.5, 0.0), judged, verdict,
    )  # fmt: skip


def make_report(
    step: int, groups: Sequence[Group] = (), metrics: dict[str, float] | None = None, events: Sequence[Event] = ()
) -> StepReport:
    stats = {
        (group.serial, rollout.index): TokenStats(rollout.logprobs + 0.25, -rollout.logprobs)
        for group in groups
        if group.kept
        for rollout in group.rollouts
    }
    return StepReport(step, metrics or {"reward/mean": step / 8}, tuple(groups), stats, tuple(events))
