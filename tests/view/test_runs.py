"""Runs are found only inside their folder and summarized in one line; a broken run gets one sentence."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from dapo import Trainer
from dapo.errors import CheckpointError
from dapo.store.database import RunDatabase
from dapo.types import EvalReport, Event
from dapo.view import runs as module
from dapo.view.curves import evaluations, metric_names, spread, verdicts_over_steps
from dapo.view.groups import count_groups, groups
from dapo.view.health import newest_events, unjudged
from dapo.view.runs import find_run, run_names, summaries, summary
from dapo.view.source import Run, progress
from tests import runs
from tests.view.made import create, make_group, make_report


def test_a_real_run_is_summarized(trained: Run):
    found = summary(trained.path.parent.parent, "real")
    assert found.problem is None
    assert (found.status, found.step, found.planned, found.recipe) == ("finished", 4, 4, "real")
    assert found.model.endswith("/model")
    with RunDatabase.open_readonly(trained.path) as database:
        rewards = [step["reward/mean"] for step in database.steps()]
    assert found.rewards.tolist() == rewards
    assert found.reward == rewards[-1]
    assert 0 < time.time() - found.started < 3600
    assert found.started - 1 <= found.changed <= time.time()


def test_a_recorded_recipe_takes_precedence_over_the_name_of_the_run(tmp_path: Path):
    with create(tmp_path, name="first") as database:
        config = database.meta()["config"]
    (tmp_path / "second").mkdir()
    RunDatabase.create(tmp_path / "second" / "run.db", config, {"recipe": "arithmetic"}).close()
    assert [summary(tmp_path, name).recipe for name in ("first", "second")] == ["first", "arithmetic"]


def test_a_folder_of_runs_and_the_folder_of_one_run_both_work(tmp_path: Path):
    for name in ("b", "a", "c"):
        create(tmp_path, name=name).close()
    (tmp_path / "no run").mkdir()
    (tmp_path / "file").write_text("")
    assert run_names(tmp_path) == ["a", "b", "c"]
    assert run_names(tmp_path / "b") == ["b"]
    assert find_run(tmp_path / "b", "b") == find_run(tmp_path, "b") == Run("b", tmp_path / "b" / "run.db")
    with pytest.raises(CheckpointError, match="holds the run 'b', not 'a'"):
        find_run(tmp_path / "b", "a")


def test_the_newest_runs_are_listed_first_up_to_a_limit(tmp_path: Path):
    for day, name in enumerate("dbaec", start=1):
        create(tmp_path, name=name).close()
        with closing(sqlite3.connect(tmp_path / name / "run.db")) as database, database:
            database.execute("UPDATE meta SET value = ? WHERE key = 'created'", (f"2026-01-0{day}T00:00:00+0000",))
        os.utime(tmp_path / name, (day, day))
    (tmp_path / "unreadable").mkdir()
    (tmp_path / "unreadable" / "run.db").touch()
    os.utime(tmp_path / "unreadable", (4.5, 4.5))
    assert [found.name for found in summaries(tmp_path)] == [*"ceabd", "unreadable"]
    assert [found.name for found in summaries(tmp_path, limit=3)] == ["c", "e", "unreadable"]


@pytest.mark.parametrize(
    ("kinds", "status"),
    [
        ([], "crashed"),
        (["finished"], "finished"),
        (["stopped"], "stopped"),
        (["interrupted"], "stopped"),
        (["interrupted", "resumed"], "crashed"),
        (["interrupted", "resumed", "exhausted", "finished", "data"], "finished"),
    ],
)
def test_the_status_of_a_run_without_a_process_follows_from_its_last_final_event(
    tmp_path: Path, kinds: list[str], status: str
):
    with create(tmp_path) as database:
        database.record_step(make_report(1, events=[Event("unjudged", "some", 1)]))
        for kind in kinds:
            database.record_event(Event(kind, "", 1))
    (tmp_path / "made" / ".lock").touch()
    assert summary(tmp_path, "made").status == status


def test_an_evaluation_without_training_is_finished(tmp_path: Path):
    with create(tmp_path) as database:
        database.record_eval(EvalReport(0, "set", {"avg@1": 0.5}, ()))
    assert summary(tmp_path, "made").status == "finished"


def test_a_run_is_running_until_its_trainer_is_closed(tmp_path: Path):
    config = runs.load(tmp_path, "run.name=now")
    trainer = Trainer(config)
    try:
        trainer.train_step()
        assert summary(config.run_dir.parent, "now").status == "running"
    finally:
        trainer.close()
    found = summary(config.run_dir.parent, "now")
    assert (found.status, found.step) == ("crashed", 1)


def test_a_held_lock_is_detected_without_taking_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / ".lock"
    assert not module.is_held(path)
    path.touch()
    assert not module.is_held(path)
    code = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, 2); print('held', flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    with monkeypatch.context() as forbidden:
        forbidden.setattr(fcntl, "flock", None)
        assert module.is_held(path)
        assert not module.is_held(tmp_path)
    monkeypatch.setattr(module, "_LOCKS", tmp_path / "no table of locks")
    assert module.is_held(path)
    monkeypatch.undo()
    holder.communicate("go")
    assert not module.is_held(path)
    monkeypatch.setattr(module, "_LOCKS", tmp_path / "no table of locks")
    assert not module.is_held(path)


def test_a_lock_with_the_same_inode_on_another_device_is_resolved_by_the_open_files(tmp_path: Path):
    path = tmp_path / ".lock"
    with path.open("w") as file:
        wanted = os.stat(file.fileno())
        assert module._has_open(os.getpid(), wanted)
    assert not module._has_open(os.getpid(), wanted)


def damage(path: Path, kind: str) -> None:
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("this is not a database, " * 100)
    elif kind == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif kind == "zeros":
        size = path.stat().st_size
        path.write_bytes(path.read_bytes()[:4096] + bytes(size - 4096))
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "missing":
        path.unlink()
        (path.parent / "config.yaml").touch()
    else:
        statements = {
            "older": "PRAGMA user_version = 2",
            "other": "PRAGMA application_id = 7",
            "no config": "DELETE FROM meta",
            "bad config": "UPDATE meta SET value = 'a: [' WHERE key = 'config'",
            "no table": "DROP TABLE metrics",
        }
        with sqlite3.connect(path) as connection:
            connection.execute(statements[kind])
        connection.close()


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("empty", "is empty; the run never started"),
        ("text", "not a database"),
        ("half", "malformed"),
        ("zeros", "malformed"),
        ("folder", "is not a regular file"),
        ("missing", "there is no run database here"),
        ("older", "has schema version 2, but this version of dapo reads"),
        ("other", "is an SQLite database, but not a run's"),
        ("no config", "holds no configuration that can be read"),
        ("bad config", "holds no configuration that can be read"),
        ("no table", "its table metrics is missing"),
    ],
)
def test_a_broken_database_gets_one_sentence_and_the_other_runs_stay_listed(tmp_path: Path, kind: str, sentence: str):
    for name in ("broken", "good"):
        with create(tmp_path, name=name) as database:
            database.record_step(make_report(1, [make_group(serial) for serial in range(50)]))
    damage(tmp_path / "broken" / "run.db", kind)
    good, broken = summaries(tmp_path)
    assert (broken.name, broken.status) == ("broken", None)
    assert re.search(sentence, broken.problem), broken.problem
    assert "\n" not in broken.problem
    assert (good.name, good.problem, good.step) == ("good", None, 1)


def test_every_query_of_a_broken_database_raises_one_sentence(tmp_path: Path):
    with create(tmp_path) as database:
        database.record_step(make_report(1, [make_group(serial) for serial in range(50)]))
    run = find_run(tmp_path, "made")
    damage(run.path, "zeros")
    for query in (
        progress,
        metric_names,
        spread,
        verdicts_over_steps,
        evaluations,
        groups,
        count_groups,
        newest_events,
        unjudged,
    ):
        with pytest.raises(CheckpointError, match="malformed"):
            query(run)


def test_a_missing_folder_is_one_sentence(tmp_path: Path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        run_names(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../outside", "/etc", "inside/../../outside", "a\\b", "a\0b", "nothing"]
)
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str):
    create(tmp_path, name="outside").close()
    create(tmp_path / "runs", name="inside").close()
    with pytest.raises(CheckpointError):
        find_run(tmp_path / "runs", name)
    assert summary(tmp_path / "runs", name).problem


@pytest.mark.parametrize("what", ["folder", "run.db", "run.db-wal", "run.db-shm", "link to link"])
def test_no_link_leads_out_of_the_folder(tmp_path: Path, what: str):
    create(tmp_path, name="outside").close()
    outside, run = tmp_path / "outside", tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    if what == "folder":
        run.rmdir()
        run.symlink_to(outside)
    elif what == "run.db":
        (run / "run.db").symlink_to("../../outside/run.db")
    elif what == "link to link":
        (tmp_path / "runs" / "hop").symlink_to(outside)
        run.rmdir()
        run.symlink_to("hop")
    else:
        shutil.copy(outside / "run.db", run / "run.db")
        (run / what).symlink_to(outside / "run.db")
    assert "run" in run_names(tmp_path / "runs")
    with pytest.raises(CheckpointError, match="a link that leads out"):
        find_run(tmp_path / "runs", "run")
    assert "leads out" in summary(tmp_path / "runs", "run").problem


def test_a_link_to_itself_is_one_sentence(tmp_path: Path):
    (tmp_path / "folder").symlink_to("folder")
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "run.db").symlink_to("run.db")
    for name in ("folder", "file"):
        assert re.search("is not a regular file|no run database here", summary(tmp_path, name).problem)


def test_links_within_the_folder_and_to_the_folder_are_followed(tmp_path: Path):
    create(tmp_path / "runs", name="run").close()
    (tmp_path / "runs" / "latest").symlink_to("run")
    (tmp_path / "elsewhere").symlink_to("runs")
    assert [found.problem for found in summaries(tmp_path / "elsewhere")] == [None, None]
    assert find_run(tmp_path / "elsewhere", "latest").path == tmp_path / "runs" / "run" / "run.db"
