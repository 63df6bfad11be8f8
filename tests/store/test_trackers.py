"""Tests of the trackers: their files contain what was reported, and no tracker can stop, slow or disturb a run."""

from __future__ import annotations

import json
import math
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapo.config import Config
from dapo.errors import ConfigError
from dapo.store import trackers as module
from dapo.store.database import RunDatabase
from dapo.store.trackers import Trackers, require_trackers
from dapo.training.trainer import Trainer
from dapo.types import EvalReport, StepReport
from tests import runs

Points = list[tuple[int, float]]

ALL = [
    pytest.param(name, marks=pytest.mark.skipif(util.find_spec(name) is None, reason=f"{name} is not installed"))
    for name in ("tensorboard", "wandb", "trackio")
]
needs_all = pytest.mark.skipif(
    any(util.find_spec(name) is None for name in ("tensorboard", "wandb", "trackio")),
    reason="needs all three: pip install -e '.[trackers]'",
)
needs_tensorboard = pytest.mark.skipif(util.find_spec("tensorboard") is None, reason="tensorboard is not installed")


@pytest.fixture(autouse=True)
def _without_the_user_s_settings(monkeypatch):
    """Remove the user's settings, so that nothing is sent to the user's account."""
    for name in list(os.environ):
        if name.startswith(("WANDB_", "TRACKIO_")):
            monkeypatch.delenv(name)


def configured(folder: Path, *names: str) -> Config:
    run = {"name": "größe 1", "dir": str(folder), "trackers": list(names)}
    config = Config.parse({"run": run, "model": {"path": "m"}, "data": {"train": "d.jsonl"}, "optim": {"lr": 3e-5}})
    config.run_dir.mkdir(parents=True, exist_ok=True)
    return config


def step_report(step: int, **metrics: float) -> StepReport:
    return StepReport(step, {name.replace("__", "/"): value for name, value in metrics.items()}, (), {})


def tracked(config: Config, *reports: StepReport | EvalReport, after: int = 0) -> list[str]:
    """Start the trackers, send the reports, close, and return the failures."""
    faults: list[str] = []
    trackers = Trackers(config, after, faults.append)
    for report in reports:
        trackers.step(report) if isinstance(report, StepReport) else trackers.evaluation(report)
    trackers.close()
    return faults


def read_tensorboard(run_dir: Path) -> dict[str, Points]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def read_wandb(run_dir: Path) -> dict[str, Points]:
    curves: dict[str, Points] = {}
    for record in wandb_records(run_dir):
        if record.WhichOneof("record_type") == "history":
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }
            step = int(values["_step"])
            for name, value in values.items():
                if not name.startswith("_"):
                    curves.setdefault(name, []).append((step, float(value)))
    return curves


