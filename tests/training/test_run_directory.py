"""Tests of the run directory: a foreign folder is never changed, and an existing run is never started again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from dapo.checkpoint.export import export_run
from dapo.config import Config
from dapo.errors import CheckpointError, ConfigError, DapoError, StorageError
from dapo.evaluation.subjects import resolve
from dapo.store.configuration import database_config, recorded_config
from dapo.store.database import RunDatabase
from dapo.training.run_directory import RunDirectory
from dapo.training.trainer import Trainer
from dapo.types import Event, EventKind
from tests import runs


def content(folder: Path) -> dict[str, bytes | None]:
    """Return every file below `folder` with its bytes, and every folder with None."""
    found = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


def train(config: Config, *, resume: bool = False) -> None:
    Trainer(config, resume=resume).train()


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Return a folder with a model, data, a recipe, and a run of three steps with checkpoints of the last two."""
    folder = tmp_path_factory.mktemp("finished")
    train(runs.load(folder, "run.name=run", "run.steps=3", "run.save_every=1"))
    return folder


def copy_of(finished: Path, tmp_path: Path, *overrides: str) -> Config:
    shutil.copytree(finished / "runs" / "run", tmp_path / "run")
    return runs.load(finished, f"run.dir={tmp_path}", "run.name=run", "run.save_every=1", "run.steps=4", *overrides)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "files",
    [
        ["checkpoints/epoch_3/model.bin"],
        ["checkpoints/step_7/model.safetensors"],
        ["checkpoints/step_7/trainer/state.json", "notes.txt"],
        ["thesis.tex"],
        ["config.yaml"],
        [".lock", "config.yaml"],
        [".lock", "checkpoints/latest"],
        ["a", "b", "c", "d", "e"],
    ],
    ids=" ".join,
)
def test_a_folder_that_is_not_a_run_s_is_refused_unchanged(tmp_path, files, resume):
    config = runs.load(tmp_path, "run.name=mine")
    for name in files:
        (config.run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (config.run_dir / name).write_text("precious")
    before = content(config.run_dir)
    with pytest.raises(CheckpointError, match=r"is not a run's folder, but holds|holds checkpoints \(of steps 7"):
        Trainer(config, resume=resume)
    assert content(config.run_dir) == before


@pytest.mark.parametrize("database", ["not SQLite at all", "another program's"])
def test_a_database_that_is_not_a_run_s_is_refused_unchanged(tmp_path, database):
    import sqlite3

    config = runs.load(tmp_path, "run.name=mine")
    config.run_dir.mkdir(parents=True)
    file = config.run_dir / "run.db"
    if database == "another program's":
        with sqlite3.connect(file) as connection:
            connection.execute("CREATE TABLE addresses (name)")
        connection.close()
    else:
        file.write_text("this is a text file, and long enough to be looked at " * 50)
    before = content(config.run_dir)
    with pytest.raises(CheckpointError, match=r"run\.db: .*(not a database|but not a run's)"):
        Trainer(config)
    assert content(config.run_dir) == before


def test_a_run_does_not_resume_with_other_variables_for_its_chat_template(finished, tmp_path):
    config = copy_of(finished, tmp_path, "data.chat_template_kwargs.enable_thinking=false")
    with pytest.raises(
        CheckpointError,
        match=r"data.chat_template_kwargs cannot change in a run: it is \{\}, not \{'enable_thinking': False\}",
    ):
        train(config, resume=True)


def test_resume_never_starts_a_run(tmp_path):
    config = runs.load(tmp_path, "run.name=new")
    with pytest.raises(CheckpointError, match="there is no run to resume; leave out --resume to start one"):
        Trainer(config, resume=True)
    assert not config.run_dir.exists()


def test_a_start_that_fails_leaves_no_folder(tmp_path):
    config = runs.load(tmp_path, "run.name=new", f"data.train={tmp_path}/gone.jsonl")
    with pytest.raises(DapoError, match=r"gone\.jsonl"):
        Trainer(config)
    assert not config.run_dir.parent.exists()
    config.run_dir.mkdir(parents=True)
    with pytest.raises(DapoError, match=r"gone\.jsonl"):
        Trainer(config)
    assert content(config.run_dir) == {}, "a folder that existed before stays"


def test_a_lost_configuration_is_taken_from_the_database(finished, tmp_path):
    config = copy_of(finished, tmp_path)
    (config.run_dir / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"run\.seed cannot change in a run: it is 5, not 6"):
        Trainer(runs.load(finished, f"run.dir={tmp_path}", "run.name=run", "run.seed=6"), resume=True)
    train(config, resume=True)
    assert len(runs.metrics(config.run_dir)) == 4
    assert Config.load(config.run_dir / "config.yaml") == config


def test_checkpoints_without_a_database_are_refused_unchanged(finished, tmp_path):
    config = copy_of(finished, tmp_path)
    (config.run_dir / "run.db").unlink()
    before = content(config.run_dir)
    for resume in (True, False):
        with pytest.raises(CheckpointError, match=r"holds checkpoints \(of steps 2, 3\) but no run database; copy"):
            Trainer(config, resume=resume)
    (config.run_dir / "run.db").touch()  # left by a process that was killed while creating it
    with pytest.raises(CheckpointError, match="but no run database"):
        Trainer(config, resume=True)
    (config.run_dir / "run.db").unlink()
    assert content(config.run_dir) == before


def test_a_database_copied_without_its_wal_still_resumes_from_the_checkpoint(tmp_path):
    """The checkpoint decides where the run resumes; an event says that the copy lacks steps."""
    config = runs.load(tmp_path, "run.name=run", "run.steps=3", "run.save_every=1")
    trainer = Trainer(config)
    for _ in range(2):
        trainer.train_step()
        trainer.save_checkpoint()
    trainer.recorder.flush()
    assert (config.run_dir / "run.db-wal").stat().st_size > 0
    copy = tmp_path / "runs" / "copy"
    shutil.copytree(config.run_dir, copy, ignore=shutil.ignore_patterns("run.db-*"))
    trainer.close()
    with RunDatabase.open_readonly(copy / "run.db") as database:
        assert database.last_step() < 2
    train(runs.load(tmp_path, "run.name=copy", "run.steps=3", "run.save_every=1"), resume=True)
    assert runs.weights(copy, 3).keys() == runs.weights_of(tmp_path / "model").keys()
    with RunDatabase.open_readonly(copy / "run.db") as database:
        assert any("the database ended at step" in event["message"] for event in database.events())


def test_a_run_whose_checkpoints_are_missing_is_refused_and_keeps_its_records(finished, tmp_path):
    config = copy_of(finished, tmp_path)
    shutil.rmtree(config.run_dir / "checkpoints")
    with pytest.raises(CheckpointError, match="has recorded 3 steps, but its checkpoints are missing; put them back"):
        Trainer(config, resume=True)
    assert len(runs.metrics(config.run_dir)) == 3


def test_fewer_steps_than_an_unfinished_run_has_reached_are_refused_unchanged(finished, tmp_path):
    fewer = copy_of(finished, tmp_path, "run.steps=2")
    with RunDatabase.open(fewer.run_dir / "run.db") as database:
        database.record_event(Event(EventKind.INTERRUPTED, "stopped by SIGTERM", 3))
    before = content(fewer.run_dir)
    with pytest.raises(CheckpointError, match=r"run\.steps is 2, but the run has already reached step 3; it counts"):
        Trainer(fewer, resume=True)
    assert content(fewer.run_dir) == before
    assert recorded_config(fewer.run_dir).run.steps == 3
    Trainer(recorded_config(fewer.run_dir).renamed("run", str(tmp_path)), resume=True).close()


def test_a_run_without_a_step_can_be_started_again_with_other_options_or_resumed(tmp_path):
    Trainer(runs.load(tmp_path, "run.name=run", "run.seed=1")).close()
    Trainer(runs.load(tmp_path, "run.name=run", "run.seed=2")).close()
    with pytest.raises(CheckpointError, match=r"run\.seed cannot change in a run: it is 2, not 3"):
        Trainer(runs.load(tmp_path, "run.name=run", "run.seed=3"), resume=True)
    config = runs.load(tmp_path, "run.name=run", "run.seed=2", "run.steps=1")
    train(config, resume=True)
    assert len(runs.metrics(config.run_dir)) == 1


def test_a_user_s_own_files_in_a_run_s_folder_are_accepted_and_kept(tmp_path):
    config = runs.load(tmp_path, "run.name=run", "run.steps=1")
    Trainer(config).close()
    (config.run_dir / "notes.txt").write_text("precious")
    train(config)
    train(runs.load(tmp_path, "run.name=run", "run.steps=2"), resume=True)
    assert (config.run_dir / "notes.txt").read_text() == "precious"


def test_a_finished_run_leaves_only_the_documented_files(finished):
    names = {path.name for path in (finished / "runs" / "run").iterdir()}
    assert names == {".lock", "config.yaml", "run.db", "checkpoints"}
    assert {path.name for path in (finished / "runs" / "run" / "checkpoints").iterdir()} == {"step_2", "step_3"}


def test_leftovers_of_a_killed_process_are_cleaned_up_and_others_are_not(finished, tmp_path):
    config = copy_of(finished, tmp_path)
    folder = config.run_dir / "checkpoints"
    for name in (".partial/step_4/trainer", "mine"):
        (folder / name).mkdir(parents=True)
    trainer = Trainer(config, resume=True)
    assert {path.name for path in folder.iterdir()} == {"step_2", "step_3", "mine"}
    trainer.close()


def test_a_lock_that_was_deleted_by_its_owner_can_be_taken_again(tmp_path):
    config = runs.load(tmp_path, "run.name=run")
    one = RunDirectory(config, resume=False)
    one.abandon()
    two = RunDirectory(config, resume=False)
    with pytest.raises(CheckpointError, match="another Trainer of this program has this run open; call its close"):
        RunDirectory(config, resume=False)
    two.abandon()
    assert not config.run_dir.exists()


def test_of_two_processes_with_the_same_run_name_the_slower_one_is_refused_and_changes_nothing(tmp_path):
    """Start both at the same moment; the second must not touch the run of the first."""
    recipe = runs.recipe(tmp_path)
    command = [sys.executable, "-m", "dapo", "train", str(recipe), "run.name=both", "run.steps=2", "run.save_every=1"]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) for _ in range(2)]
    errors = [process.communicate()[1].decode() for process in processes]
    codes = sorted(process.returncode for process in processes)
    assert codes == [0, 2], errors
    (refused,) = [error for error in errors if "error:" in error]
    assert "another process is training this run" in refused or "already holds a run" in refused
    assert len(runs.metrics(tmp_path / "runs" / "both")) == 2


