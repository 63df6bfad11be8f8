"""Reading a run's database: its steps, groups, rollouts, evaluations and events, with JSON and blobs decoded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import numpy as np

from dapo.store.connection import Connection, close, open_for_reading, readable
from dapo.store.encoding import (
    FLOATS,
    TOKENS,
    from_blob,
    from_json,
    given_from_json,
    messages_from_json,
    metrics_from_json,
    switches_from_json,
    turns_from_json,
)
from dapo.types import EvalReport, EvalSample, EventKind, FinishReason, Prompt, Rollout, Score


class RunReader:
    """The reading half of `RunDatabase`. Every value is checked as it is read: the file may be damaged."""

    def __init__(self, connection: Connection) -> None:
        self.path = connection.path
        self._connection = connection

    @classmethod
    def open_readonly(cls, path: str | Path) -> Self:
        """Open for reading, even while the run is training."""
        return cls(open_for_reading(Path(path)))

    def close(self) -> None:
        close(self._connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def last_step(self) -> int:
        """Return the newest recorded step, or 0."""
        (row,) = self._rows("SELECT coalesce(max(step), 0) AS step FROM steps")
        return row["step"]

    def meta(self) -> dict[str, str]:
        with readable(self.path):
            found = {row["key"]: row["setting"] for row in self._rows("SELECT key, value AS setting FROM meta")}
            if not all(isinstance(text, str) for pair in found.items() for text in pair):
                raise ValueError("meta holds a value that is not text")
        return found

    def steps(self) -> Iterator[dict[str, Any]]:
        """Yield one dictionary per step, in order: `step`, `time` and every metric under its name."""
        rows = self._rows(
            "SELECT step, time, name AS metric, value FROM steps LEFT JOIN metrics USING (step) ORDER BY step, name",
            order=("step", "metric"),
        )
        with readable(self.path):
            for (step, when), metrics in groupby(rows, key=lambda row: (row["step"], row["time"])):
                known = {row["metric"]: row["value"] for row in metrics if row["metric"] is not None}
                if not all(isinstance(name, str) for name in known):
                    raise ValueError("the name of a metric is not text")
                values = {name: math.nan if value is None else value for name, value in known.items()}
                yield {"step": step, "time": when, **values}

    def events(self) -> Iterator[dict[str, Any]]:
        for row in self._rows("SELECT id, step, time, kind, message FROM events ORDER BY id", order=("id",)):
            del row["id"]
            yield row

    def endings(self) -> list[dict[str, Any]]:
        """Return the events that began training again or ended it, in order."""
        kinds = (EventKind.FINISHED, EventKind.INTERRUPTED, EventKind.STOPPED, EventKind.RESUMED)
        return [event for event in self.events() if event["kind"] in kinds]

    def is_finished(self) -> bool:
        """Return whether the run has trained and evaluated its last step, and was not resumed since."""
        return any(event["kind"] == EventKind.FINISHED for event in self.endings()[-1:])

    def groups(self, step: int | None = None, verdict: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield groups with their prompts. `step` selects those generated or decided in that step."""
        conditions, values = ["1"], []
        if step is not None:
            conditions.append("(generated_step = ? OR decided_step = ?)")
            values += [step, step]
        if verdict is not None:
            conditions.append("verdict = ?")
            values.append(verdict)
        rows = self._rows(
            "SELECT serial, generated_step, decided_step, verdict, prompt_uid, data_source, messages, answer, extra,"
            " tokens FROM groups JOIN prompts ON uid = prompt_uid"
            f" WHERE {' AND '.join(conditions)} ORDER BY serial",
            *values,
            order=("serial",),
        )
        with readable(self.path):
            for row in rows:
                yield {
                    **{name: value for name, value in row.items() if name != "tokens"},
                    "messages": messages_from_json(row["messages"]),
                    "answer": from_json(row["answer"], object),
                    "extra": from_json(row["extra"], dict),
                    "prompt_tokens": from_blob(row["tokens"], TOKENS),
                }

    def rollouts(self, serial: int) -> Iterator[dict[str, Any]]:
        """Yield the rollouts of a group, in sampling order; arrays that were not stored are None."""
        rows = self._rows(
            "SELECT rollouts.*, tokens, sampler_logprobs, policy_logprobs, entropy"
            " FROM rollouts LEFT JOIN rollout_tokens USING (serial, sample) WHERE serial = ? ORDER BY sample",
            serial,
            order=("sample",),
        )
        arrays = ("sampler_logprobs", "policy_logprobs", "entropy")
        with readable(self.path):
            for row in rows:
                yield {
                    **row,
                    "acc": bool(row["acc"]) if row["acc"] in (0, 1) else row["acc"],
                    "trains": bool(row["trains"]),
                    "switches": switches_from_json(row["switches"]),
                    "extras": from_json(row["extras"], dict),
                    "given": given_from_json(row["given"]),
                    "turns": turns_from_json(row["turns"]),
                    "tokens": from_blob(row["tokens"], TOKENS),
                    **{name: from_blob(row[name], FLOATS) for name in arrays},
                }

    def evals(self) -> Iterator[dict[str, Any]]:
        rows = self._rows(
            "SELECT step, name, time, metrics FROM evaluations ORDER BY step, name", order=("step", "name")
        )
        with readable(self.path):
            for row in rows:
                yield {**row, "metrics": metrics_from_json(row["metrics"])}

    def eval_reports(self, step: int | None = None) -> tuple[EvalReport, ...]:
        """Return the evaluations of a step (default: the newest evaluated one) with scores and texts, without tokens.

        Prompts have only their uid, and rollouts only their sampled tokens' count: enough to compare two evaluations.
        """
        found = list(self.evals())
        wanted = step if step is not None else max((row["step"] for row in found), default=0)
        return tuple(
            EvalReport(wanted, row["name"], row["metrics"], tuple(self._eval_samples(wanted, row["name"])))
            for row in found
            if row["step"] == wanted
        )

    def _eval_samples(self, step: int, name: str) -> Iterator[EvalSample]:
        rows = self._rows(
            "SELECT eval_samples.rowid AS row, eval_samples.* FROM eval_samples JOIN evaluations ON evaluation = id"
            " WHERE (step, name) = (?, ?) ORDER BY row",
            step,
            name,
            order=("row",),
        )
        with readable(self.path):
            for row in rows:
                empty = np.broadcast_to(np.int32(0), row["length"])  # takes no memory, whatever the length
                finish: FinishReason = "length" if row["finish_reason"] == "length" else "stop"
                acc = bool(row["acc"]) if row["acc"] in (0, 1) else row["acc"]
                yield EvalSample(
                    Prompt(row["prompt_uid"], (), (), None),
                    Rollout(0, row["sample"], empty, empty, finish, row["weight_version"], row["text"]),
                    Score(row["score"], acc, row["error"], from_json(row["extras"], dict)),
                )

    def total(self, metric: str) -> float:
        """Return the sum of a metric over all recorded steps."""
        (row,) = self._rows("SELECT coalesce(sum(value), 0.0) AS value FROM metrics WHERE name = ?", metric)
        return row["value"]

    def _rows(self, query: str, *values: Any, order: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
        """Yield the rows of a query, and check that they ascend in the columns `order`.

        The links between damaged pages can form a cycle; without the check such a query would never end.
        """
        if self._connection.is_outdated:
            self._connection.close()
            self._connection = open_for_reading(self.path)
        connection, last = self._connection, None
        with readable(self.path), connection.unchanged():
            connection.allow()
            for row in connection.execute(query, values):
                key = tuple(row[name] for name in order)
                if last is not None and order and not last < key:
                    raise ValueError(f"rows are not in the order of {' and '.join(order)}")
                last = key
                yield dict(row)
                connection.allow()  # the caller's own processing does not count