def wandb_records(run_dir: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb")):
        for data in log_entries(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            yield record


def log_entries(data: bytes) -> Iterator[bytes]:
    """Parse wandb's file, for which it ships no reader: LevelDB's log format, 32 KiB blocks after a 7-byte header."""
    assert data.startswith(b":W&B")
    at, entry = 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        entry += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole entry, or the last part of one
            yield entry
            entry = b""


def read_trackio(run_dir: Path) -> dict[str, Points]:
    curves: dict[str, Points] = {}
    for step, metrics in trackio_rows(run_dir, "SELECT step, metrics FROM metrics ORDER BY id"):
        for name, value in json.loads(metrics).items():
            curves.setdefault(name, []).append((step, float(value)))
    return curves


def trackio_rows(run_dir: Path, query: str) -> list[tuple[Any, ...]]:
    import sqlite3

    with sqlite3.connect(run_dir / "trackio" / "dapo.db") as connection:
        return connection.execute(query).fetchall()


READERS: Mapping[str, Callable[[Path], dict[str, Points]]] = {
    "tensorboard": read_tensorboard, "wandb": read_wandb, "trackio": read_trackio,
}  # fmt: skip


def assert_same(found: dict[str, Points], expected: dict[str, Points]) -> None:
    assert found.keys() == expected.keys()
    for name, points in expected.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        # TensorBoard keeps 32 bits.
        np.testing.assert_allclose([v for _, v in found[name]], [v for _, v in points], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", ALL)
def test_every_metric_arrives_with_its_step_and_name(tmp_path, name, capfd):
    config = configured(tmp_path, name)
    faults = tracked(
        config,
        EvalReport(0, "aime", {"avg@2": 0.25, "avg@2/low": 0.125}, ()),
        step_report(1, loss=1 / 3, groups__dropped__all_right=3, kl=math.nan),
        step_report(2, loss=np.float32(-2.5), groups__dropped__all_right=np.int64(0), grad_norm=math.inf),
        EvalReport(2, "aime", {"avg@2": 0.5, "avg@2/low": 0.375}, ()),
    )
    assert faults == []
    assert_same(
        READERS[name](config.run_dir),
        {
            "eval/aime/avg@2": [(0, 0.25), (2, 0.5)],
            "eval/aime/avg@2/low": [(0, 0.125), (2, 0.375)],
            "loss": [(1, 1 / 3), (2, -2.5)],
            "groups/dropped/all_right": [(1, 3.0), (2, 0.0)],
            "kl": [(1, math.nan)],
            "grad_norm": [(2, math.inf)],
        },
    )
    assert capfd.readouterr() == ("", "")


@needs_all
def test_every_tracker_gets_the_configuration_and_the_name_and_nothing_about_the_machine(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = configured(tmp_path, "tensorboard", "wandb", "trackio")
    assert tracked(config, step_report(1, loss=1.0)) == []
    text = EventAccumulator(str(config.run_dir / "tensorboard")).Reload().Tensors("configuration")
    (markdown,) = text[0].tensor_proto.string_val
    assert markdown.decode().startswith("größe 1\n")
    assert "      lr: 3.0e-05\n" in markdown.decode()
    records = list(wandb_records(config.run_dir))
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    sent = {item.key: json.loads(item.value_json) for item in run.config.update if not item.key.startswith("_")}
    assert (run.project, run.display_name, run.host) == ("dapo", "größe 1", "")
    assert sent == config.model_dump(mode="json")
    assert not any(record.WhichOneof("record_type") in ("stats", "output_raw", "environment") for record in records)
    ((run_name, stored),) = trackio_rows(config.run_dir, "SELECT run_name, config FROM configs")
    stored = {key: value for key, value in json.loads(stored).items() if not key.startswith("_")}
    assert (run_name, stored) == ("größe 1", config.model_dump(mode="json"))


@pytest.mark.parametrize("name", ALL)
def test_a_resumed_run_continues_and_no_step_appears_twice(tmp_path, name):
    config = configured(tmp_path, name)
    assert tracked(config, *(step_report(step, loss=step) for step in (1, 2, 3))) == []
    _next_second()
    again = [step_report(step, loss=step + 0.5) for step in (2, 3, 4)]
    assert tracked(config, *again, after=1) == []
    points = READERS[name](config.run_dir)["loss"]
    # Only TensorBoard replaces undone steps.
    undone = [2.5, 3.5] if name == "tensorboard" else [2.0, 3.0]
    assert points == [(1, 1.0), (2, undone[0]), (3, undone[1]), (4, 4.5)]
    if name == "wandb":
        assert len({record.run.run_id for record in wandb_records(config.run_dir) if record.HasField("run")}) == 1
    if name == "trackio":
        assert len(trackio_rows(config.run_dir, "SELECT DISTINCT run_id FROM metrics")) == 1


@pytest.mark.parametrize("name", ALL)
def test_a_run_that_restarts_in_the_same_folder_is_a_new_run(tmp_path, name):
    config = configured(tmp_path, name)
    assert tracked(config, *(step_report(step, loss=step) for step in (1, 2))) == []
    _next_second()
    assert tracked(config, step_report(1, loss=7)) == []
    if name == "tensorboard":
        assert read_tensorboard(config.run_dir)["loss"] == [(1, 7.0)]
    if name == "wandb":
        assert len({record.run.run_id for record in wandb_records(config.run_dir) if record.HasField("run")}) == 2
    if name == "trackio":
        rows = trackio_rows(config.run_dir, "SELECT run_id, count(*) FROM metrics GROUP BY run_id ORDER BY 2")
        assert [count for _, count in rows] == [1, 2]


def _next_second() -> None:
    """Wait for the next second: TensorBoard and wandb sort their files by the second in their names."""
    time.sleep(1.05 - time.time() % 1)


@pytest.mark.parametrize("name", ALL)
def test_a_tracker_that_cannot_write_is_reported_once(tmp_path, name):
    config = configured(tmp_path, name)
    (config.run_dir / name).write_text("in the way")
    faults: list[str] = []
    trackers = Trackers(config, 0, faults.append)
    give_up = time.monotonic() + 30
    step = 0
    while not faults and time.monotonic() < give_up:
        trackers.step(step_report(step := step + 1, loss=1.0))
        time.sleep(0.05)
    trackers.step(step_report(step + 1, loss=1.0))
    trackers.close()
    (fault,) = faults
    assert fault.startswith(f"{name}: FileExistsError: ")
    assert "\n" not in fault


@pytest.mark.skipif(util.find_spec("trackio") is None, reason="trackio is not installed")
def test_warnings_of_trackio_are_failures(tmp_path):
    config = configured(tmp_path, "trackio")
    (config.run_dir / "trackio").mkdir()
    (config.run_dir / "trackio" / "dapo.db").write_bytes(b"no database" * 500)
    faults = tracked(config, step_report(1, loss=1.0))
    assert len(faults) == 1
    assert "not a database" in faults[0]


@needs_all
def test_a_killed_tracker_is_reported_and_the_others_continue(tmp_path):
    config = configured(tmp_path, "tensorboard", "trackio")
    faults: list[str] = []
    trackers = Trackers(config, 0, faults.append)
    victim, survivor = trackers.members
    os.kill(victim.process.pid, signal.SIGKILL)
    victim.process.wait()
    for step in (1, 2):
        trackers.step(step_report(step, loss=float(step)))
    trackers.close()
    assert faults == ["tensorboard: ended with status -9"]
    assert survivor.process.returncode == 0
    assert read_trackio(config.run_dir) == {"loss": [(1, 1.0), (2, 2.0)]}


@needs_tensorboard
def test_a_hanging_tracker_does_not_delay_training_and_is_stopped_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.5)
    config = configured(tmp_path, "tensorboard")
    faults: list[str] = []
    trackers = Trackers(config, 0, faults.append)
    (member,) = trackers.members
    os.kill(member.process.pid, signal.SIGSTOP)
    report = StepReport(1, {f"metric {i}": float(i) for i in range(100)}, (), {})
    began = time.monotonic()
    for _ in range(300):
        trackers.step(report)
    assert len(member.outgoing) > 100_000  # far more than a pipe holds
    assert time.monotonic() - began < 2
    trackers.close()
    assert time.monotonic() - began < 4
    assert faults == ["tensorboard: had not finished 0.5 s after the end of the training, and was stopped"]
    assert member.process.returncode == -signal.SIGKILL


@needs_tensorboard
def test_a_tracker_that_was_slow_to_start_still_gets_everything(tmp_path):
    config = configured(tmp_path, "tensorboard")
    faults: list[str] = []
    trackers = Trackers(config, 0, faults.append)
    (member,) = trackers.members
    os.kill(member.process.pid, signal.SIGSTOP)
    for step in range(1, 301):
        trackers.step(StepReport(step, {f"metric {i}": float(i * step) for i in range(40)}, (), {}))
    assert member.outgoing
    os.kill(member.process.pid, signal.SIGCONT)
    trackers.close()
    trackers.close()
    assert faults == []
    assert read_tensorboard(config.run_dir)["metric 39"] == [(step, 39.0 * step) for step in range(1, 301)]


def test_a_tracker_that_is_not_installed_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    sentence = r"^run\.trackers: wandb needs the package wandb: pip install -e '.*\[trackers\]'$"
    with pytest.raises(ConfigError, match=sentence):
        require_trackers(["wandb"])
    with pytest.raises(ConfigError, match=sentence):
        Trainer(configured(tmp_path, "wandb"))
    require_trackers([])


def test_an_unknown_tracker_is_refused_when_the_configuration_is_read(tmp_path):
    with pytest.raises(ConfigError, match=r"'run\.trackers' is 'mlflow': input should be 'tensorboard', 'wandb' or"):
        configured(tmp_path, "mlflow")


@needs_all
def test_a_run_sends_its_trackers_what_it_stores_in_its_database(tmp_path, capfd):
    trackers = "run.trackers=[tensorboard, wandb, trackio]"
    config = runs.load(tmp_path, trackers, "run.steps=2", "run.save_every=1", "eval.k=2")
    Trainer(config).train()
    longer = runs.load(tmp_path, trackers, "run.steps=3", "run.save_every=1", "eval.k=2")
    _next_second()
    Trainer(longer, resume=True).train()
    expected: dict[str, Points] = {}
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        assert [event for event in database.events() if event["kind"] == "tracker"] == []
        for row in database.steps():
            for name in row.keys() - {"step", "time"}:
                expected.setdefault(name, []).append((row["step"], row[name]))
        for row in database.evals():
            for name, value in row["metrics"].items():
                expected.setdefault(f"eval/{row['name']}/{name}", []).append((row["step"], value))
    assert {step for step, _ in expected["loss"]} == {1, 2, 3}
    for read in READERS.values():
        assert_same(read(config.run_dir), expected)
    assert "rackio" not in capfd.readouterr().out


@needs_tensorboard
def test_a_run_whose_tracker_fails_trains_the_same_and_reports_it_once(tmp_path):
    plain = runs.load(tmp_path, "run.steps=2", "run.name=plain")
    Trainer(plain).train()
    config = runs.load(tmp_path, "run.steps=2", "run.name=tracked", "run.trackers=[tensorboard]")
    trainer = Trainer(config)
    (member,) = trainer.recorder.trackers.members
    os.killpg(member.process.pid, signal.SIGKILL)
    member.process.wait()
    assert trainer.train().steps == 2
    assert runs.metrics(config.run_dir) == runs.metrics(plain.run_dir)
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        events = [(event["step"], event["message"]) for event in database.events() if event["kind"] == "tracker"]
    assert events == [(1, "tensorboard: ended with status -9")]
