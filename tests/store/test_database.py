"""Tests of the run database: values survive, only whole steps are stored, and a bad file is refused in one sentence.

Run as a script, this file starts the writers that are killed.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapo.config import Config
from dapo.errors import CheckpointError, StorageError
from dapo.store.database import RunDatabase
from dapo.types import EvalReport, EvalSample, Event, EventKind, Group, Prompt, Rollout, Score, StepReport, TokenStats


def config_yaml(store_tokens: str = "all") -> str:
    values = {"run": {"store_tokens": store_tokens}, "model": {"path": "m"}, "data": {"train": "d.jsonl"}}
    return Config.parse(values).to_yaml()


def make_rollout(serial: int, index: int, text: str = "so 42") -> Rollout:
    rng = np.random.default_rng([serial, index])
    tokens = rng.integers(0, 50_000, 3 + index, dtype=np.int32)
    logprobs = -rng.exponential(size=len(tokens)).astype(np.float32)
    return Rollout(serial, index, tokens, logprobs, "stop", weight_version=serial // 10, text=text)


def make_group(serial: int, verdict: str = "kept", uid: str | None = None, **changes: Any) -> Group:
    """Build a group of two rollouts. The same serial gives the same group, so that a carried one can be repeated."""
    values: dict[str, Any] = {
        "serial": serial,
        "prompt": Prompt(uid or f"p{serial}", ({"role": "user", "content": f"6 * {serial}?"},), (5, 6), {"value": 42}),
        "rollouts": (make_rollout(serial, 0), make_rollout(serial, 1)),
        "scores": (Score(1.0, True, None, {"extracted": "42"}), Score(0.0, False)),
        "rewards": np.array([1.0, -0.5]),
        "advantages": np.array([0.75, -0.75]),
        "trains": np.array([True, False]),
        "verdict": verdict,
    }
    return Group(**{**values, **changes})


def make_report(step: int, groups: Iterable[Group] = (), metrics: dict[str, float] | None = None) -> StepReport:
    groups = tuple(groups)
    stats = {
        (group.serial, rollout.index): TokenStats(rollout.logprobs - 0.125, rollout.logprobs * -2)
        for group in groups
        for rollout, trains in zip(group.rollouts, group.trains, strict=True)
        if group.kept and trains
    }
    metrics = {"reward/mean": step / 8, "entropy": 1.5} if metrics is None else metrics
    return StepReport(step, metrics, groups, stats, (Event("warning", f"in step {step}", step),))


def make_eval(step: int, uids: Iterable[str], name: str = "held_out", accuracy: float = 0.5) -> EvalReport:
    samples = tuple(
        EvalSample(Prompt(uid, (), (), None), make_rollout(serial, 0), Score(1.0, True))
        for serial, uid in enumerate(uids)
    )
    return EvalReport(step, name, {"avg@1": accuracy}, samples)


def record_three_steps(database: RunDatabase) -> None:
    """Record three steps, after which groups 32 and 33 are carried over."""
    database.record_eval(make_eval(0, ["e0", "e1"]))
    database.record_step(make_report(1, [make_group(10), make_group(11, "all_correct")]))
    database.record_step(make_report(2, [make_group(20), make_group(21, "carried")]))
    database.record_step(
        make_report(3, [make_group(21), make_group(30), make_group(32, "carried"), make_group(33, "carried")])
    )
    database.record_eval(make_eval(3, ["e0", "e1"]))


def record_three_more(database: RunDatabase) -> None:
    database.record_step(make_report(4, [make_group(32), make_group(33, "carried"), make_group(40, uid="p10")]))
    database.record_step(make_report(5, [make_group(33, "stale"), make_group(50, "none_correct")]))
    database.record_eval(make_eval(5, ["e1", "e2"]))
    database.record_step(make_report(6, [make_group(60, "carried")]))


def contents(path: Path, *without: str) -> dict[str, list[tuple[Any, ...]]]:
    connection = sqlite3.connect(path)
    try:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {
            table: sorted(connection.execute(f"SELECT * FROM {table}"), key=repr)
            for table in tables
            if table not in without
        }
    finally:
        connection.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.db"


@pytest.fixture
def database(path: Path) -> Iterable[RunDatabase]:
    with RunDatabase.create(path, config_yaml(), {"version": "0.1.0"}) as database:
        yield database


# Values survive.


def test_a_step_comes_back_with_everything_that_was_reported(path: Path, database: RunDatabase) -> None:
    group = make_group(
        7, scores=(Score(1.0, True, None, {"extracted": 42, "steps": [1, 2]}), Score(None, None, "timeout"))
    )
    report = make_report(1, [group], {"reward/mean": 0.25, "grad_norm": 3.0})
    database.record_step(report)
    database.close()
    with RunDatabase.open_readonly(path) as reader:
        (step,) = reader.steps()
        assert {name: step[name] for name in step if name != "time"} == {
            "step": 1,
            "reward/mean": 0.25,
            "grad_norm": 3.0,
        }
        (event,) = reader.events()
        assert (event["kind"], event["message"], event["step"]) == ("warning", "in step 1", 1)
        assert event["time"] == step["time"] > 1.7e9
        (found,) = reader.groups()
        assert (found["serial"], found["verdict"], found["generated_step"], found["decided_step"]) == (7, "kept", 1, 1)
        assert found["messages"] == [{"role": "user", "content": "6 * 7?"}]
        assert found["answer"] == {"value": 42}
        assert found["prompt_tokens"].tolist() == [5, 6]
        good, unjudged = reader.rollouts(7)
    assert (good["score"], good["acc"], good["error"], good["reward"]) == (1.0, True, None, 1.0)
    assert (good["extracted"], good["extras"]) == ("42", {"extracted": 42, "steps": [1, 2]})
    assert (good["advantage"], good["trains"], good["length"], good["finish_reason"]) == (0.75, True, 3, "stop")
    assert (unjudged["score"], unjudged["acc"], unjudged["error"]) == (None, None, "timeout")
    assert (unjudged["trains"], unjudged["sample"], unjudged["text"]) == (False, 1, "so 42")
    stats = report.token_stats[7, 0]
    assert good["tokens"].tolist() == group.rollouts[0].tokens.tolist()
    assert good["policy_logprobs"].tolist() == stats.logprobs.tolist()
    assert good["entropy"].tolist() == stats.entropy.tolist()
    assert unjudged["sampler_logprobs"].tolist() == group.rollouts[1].logprobs.tolist()
    assert unjudged["policy_logprobs"] is None
    assert unjudged["entropy"] is None


def test_the_version_of_every_token_comes_back(database: RunDatabase) -> None:
    rollouts = (make_rollout(1, 0), replace(make_rollout(1, 3), weight_version=4, switches=(1, 1, 5)))
    database.record_step(make_report(1, [make_group(1, rollouts=rollouts)]))
    _, found = sorted(database.rollouts(1), key=lambda row: row["sample"])
    again = replace(rollouts[1], weight_version=found["weight_version"], switches=tuple(found["switches"]))
    assert again.versions.tolist() == rollouts[1].versions.tolist() == [4, 6, 6, 6, 6, 7]


def test_arrays_come_back_bit_for_bit(path: Path, database: RunDatabase) -> None:
    odd = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.4028235e38, -0.1], dtype=np.float32)
    tokens = np.array([0, 1, -1, 2**31 - 1, -(2**31), 255, 65_536], dtype=np.int32)
    rollouts = (Rollout(1, 0, tokens, odd, "length", 0, ""), Rollout(1, 1, tokens[:0], odd[:0], "stop", 0, ""))
    group = make_group(1, rollouts=rollouts)
    # Strided and big-endian arrays are the same numbers.
    stats = {(1, 0): TokenStats(np.repeat(odd, 2)[::2], odd.astype(">f4"))}
    database.record_step(StepReport(1, {}, (group,), stats))
    first, empty = database.rollouts(1)
    assert first["tokens"].tobytes() == tokens.astype("<i4").tobytes()
    for name in ("sampler_logprobs", "policy_logprobs", "entropy"):
        assert first[name].tobytes() == odd.astype("<f4").tobytes(), name
    assert empty["tokens"].shape == empty["sampler_logprobs"].shape == (0,)
    ((blob,),) = sqlite3.connect(path).execute("SELECT tokens FROM rollout_tokens WHERE sample = 0")
    assert blob[4:8] == b"\x01\x00\x00\x00"


@pytest.mark.parametrize(("store_tokens", "with_tokens"), [("all", {1, 2, 3, 4}), ("kept", {1, 3, 4}), ("none", set())])
def test_store_tokens_decides_whose_tokens_are_stored(path: Path, store_tokens: str, with_tokens: set[int]) -> None:
    verdicts = {1: "kept", 2: "all_correct", 3: "padded", 4: "carried"}
    with RunDatabase.create(path, config_yaml(store_tokens), {}) as database:
        database.record_step(make_report(1, [make_group(serial, verdict) for serial, verdict in verdicts.items()]))
        rollouts = {serial: list(database.rollouts(serial)) for serial in verdicts}
        (prompt_tokens,) = {group["prompt_tokens"] is not None for group in database.groups()}
    assert {serial for serial in verdicts if rollouts[serial][0]["tokens"] is not None} == with_tokens
    assert {serial for serial in verdicts if rollouts[serial][0]["entropy"] is not None} == with_tokens & {1, 3}
    assert all(len(rows) == 2 and rows[0]["text"] == "so 42" for rows in rollouts.values())
    assert prompt_tokens == (store_tokens != "none")


def test_steps_come_in_order_and_a_step_without_metrics_is_not_lost(database: RunDatabase) -> None:
    for step in (2, 10, 1, 3):
        database.record_step(make_report(step, metrics={} if step == 3 else {"a": step}))
    assert [(row["step"], row.get("a")) for row in database.steps()] == [(1, 1), (2, 2), (3, None), (10, 10)]


def test_reading_all_metrics_takes_time_proportional_to_the_steps(database: RunDatabase) -> None:
    def work() -> int:
        ticks = 0

        def tick() -> int:
            nonlocal ticks
            ticks += 1
            return 0

        database._connection.set_progress_handler(tick, 100)
        assert sum(1 for _ in database.steps()) == recorded
        database._connection.set_progress_handler(None, 0)
        return ticks

    metrics = {f"metric/{i}": 0.5 for i in range(10)}
    recorded, before = 100, 0
    for step in range(1, 401):
        database.record_step(make_report(step, metrics=metrics))
        if step == recorded:
            before = work()
    recorded = 400
    assert work() < 6 * before


def test_nan_and_infinity_survive_in_metrics_and_extras(database: RunDatabase) -> None:
    odd = {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "small": np.float32(0.1), "count": np.int64(3)}
    scores = (Score(math.inf, True, None, {"a": math.nan, "b": np.float64("-inf")}), Score(math.nan))
    group = make_group(1, scores=scores, rewards=np.array([math.inf, math.nan]))
    database.record_step(StepReport(1, odd, (group,), {}))
    database.record_eval(EvalReport(1, "held_out", odd, ()))
    (step,), (evaluation,) = database.steps(), database.evals()
    for metrics in (step, evaluation["metrics"]):
        assert math.isnan(metrics["nan"])
        assert (metrics["inf"], metrics["minus"], metrics["count"]) == (math.inf, -math.inf, 3)
        assert metrics["small"] == float(np.float32(0.1))
    infinite, unjudged = database.rollouts(1)
    assert (infinite["score"], infinite["reward"]) == (math.inf, math.inf)
    assert (unjudged["score"], unjudged["reward"]) == (None, None)
    assert infinite["extras"] == {"a": "nan", "b": "-inf"}


@pytest.mark.parametrize(
    "text",
    [
        "nul \x00 inside, and \x00",
        "\x1b[31mred\x1b[0m \x07 \x7f \x85 \u2028 \ufffe \uffff",
        "'; DROP TABLE steps; -- \" ` ? :x %s {}",
        "é 汉字 🙂 \U0010ffff \u202e\u200d",
        "\r\n\r\t ",
        "",
        "long " * 200_000,
    ],
)
def test_hostile_text_survives(database: RunDatabase, text: str) -> None:
    prompt = Prompt(text, ({"role": "user", "content": text},), (), text, text, {text: text})
    score = Score(None, None, text, {"extracted": text, text: [text]})
    group = Group(
        1, prompt, (make_rollout(1, 0, text),), (score,), np.zeros(1), np.zeros(1), np.zeros(1, dtype=bool), text
    )
    report = StepReport(1, {text or "x": 1.0}, (group,), {}, (Event(text, text, 1),))
    database.record_step(report)
    database.record_eval(EvalReport(1, text, {text: 1.0}, (EvalSample(prompt, make_rollout(1, 0, text), score),)))
    (found,) = database.groups(verdict=text)
    assert (found["prompt_uid"], found["data_source"], found["answer"]) == (text, text, text)
    assert (found["messages"], found["extra"]) == ([{"role": "user", "content": text}], {text: text})
    (rollout,) = database.rollouts(1)
    assert (rollout["text"], rollout["error"], rollout["extracted"]) == (text, text, text)
    assert rollout["extras"] == {"extracted": text, text: [text]}
    (event,), (evaluation,), (step,) = database.events(), database.evals(), database.steps()
    assert (event["kind"], event["message"]) == (text, text)
    assert (evaluation["name"], evaluation["metrics"]) == (text, {text: 1.0})
    assert step[text or "x"] == 1.0


def test_lone_surrogates_are_escaped_in_text_and_survive_in_json(database: RunDatabase) -> None:
    prompt = Prompt("u\ud800", ({"role": "user", "content": "c\udfff"},), (), "a\udc80")
    score = Score(None, None, "e\ud800", {"k\ud800": "v\udfff"})
    rollouts, nothing = (make_rollout(1, 0, "t\ud83d."),), np.zeros(1)
    group = Group(1, prompt, rollouts, (score,), nothing, nothing, np.zeros(1, dtype=bool), "kept")
    database.record_step(StepReport(1, {"m\ud800": 1.0}, (group,), {}, (Event("k", "m\ud800", 1),)))
    (rollout,), (found,), (event,) = database.rollouts(1), database.groups(), database.events()
    assert (rollout["text"], rollout["error"], event["message"]) == ("t\\ud83d.", "e\\ud800", "m\\ud800")
    assert rollout["extras"] == {"k\ud800": "v\udfff"}
    assert (found["prompt_uid"], found["messages"][0]["content"], found["answer"]) == ("u\\ud800", "c\udfff", "a\udc80")


def test_values_that_json_cannot_represent_do_not_stop_the_run(database: RunDatabase) -> None:
    extras = {
        "scalar": np.float32(0.5),
        "flag": np.bool_(True),
        "array": np.arange(3),
        "set": {1},
        "bytes": b"\xff",
        "type": int,
        "complex": 1j,
        ("tuple", 1): (Path("a"), None),
        3: {"deep": [np.int64(2), {"nan": math.nan}]},
    }
    prompt = Prompt("p", (), (), Fraction(1, 3))
    group = make_group(1, prompt=prompt, scores=(Score(1.0, True, None, extras), Score(0.0)))
    database.record_step(make_report(1, [group]))
    rollout, _ = database.rollouts(1)
    assert rollout["extras"] == {
        "scalar": 0.5,
        "flag": True,
        "array": [0, 1, 2],
        "set": [1],
        "bytes": "b'\\xff'",
        "type": "<class 'int'>",
        "complex": "1j",
        "('tuple', 1)": ["a", None],
        "3": {"deep": [2, {"nan": "nan"}]},
    }
    (found,) = database.groups()
    assert found["answer"] == "1/3"


def test_a_prompt_is_stored_once(path: Path, database: RunDatabase) -> None:
    database.record_eval(make_eval(0, ["p"]))
    database.record_step(make_report(1, [make_group(1, uid="p"), make_group(2, uid="p")]))
    database.record_step(make_report(2, [make_group(3, uid="p")]))
    assert [row[:2] for row in contents(path)["prompts"]] == [("p", 0)]


def test_evaluating_a_set_again_at_the_same_step_replaces_it(path: Path, database: RunDatabase) -> None:
    database.record_eval(make_eval(1, ["a", "b"], accuracy=0.25))
    database.record_eval(make_eval(1, ["a"], name="other", accuracy=0.5))
    database.record_eval(make_eval(1, ["a", "b", "c"], accuracy=0.75))
    found = [(row["step"], row["name"], row["metrics"]) for row in database.evals()]
    assert found == [(1, "held_out", {"avg@1": 0.75}), (1, "other", {"avg@1": 0.5})]
    assert sorted(row[1] for row in contents(path)["eval_samples"]) == ["a", "a", "b", "c"]


# Carried-over groups.


def test_the_history_of_a_prompt_counts_its_judged_and_its_correct_responses(path: Path, database: RunDatabase) -> None:
    groups = [make_group(1, uid="p"), make_group(2, "all_wrong", uid="p"), make_group(3, uid="q")]
    database.record_step(make_report(1, groups[:1]))
    database.record_step(make_report(2, groups[1:]))
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT * FROM prompt_history ORDER BY serial").fetchall()
    expected = []
    for step, group in zip((1, 2, 2), groups, strict=True):
        judged = [score for score in group.scores if score.judged]
        correct, mean = sum(score.acc is True for score in judged), np.mean([score.value for score in judged])
        expected.append(
            (group.prompt.uid, group.serial, step, group.verdict, len(judged), correct, pytest.approx(mean))
        )
    assert rows == expected
    assert rows[0][5] > 0


def test_a_carried_group_is_one_row_with_both_steps(path: Path, database: RunDatabase) -> None:
    database.record_step(make_report(1, [make_group(1, "carried"), make_group(2, "carried")]))
    assert [(row["verdict"], row["decided_step"]) for row in database.groups()] == [("carried", None)] * 2
    database.record_step(make_report(2, [make_group(1), make_group(2, "carried")]))
    database.record_step(make_report(3, [make_group(2, "stale")]))
    found = [(row["serial"], row["generated_step"], row["decided_step"], row["verdict"]) for row in database.groups()]
    assert found == [(1, 1, 2, "kept"), (2, 1, 3, "stale")]
    assert len(contents(path)["rollouts"]) == 4
    trained, untrained = database.rollouts(1)
    assert trained["entropy"].tolist() == (make_rollout(1, 0).logprobs * -2).tolist()
    assert untrained["entropy"] is None


def test_groups_are_found_by_the_steps_they_were_generated_and_decided_in(database: RunDatabase) -> None:
    record_three_steps(database)
    assert [row["serial"] for row in database.groups(step=2)] == [20, 21]
    assert [row["serial"] for row in database.groups(step=3)] == [21, 30, 32, 33]
    assert [row["serial"] for row in database.groups(step=3, verdict="kept")] == [21, 30]
    assert [row["serial"] for row in database.groups(verdict="carried")] == [32, 33]


def test_a_group_that_was_decided_cannot_be_decided_again(path: Path, database: RunDatabase) -> None:
    record_three_steps(database)
    before = contents(path)
    with pytest.raises(sqlite3.IntegrityError):
        database.record_step(make_report(4, [make_group(40), make_group(30, "stale")]))
    assert contents(path) == before
    with pytest.raises(sqlite3.IntegrityError):
        database.record_step(make_report(3))
    assert contents(path) == before
    database.record_step(make_report(4, [make_group(40)]))


# Rewinding.


@pytest.mark.parametrize("store_tokens", ["all", "kept", "none"])
def test_rewind_restores_the_exact_earlier_content(path: Path, store_tokens: str) -> None:
    with RunDatabase.create(path, config_yaml(store_tokens), {}) as database:
        record_three_steps(database)
        at_three = contents(path, "events")
        record_three_more(database)
        at_six = contents(path, "events")
        assert at_six != at_three
        assert database.rewind(3) == 3
        assert contents(path, "events") == at_three
        assert [row["message"] for row in database.events()] == [
            *(f"in step {step}" for step in (1, 2, 3)),
            "resumed from step 3: 3 later steps with 3 groups removed, 2 carried-over groups undecided again",
        ]
        # The same steps can be recorded again, and give the same content except for the times.
        record_three_more(database)
        untimed = ("events", "steps", "evaluations")
        assert contents(path, *untimed) == {name: rows for name, rows in at_six.items() if name not in untimed}


def test_rewind_to_zero_leaves_only_the_evaluation_before_the_first_step(path: Path, database: RunDatabase) -> None:
    database.record_eval(make_eval(0, ["e0", "e1"]))
    before = contents(path, "events")
    record_three_steps(database)
    record_three_more(database)
    assert database.rewind(0) == 6
    after = contents(path, "events")
    assert after.pop("evaluations")[0][1:3] == before.pop("evaluations")[0][1:3]
    assert after == before


def test_rewind_to_the_last_step_changes_nothing_and_is_recorded(path: Path, database: RunDatabase) -> None:
    record_three_steps(database)
    before = contents(path, "events")
    assert database.rewind(3) == 0
    assert contents(path, "events") == before
    event = list(database.events())[-1]
    assert (event["kind"], event["message"]) == ("resumed", "resumed from step 3")


def test_rewind_keeps_the_events_of_earlier_resumes(database: RunDatabase) -> None:
    record_three_steps(database)
    database.record_event(Event("stopped", "by the guard", 3))
    database.rewind(2)
    database.rewind(1)
    assert [(row["kind"], row["step"]) for row in database.events()] == [("warning", 1), ("resumed", 2), ("resumed", 1)]


def test_rewind_says_when_the_database_ends_before_the_checkpoint(database: RunDatabase) -> None:
    record_three_steps(database)
    assert database.rewind(5) == 0
    assert "ended at step 3" in list(database.events())[-1]["message"]


def test_rewind_keeps_the_prompts_of_an_older_checkpoint_evaluated_later(path: Path, database: RunDatabase) -> None:
    record_three_steps(database)
    database.record_step(make_report(4, [make_group(40, uid="late")]))
    database.record_eval(make_eval(2, ["late"]))
    database.rewind(3)
    assert "late" in {row[0] for row in contents(path)["prompts"]}


# Only whole steps are stored, whatever happens to the writer.


def write_step_four(database: RunDatabase) -> None:
    database.record_step(make_report(4, [make_group(32), *map(make_group, range(40, 44))]))


def rewind_to_one(database: RunDatabase) -> None:
    database.rewind(1)


OPERATIONS = {operation.__name__: operation for operation in (write_step_four, rewind_to_one)}


def instructions(path: Path, operation: str, die_at: int | None = None) -> int:
    """Count the SQLite instructions that the operation takes; with `die_at`, kill this process at that instruction."""
    seen = 0

    def count() -> int:
        nonlocal seen
        seen += 1
        if seen == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    with RunDatabase.open(path) as database:
        database._connection.set_progress_handler(count, 1)
        OPERATIONS[operation](database)
        database._connection.set_progress_handler(None, 0)
    return seen


def kill_writers(folder: Path, operation: str) -> None:
    """Fork one writer per file, and kill it at the instruction that the file is named after."""
    for path in folder.glob("*.db"):
        writer = os.fork()
        if writer == 0:
            instructions(path, operation, die_at=int(path.stem))
            os._exit(0)
        _, status = os.waitpid(writer, 0)
        assert os.WIFSIGNALED(status), f"the writer of {path} was not killed"
        assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_writer_killed_before_its_commit_has_changed_nothing(tmp_path: Path, path: Path, operation: str) -> None:
    with RunDatabase.create(path, config_yaml(), {}) as database:
        record_three_steps(database)
    before = contents(path)
    total = instructions(Path(shutil.copy(path, tmp_path / "whole")), operation)
    folder = tmp_path / "killed"
    folder.mkdir()
    # The COMMIT is among the last five instructions.
    points = [*np.random.default_rng(0).choice(total - 6, 15, replace=False), 0, total - 6]
    for point in points:
        shutil.copy(path, folder / f"{point + 1}.db")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, __file__, str(folder), operation], env=environment, check=True)
    for point in points:
        file = folder / f"{point + 1}.db"
        with RunDatabase.open_readonly(file) as reader:
            assert [row["step"] for row in reader.steps()] == [1, 2, 3]
        assert contents(file) == before
        with RunDatabase.open(file) as database:
            write_step_four(database)
            assert [row["step"] for row in database.steps()] == [1, 2, 3, 4]


def test_a_step_survives_a_writer_that_never_closed_its_database(tmp_path: Path, path: Path) -> None:
    with RunDatabase.create(path, config_yaml(), {}) as database:
        record_three_steps(database)
        (tmp_path / "left").mkdir()
        # A killed writer leaves the file and its WAL on the disk; the index in shared memory is lost.
        for file in (path, Path(f"{path}-wal")):
            shutil.copy(file, tmp_path / "left")
        expected = contents(path)
    with RunDatabase.open_readonly(tmp_path / "left" / "run.db") as reader:
        assert len(list(reader.steps())) == 3
    assert contents(tmp_path / "left" / "run.db") == expected


def test_an_error_within_a_step_rolls_it_back(path: Path, database: RunDatabase) -> None:
    record_three_steps(database)
    before = contents(path)
    broken = make_group(41, rewards=np.zeros(3))
    with pytest.raises(ValueError, match="zip"):
        database.record_step(make_report(4, [make_group(40), broken]))
    assert contents(path) == before


def test_a_full_disk_is_one_sentence_and_earlier_steps_stay_intact(path: Path, database: RunDatabase) -> None:
    record_three_steps(database)
    before = contents(path)
    database._connection.execute("PRAGMA max_page_count = 1")  # SQLite raises this to the current size
    text = "much " * 10_000
    with pytest.raises(StorageError, match=r"run\.db: cannot be written .*full"):
        database.record_step(make_report(4, [make_group(40, rollouts=(make_rollout(40, 0, text),) * 2)]))
    assert contents(path) == before


def test_readers_see_whole_steps_while_a_step_is_being_written(path: Path, database: RunDatabase) -> None:
    record_three_steps(database)
    seen: list[tuple[int, int]] = []
    with RunDatabase.open_readonly(path) as reader:

        def look(_: str) -> None:
            seen.append((len(list(reader.steps())), len(list(reader.groups()))))

        database._connection.set_trace_callback(look)
        database.record_step(make_report(4, map(make_group, range(40, 44))))
        database._connection.set_trace_callback(None)
        assert len(seen) > 20
        assert set(seen) == {(3, 7)}
        assert (len(list(reader.steps())), len(list(reader.groups()))) == (4, 11)


# Files that are not a run's database.


def missing(path: Path) -> None:
    pass


def empty(path: Path) -> None:
    path.touch()


def garbage(path: Path) -> None:
    path.write_bytes(b"step,reward\n" * 1000)


def short_garbage(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\x00")


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_off_in_the_first_page(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def overwritten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200] + b"\x55" * (path.stat().st_size - 200))


def newer(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 7")


def foreign(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE bookmarks (url)")
        connection.execute("PRAGMA user_version = 1")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("opening", [RunDatabase.open, RunDatabase.open_readonly])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (missing, "there is no run database here"),
        (empty, "is empty"),
        (garbage, "file is not a database"),
        (short_garbage, "file is not a database"),
        (cut_off, "malformed"),
        (cut_off_in_the_first_page, "malformed|not a database|disk I/O error"),
        (overwritten, "malformed|not a database"),
        (newer, "has schema version 7, but this version of dapo reads 4"),
        (foreign, "is an SQLite database, but not a run's"),
        (directory, "is not a regular file"),
    ],
)
def test_a_file_that_is_not_a_run_database_is_refused_in_one_sentence(
    path: Path, opening: Callable[[Path], RunDatabase], damage: Callable[[Path], None], reason: str
) -> None:
    if damage not in (missing, empty, garbage, short_garbage):
        with RunDatabase.create(path, config_yaml(), {}) as database:
            record_three_steps(database)
    damage(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(CheckpointError, match=reason) as refusal:
        opening(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert "\n" not in str(refusal.value)
    assert (path.read_bytes() if path.is_file() else None) == before


def test_create_refuses_to_write_over_anything(path: Path) -> None:
    with RunDatabase.create(path, config_yaml(), {}) as database:
        record_three_steps(database)
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="exists already"):
        RunDatabase.create(path, config_yaml(), {})
    assert path.read_bytes() == before
    garbage(path)
    with pytest.raises(CheckpointError, match="not a database"):
        RunDatabase.create(path, config_yaml(), {})
    assert path.read_bytes().startswith(b"step,reward")
    with pytest.raises(StorageError, match="unable to open"):
        RunDatabase.create(path.parent / "nowhere" / "run.db", config_yaml(), {})


def test_create_accepts_the_empty_file_of_a_killed_start(path: Path) -> None:
    path.touch()
    with RunDatabase.create(path, config_yaml(), {"version": "1"}) as database:
        assert database.meta()["version"] == "1"


def test_damage_found_later_is_one_sentence_too(path: Path) -> None:
    with RunDatabase.create(path, config_yaml(), {}) as database:
        record_three_steps(database)
        record_three_more(database)
    with closing(sqlite3.connect(path)) as plain:
        (page,) = plain.execute("SELECT rootpage FROM sqlite_master WHERE name = 'steps'").fetchone()
        (size,) = plain.execute("PRAGMA page_size").fetchone()
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\x55" * size)
    with RunDatabase.open_readonly(path) as reader, pytest.raises(CheckpointError, match=r"run\.db: cannot be read"):
        list(reader.steps())


def test_a_readonly_database_cannot_be_written(path: Path, database: RunDatabase) -> None:
    with RunDatabase.open_readonly(path) as reader, pytest.raises(StorageError, match="readonly"):
        reader.record_event(Event("note", "no", 0))


def test_a_finished_run_can_be_read_from_a_readonly_folder(path: Path) -> None:
    with RunDatabase.create(path, config_yaml(), {}) as database:
        record_three_steps(database)
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        if os.access(path.parent, os.W_OK):
            pytest.skip("nothing is read-only to this user")
        with RunDatabase.open_readonly(path) as reader:
            assert len(list(reader.steps())) == 3
    finally:
        path.parent.chmod(0o755)


def test_a_path_may_contain_any_character(tmp_path: Path) -> None:
    folder = tmp_path / "run #1?mode=memory&x %20 ü"
    folder.mkdir()
    with RunDatabase.create(folder / "run.db", config_yaml(), {}) as database:
        database.record_step(make_report(1))
    with RunDatabase.open_readonly(folder / "run.db") as reader:
        assert len(list(reader.steps())) == 1
    assert [file.name for file in tmp_path.iterdir()] == [folder.name]


def test_a_resumed_run_can_change_its_configuration(path: Path) -> None:
    with RunDatabase.create(path, config_yaml("all"), {"version": "1"}) as database:
        assert database.meta()["config"] == config_yaml("all")
        database.record_step(make_report(1, [make_group(1)]))
    with RunDatabase.open(path) as database:
        database.record_step(make_report(2, [make_group(2)]))
    with RunDatabase.open(path) as database:
        database.record_resume(config_yaml("none"), {"version": "2"}, Event(EventKind.CONFIGURATION, "tokens", 2))
        database.record_step(make_report(3, [make_group(3)]))
        stored = [next(database.rollouts(serial))["tokens"] is not None for serial in (1, 2, 3)]
        assert {"config": config_yaml("none"), "version": "2"}.items() <= database.meta().items()
        assert "tokens" in [event["message"] for event in database.events()]
    assert stored == [True, True, False]


# The documentation.


def documented(language: str) -> list[str]:
    page = Path(__file__).parents[2] / "docs" / "reference" / "run-database.md"
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def varied_run(path: Path, database: RunDatabase) -> Path:
    cut_off = replace(make_rollout(70, 0), finish_reason="length")
    unjudged = (Score(0.5, False), Score(None, None, "timeout"))
    record_three_steps(database)
    record_three_more(database)
    database.record_step(
        make_report(7, [make_group(70, uid="p10", rollouts=(cut_off, make_rollout(70, 1)), scores=unjudged)])
    )
    database.record_step(make_report(8, [make_group(80, scores=unjudged)]))
    return path


@pytest.mark.parametrize("query", documented("sql"))
def test_every_documented_query_finds_something(varied_run: Path, query: str) -> None:
    assert sqlite3.connect(varied_run).execute(query).fetchall()


@pytest.mark.parametrize("example", documented("python"))
def test_every_documented_python_example_runs(
    varied_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], example: str
) -> None:
    monkeypatch.chdir(varied_run.parent)
    names: dict[str, Any] = {"np": np, "sqlite3": sqlite3, "RunDatabase": RunDatabase}
    exec(example, names)
    assert len(capsys.readouterr().out.splitlines()) > 5 or names["entropy"].shape == (3,)


if __name__ == "__main__":
    kill_writers(Path(sys.argv[1]), sys.argv[2])