def test_a_lock_is_released_when_its_process_is_killed(tmp_path):
    recipe = runs.recipe(tmp_path)
    command = [sys.executable, "-m", "dapo", "train", str(recipe), "run.name=killed", "run.steps=100000"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    run_dir = tmp_path / "runs" / "killed"
    while not (run_dir / "config.yaml").exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    config = runs.load(tmp_path, "run.name=killed", "run.steps=1", "run.save_every=1")
    Trainer(config, resume=True).close()


@pytest.mark.parametrize("mode", [0o500, 0o000])
def test_a_folder_that_cannot_be_written_to_is_one_sentence(tmp_path, mode):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    config = runs.load(tmp_path, "run.name=run")
    config.run_dir.parent.mkdir()
    config.run_dir.parent.chmod(mode)
    with pytest.raises((CheckpointError, ConfigError), match="Permission denied"):
        Trainer(config)


def test_a_file_in_place_of_the_folder_is_one_sentence(tmp_path):
    config = runs.load(tmp_path, "run.name=run")
    config.run_dir.parent.mkdir()
    config.run_dir.write_text("a file")
    with pytest.raises(CheckpointError, match=r"run: (Not a directory|File exists)"):
        Trainer(config)
    assert config.run_dir.read_text() == "a file"


def test_a_run_whose_folder_is_moved_away_while_it_trains_stops(tmp_path):
    trainer = Trainer(runs.load(tmp_path, "run.name=run", "run.save_every=0"))
    trainer.train_step()
    trainer.config.run_dir.rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="was moved, deleted or replaced while the run was training; move it back"):
        trainer.train()
    assert not trainer.config.run_dir.exists(), "nothing is written to where the folder was"


