"""Writing a run's database: every group, rollout, score, metric and event of a run in one SQLite file."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Self

import yaml

from dapo import __version__
from dapo.errors import CheckpointError
from dapo.store.connection import Connection, check, explained, is_blank, open_for_writing, readable
from dapo.store.encoding import FLOATS, TOKENS, to_blob, to_json, to_text
from dapo.store.reading import RunReader
from dapo.store.schema import APPLICATION_ID, SCHEMA, SCHEMA_VERSION
from dapo.types import EvalReport, Event, EventKind, Group, Prompt, Rollout, Score, StepReport, TokenStats, Verdict

StoreTokens = Literal["all", "kept", "none"]


class RunDatabase(RunReader):
    """A run's database, with one writer and any number of readers. Each `record_...` and `rewind` is a transaction."""

    def __init__(self, connection: Connection, store_tokens: StoreTokens = "none") -> None:
        super().__init__(connection)
        self._store_tokens: StoreTokens = store_tokens

    @classmethod
    def create(cls, path: str | Path, config_yaml: str, meta: Mapping[str, str]) -> Self:
        """Create a run's database. `config_yaml` is the resolved configuration, which sets run.store_tokens."""
        path = Path(path)
        with open_for_writing(path, "rwc") as connection:
            database = cls(connection, _store_tokens(config_yaml))
            with database._transaction():
                # A process killed here leaves an empty file behind, so an empty file must not block a new start.
                if not is_blank(connection):
                    raise CheckpointError(f"{path}: exists already and is not empty; resume that run or name another")
                for statement in SCHEMA.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                database._insert_meta(config_yaml, meta)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("SELECT 1 FROM meta").fetchone()  # makes the WAL's files: a disk fault is reported here
            return database

    @classmethod
    def exists(cls, path: Path) -> bool:
        """Return whether a run was begun in this file; a missing or empty file means no.

        Opens it for writing, because a killed process may have left a journal that must be rolled back.
        """
        if not path.exists():
            return False
        with open_for_writing(path) as connection, closing(connection):
            if is_blank(connection):
                return False
            check(connection, path)
            return True

    def restart(self, config_yaml: str, meta: Mapping[str, str]) -> None:
        """Start over in a database that has no step yet."""
        assert self.last_step() == 0
        with self._transaction() as connection:
            for table in ("meta", "evaluations", "events", "prompts"):
                connection.execute(f"DELETE FROM {table}")
            self._insert_meta(config_yaml, meta)
        self._store_tokens = _store_tokens(config_yaml)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open for writing."""
        path = Path(path)
        with open_for_writing(path) as connection:
            check(connection, path)
            connection.execute("PRAGMA journal_mode = WAL")
            database = cls(connection)
            with readable(path):  # the stored text may be damaged
                database._store_tokens = _store_tokens(database.meta()["config"])
            return database

    def record_resume(self, config_yaml: str, about: Mapping[str, str], change: Event | None) -> None:
        """Record the options of a resumed run, what else it depends on, and the event that says what has changed."""
        with self._transaction() as connection:
            rows = [(to_text(key), to_text(value)) for key, value in {**about, "config": config_yaml}.items()]
            connection.executemany("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", rows)
            if change is not None:
                self._insert_event(change, time.time())
        self._store_tokens = _store_tokens(config_yaml)

    def record_step(self, report: StepReport) -> None:
        now = time.time()
        reported = {group.serial for group in report.groups}
        assert all(serial in reported for serial, _ in report.token_stats), "token statistics of an unreported group"
        with self._transaction() as connection:
            connection.execute("INSERT INTO steps VALUES (?, ?)", (report.step, now))
            metrics = [(to_text(name), report.step, float(value)) for name, value in report.metrics.items()]
            connection.executemany("INSERT INTO metrics VALUES (?, ?, ?)", metrics)  # SQLite turns NaN into NULL
            for group in report.groups:
                self._record_group(group, report.step)
                self._record_tokens(group, report.token_stats)
            for event in report.events:
                self._insert_event(event, now)

    def record_eval(self, *reports: EvalReport) -> None:
        """Record an evaluation on all its sets, or nothing of it.

        A report replaces an earlier one of the same set and step, which a resumed run may repeat.
        """
        with self._transaction() as connection:
            for report in reports:
                row = {"step": report.step, "name": to_text(report.name)}
                connection.execute("DELETE FROM evaluations WHERE (step, name) = (?, ?)", tuple(row.values()))
                row |= {"time": time.time(), "metrics": to_json(report.metrics)}
                evaluation = self._insert("evaluations", row).lastrowid
                for sample in report.samples:
                    self._insert_prompt(sample.prompt, report.step)
                    keys = {"evaluation": evaluation, "prompt_uid": to_text(sample.prompt.uid)}
                    self._insert("eval_samples", {**keys, **_sample_columns(sample.rollout, sample.score)})

    def record_event(self, event: Event) -> None:
        with self._transaction():
            self._insert_event(event, time.time())

    def rewind(self, step: int) -> int:
        """Remove everything after `step`, and return the number of steps removed.

        Groups generated up to `step` but decided later are carried-over groups again. Their next verdict also replaces
        their advantages. Events of earlier resumes stay.
        """
        with self._transaction() as connection:
            (last,) = connection.execute("SELECT coalesce(max(step), 0) FROM steps").fetchone()
            groups = connection.execute("DELETE FROM groups WHERE generated_step > ?", (step,)).rowcount
            connection.execute(
                "UPDATE rollout_tokens SET policy_logprobs = NULL, entropy = NULL"
                " WHERE serial IN (SELECT serial FROM groups WHERE decided_step > ?)",
                (step,),
            )
            undecided = connection.execute(
                "UPDATE groups SET verdict = ?, decided_step = NULL WHERE decided_step > ?", (Verdict.CARRIED, step)
            ).rowcount
            connection.execute("DELETE FROM evaluations WHERE step > ?", (step,))
            connection.execute("DELETE FROM prompts WHERE first_step > ?", (step,))
            connection.execute("DELETE FROM metrics WHERE step > ?", (step,))
            connection.execute("DELETE FROM events WHERE step > ? AND kind != ?", (step, EventKind.RESUMED))
            steps = connection.execute("DELETE FROM steps WHERE step > ?", (step,)).rowcount
            message = f"resumed from step {step}"
            if steps or groups:
                message += f": {steps} later steps with {groups} groups removed"
            if undecided:
                message += f", {undecided} carried-over groups undecided again"
            if last < step:
                message += f"; the database ended at step {last}, so the steps after it are missing here"
            self._insert_event(Event(EventKind.RESUMED, message, step), time.time())
        return steps

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with explained(self.path, "written"):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # After some errors, such as a full disk, SQLite has already rolled back.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _insert_meta(self, config_yaml: str, meta: Mapping[str, str]) -> None:
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        for key, value in {**meta, "created": created, "config": config_yaml}.items():
            self._insert("meta", {"key": to_text(key), "value": to_text(value)})

    def _insert(self, table: str, values: Mapping[str, Any], otherwise: str = "") -> sqlite3.Cursor:
        """Insert a row; `otherwise` is an ON CONFLICT clause."""
        names, places = ", ".join(values), ", ".join("?" * len(values))
        query = f"INSERT INTO {table} ({names}) VALUES ({places}) {otherwise}"
        return self._connection.execute(query, tuple(values.values()))

    def _insert_event(self, event: Event, now: float) -> None:
        row = {"step": event.step, "time": now, "kind": to_text(event.kind), "message": to_text(event.message)}
        self._insert("events", row)

    def _insert_prompt(self, prompt: Prompt, step: int) -> None:
        """Insert a prompt once per uid, with the earliest step that uses it.

        Steps do not always arrive in order: an older checkpoint may be evaluated later.
        """
        row = {
            "uid": to_text(prompt.uid),
            "first_step": step,
            "data_source": to_text(prompt.data_source),
            "messages": to_json(prompt.messages),
            "answer": to_json(prompt.answer),
            "extra": to_json(prompt.extra),
            "tokens": None if self._store_tokens == "none" else to_blob(prompt.tokens, TOKENS),
        }
        earlier = "first_step = excluded.first_step WHERE excluded.first_step < first_step"
        self._insert("prompts", row, f"ON CONFLICT (uid) DO UPDATE SET {earlier}")

    def _record_group(self, group: Group, step: int) -> None:
        """Insert a group, or, if it was carried over, update what has changed: its verdict and its advantages.

        The ledger's correction weights the advantages when the group is trained on. Recording a group that already has
        its final verdict fails on the primary key.
        """
        verdict = to_text(group.verdict)
        decided_step = None if verdict == Verdict.CARRIED else step
        known = self._connection.execute(
            "UPDATE groups SET verdict = ?, decided_step = ? WHERE serial = ? AND verdict = ?",
            (verdict, decided_step, group.serial, Verdict.CARRIED),
        )
        if known.rowcount:
            values = [(float(a), group.serial, r.index) for r, a in zip(group.rollouts, group.advantages, strict=True)]
            self._connection.executemany("UPDATE rollouts SET advantage = ? WHERE (serial, sample) = (?, ?)", values)
            return
        self._insert_prompt(group.prompt, step)
        row = {"serial": group.serial, "prompt_uid": to_text(group.prompt.uid), "generated_step": step}
        self._insert("groups", {**row, "decided_step": decided_step, "verdict": verdict})
        members = zip(group.rollouts, group.scores, group.rewards, group.advantages, group.trains, strict=True)
        for rollout, score, reward, advantage, trains in members:
            row = {
                "serial": group.serial,
                "reward": float(reward),
                "advantage": float(advantage),
                "trains": int(trains),
                "switches": to_json(rollout.switches),
            }
            self._insert("rollouts", {**row, **_sample_columns(rollout, score)})

    def _record_tokens(self, group: Group, token_stats: Mapping[tuple[int, int], TokenStats]) -> None:
        # Tokens of carried groups are stored too. So they are written once, and a rewind to "carried" has them.
        kept = group.kept or group.verdict == Verdict.CARRIED
        if self._store_tokens == "none" or (self._store_tokens == "kept" and not kept):
            return
        for rollout in group.rollouts:
            stats = token_stats.get((group.serial, rollout.index))
            row = {
                "serial": group.serial,
                "sample": rollout.index,
                "tokens": to_blob(rollout.tokens, TOKENS),
                "sampler_logprobs": to_blob(rollout.logprobs, FLOATS),
                "policy_logprobs": None if stats is None else to_blob(stats.logprobs, FLOATS),
                "entropy": None if stats is None else to_blob(stats.entropy, FLOATS),
            }
            update = "policy_logprobs = excluded.policy_logprobs, entropy = excluded.entropy"
            self._insert("rollout_tokens", row, f"ON CONFLICT (serial, sample) DO UPDATE SET {update}")


def versions() -> dict[str, str]:
    """Return the versions of the packages that a run's results depend on."""
    return {"dapo": __version__, **{name: version(name) for name in ("torch", "transformers", "peft")}}


def _sample_columns(rollout: Rollout, score: Score) -> dict[str, Any]:
    """Return the columns that rollouts and eval_samples share."""
    extracted = score.extras.get("extracted")
    return {
        "sample": rollout.index,
        "weight_version": rollout.weight_version,
        "length": rollout.sampled,
        "finish_reason": rollout.finish_reason,
        "score": None if score.value is None else float(score.value),
        "acc": None if score.acc is None else float(score.acc),  # stored as 0 or 1 where it is whole
        "error": None if score.error is None else to_text(score.error),
        "extracted": None if extracted is None else to_text(str(extracted)),
        "extras": to_json(score.extras),
        "given": to_json(rollout.given),
        "turns": to_json(rollout.turns),
        "text": to_text(rollout.text),
    }


def _store_tokens(config_yaml: str) -> StoreTokens:
    try:
        return yaml.safe_load(config_yaml)["run"]["store_tokens"]
    except yaml.YAMLError:
        raise ValueError("the recorded configuration is not YAML") from None
