"""Tests of the files beside run.db (-wal, -shm), with real processes: writers that close or are killed, and readers."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from dapo.store.database import RunDatabase
from dapo.view.runs import find_run, summary
from dapo.view.source import progress
from tests.view.made import create, make_group, make_report

ROOT = Path(__file__).parent.parent.parent
STEPS = 40
WRITER = """
import sys
from dapo.store.database import RunDatabase
from tests.view.made import make_group, make_report
with RunDatabase.open(sys.argv[1]) as database:
    for step in range(2, 2 + int(sys.argv[2])):
        database.record_step(make_report(step, [make_group(10 * step + place) for place in range(10)]))
    print("written", flush=True)
    sys.stdin.readline()
"""
READER = """
import sys
from pathlib import Path
from dapo.store.database import RunDatabase
from dapo.terminal.history import json_lines
from dapo.view.runs import find_run, summary
path, seen = Path(sys.argv[1]), 0
print("reading", flush=True)
while seen < int(sys.argv[2]):
    with RunDatabase.open_readonly(path) as database:
        steps = [step["step"] for step in database.steps()]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= seen
    assert len(list(json_lines(path.parent))) >= len(steps)
    assert summary(path.parent.parent, path.parent.name).step >= len(steps)
    seen = len(steps)
"""
HOLDER = """
import sys
from pathlib import Path
from dapo.view.source import Run
with Run("made", Path(sys.argv[1])).snapshot() as database:
    database.execute("SELECT max(step) FROM steps").fetchone()
    print("holding", flush=True)
    sys.stdin.readline()
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a process, and wait for its first line of output."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline(), process.wait()
    return process


def finish(process: subprocess.Popen[str]) -> None:
    process.communicate("finish\n", timeout=50)
    assert process.returncode == 0


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with create(tmp_path) as database:
        database.record_step(make_report(1, [make_group(1)]))
    return tmp_path / "made" / "run.db"


def read(path: Path) -> int:
    """Read the run as the commands and the page do, and return its last step."""
    with RunDatabase.open_readonly(path) as database:
        steps = [step["step"] for step in database.steps()]
    found = summary(path.parent.parent, "made")
    assert progress(find_run(path.parent.parent, "made")).step == steps[-1] == found.step
    return steps[-1]


def test_readers_change_nothing_beside_a_finished_run(path: Path, tmp_path: Path):
    before = files(path.parent)
    assert before.keys() == {"run.db"}
    assert read(path) == 1
    commands = (["metrics"], ["metrics", "--json"], ["report", "--out", str(tmp_path / "report.html")])
    for command in commands:
        subprocess.run([sys.executable, "-m", "dapo", *command, str(path.parent)], cwd=ROOT, check=True, timeout=60)
        assert files(path.parent) == before


def test_readers_do_not_disturb_a_live_writer_and_only_the_database_remains(path: Path):
    readers = [start(READER, path, STEPS + 1) for _ in range(2)]
    writer = start(WRITER, path, STEPS)
    assert read(path) == STEPS + 1
    assert os.path.getsize(f"{path}-wal") > 0
    for reader in readers:
        finish(reader)
    finish(writer)
    assert files(path.parent).keys() == {"run.db"}
    assert read(path) == STEPS + 1
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()


def test_a_writer_that_closes_while_a_reader_is_open_leaves_only_the_database(path: Path):
    writer = start(WRITER, path, 3)
    reader = start(HOLDER, path)
    writer.stdin.write("close\n")
    writer.stdin.flush()
    with pytest.raises(subprocess.TimeoutExpired):
        writer.wait(0.2)  # it waits for the reader
    finish(reader)
    finish(writer)
    assert files(path.parent).keys() == {"run.db"}
    assert read(path) == 4


def test_a_reader_that_stays_open_does_not_block_a_closing_writer(path: Path):
    writer, reader = start(WRITER, path, 3), start(HOLDER, path)
    finish(writer)
    finish(reader)
    assert read(path) == 4, "the content of the WAL is read"


def test_everything_a_killed_writer_recorded_is_read_and_its_files_stay(path: Path):
    writer = start(WRITER, path, 3)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    before = files(path.parent)
    assert before.keys() == {"run.db", "run.db-wal", "run.db-shm"}
    assert read(path) == 4
    after = files(path.parent)
    assert (after.keys(), after["run.db"], after["run.db-wal"]) == (
        before.keys(),
        before["run.db"],
        before["run.db-wal"],
    )
    RunDatabase.open(path).close()
    assert files(path.parent).keys() == {"run.db"}
    assert read(path) == 4


def test_a_copy_of_a_killed_run_without_its_shm_file_is_read_and_gets_no_new_file(path: Path, tmp_path: Path):
    writer = start(WRITER, path, 3)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    copy = tmp_path / "copies" / "made"
    copy.mkdir(parents=True)
    for end in ("", "-wal"):
        shutil.copy(f"{path}{end}", copy)
    assert read(copy / "run.db") == 4
    assert files(copy).keys() == {"run.db"}
    assert read(copy / "run.db") == 4