def test_a_lock_that_is_not_a_file_is_refused(tmp_path):
    config = runs.load(tmp_path, "run.name=run")
    config.run_dir.mkdir(parents=True)
    os.mkfifo(config.run_dir / ".lock")
    with pytest.raises(CheckpointError, match=r"\.lock: is not a regular file; remove it"):
        Trainer(config)


def test_a_lost_configuration_and_an_unreadable_copy_of_it_are_one_sentence(finished, tmp_path):
    config = copy_of(finished, tmp_path)
    (config.run_dir / "config.yaml").unlink()
    with RunDatabase.open(config.run_dir / "run.db") as database:
        database._connection.execute("UPDATE meta SET value = '{' WHERE key = 'config'")
    with pytest.raises(DapoError, match=r"run\.db"):
        Trainer(config, resume=True)


def test_a_live_run_without_its_lock_is_not_taken_for_a_folder_without_a_database(tmp_path):
    trainer = Trainer(runs.load(tmp_path, "run.name=run", "run.save_every=1"))
    trainer.train_step()
    trainer.save_checkpoint()
    trainer.recorder.flush()
    (trainer.config.run_dir / ".lock").unlink()
    with pytest.raises(CheckpointError, match="already holds a run"):
        Trainer(trainer.config)
    trainer.close()


def test_export_and_evaluation_do_not_need_config_yaml(finished, tmp_path):
    config = copy_of(finished, tmp_path)
    (config.run_dir / "config.yaml").unlink()
    export_run(config.run_dir, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    (subject,) = resolve([str(config.run_dir)], data="d.jsonl")
    assert subject.step == 3
    weights = config.run_dir / "checkpoints" / "step_3" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"the checkpoint is damaged .* \(of step 2\)"):
        resolve([str(config.run_dir)], data="d.jsonl")


def test_a_resume_with_other_threads_says_so_because_sums_then_round_differently(tmp_path):
    train(runs.load(tmp_path, "run.name=run", "run.steps=1"))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        train(runs.load(tmp_path, "run.name=run", "run.steps=2"), resume=True)
    finally:
        torch.set_num_threads(threads)
    with RunDatabase.open_readonly(tmp_path / "runs" / "run" / "run.db") as database:
        (message,) = (event["message"] for event in database.events() if event["kind"] == "configuration")
    assert message == f"changed on resume: run.steps 1 -> 2; threads {threads} -> {threads + 1}"


def edited(config: Config, key: str, value: object) -> None:
    """Change an option in the run's config.yaml by hand."""
    file = config.run_dir / "config.yaml"
    values = yaml.safe_load(file.read_text())
    section, name = key.split(".")
    values[section][name] = value
    file.write_text(yaml.safe_dump(values))


def test_an_edited_configuration_is_listed_on_resume_and_fixed_options_stay_fixed(finished, tmp_path):
    config = copy_of(finished, tmp_path)
    edited(config, "optim.lr", 0.5)
    trainer = Trainer({"run.dir": str(tmp_path), "run.name": "run", "run.steps": 4}, resume=True, quiet=True)
    trainer.close()
    assert trainer.config.optim.lr == 0.5
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        (message,) = (event["message"] for event in database.events() if event["kind"] == "configuration")
        assert database_config(database).optim.lr == 0.5
    assert "optim.lr 0.001 -> 0.5" in message
    edited(config, "run.seed", 99)
    with pytest.raises(
        CheckpointError,
        match=r"run\.seed cannot change in a run: it is 5, not 99; set it back, or choose another run\.name",
    ):
        Trainer({"run.dir": str(tmp_path), "run.name": "run"}, resume=True)


def test_options_that_another_version_recorded_are_taken_from_an_adapted_configuration(finished, tmp_path):
    config = copy_of(finished, tmp_path)
    with RunDatabase.open(config.run_dir / "run.db") as database:
        text = database.meta()["config"].replace("store_tokens:", "older_name: 1\n  store_tokens:")
        database._connection.execute("UPDATE meta SET value = ? WHERE key = 'config'", (text,))
    Trainer(config, resume=True, quiet=True).close()
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        (message,) = (event["message"] for event in database.events() if event["kind"] == "configuration")
        assert database_config(database).run.steps == 4
    assert "config.yaml is used without comparing it" in message and "older_name" in message
