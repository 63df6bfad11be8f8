"""Reading a run while it trains: new steps are visible, readers and writer never block, a replaced run is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dapo.errors import CheckpointError
from dapo.store.database import RunDatabase
from dapo.view.curves import curves
from dapo.view.groups import count_groups, group, groups
from dapo.view.prompts import prompts
from dapo.view.runs import find_run, summary
from dapo.view.source import progress
from tests.view.made import create, make_group, make_report

ROOT = Path(__file__).parent.parent.parent
WRITER = """
import sys
from dapo.store.database import RunDatabase
from tests.view.made import make_group, make_report
with RunDatabase.open(sys.argv[1]) as database:
    for step in range(2, 2 + int(sys.argv[2])):
        database.record_step(make_report(step, [make_group(2 * step), make_group(2 * step + 1)]))
        if step < 5:
            print(step, flush=True)
            sys.stdin.readline()
"""


def writer(path: Path, steps: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(steps)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_only_whole_steps_are_visible_while_another_process_writes(tmp_path: Path):
    with create(tmp_path) as database:
        database.record_step(make_report(1, [make_group(2), make_group(3)]))
    run = find_run(tmp_path, "made")
    process = writer(run.path, 60)
    for step in (2, 3, 4):
        assert process.stdout.readline() == f"{step}\n"
        assert (progress(run).step, progress(run).groups) == (step, 2 * step)
        process.stdin.write("continue\n")
        process.stdin.flush()
    seen = [progress(run)]
    while process.poll() is None:
        seen.append(progress(run))
        page, step = groups(run, limit=1_000), progress(run).step
        assert len(page.rows) % 2 == 0, "a step must be visible as a whole or not at all"
        assert len(page.rows) <= 2 * step
        assert len(curves(run, ["reward/mean"])[0].steps) >= seen[-1].step
        assert prompts(run, "hardest").total >= seen[-1].groups
    assert process.returncode == 0
    seen.append(progress(run))
    assert [each.step for each in seen] == sorted(each.step for each in seen)
    assert all(each.groups == 2 * each.step for each in seen)
    assert progress(run).step == 61 == summary(tmp_path, "made").step


def test_an_open_snapshot_neither_changes_nor_blocks_the_writer(tmp_path: Path):
    with create(tmp_path) as database:
        database.record_step(make_report(1, [make_group(2), make_group(3)]))
    run = find_run(tmp_path, "made")
    count = "SELECT count(*) FROM groups"
    process = writer(run.path, 5)
    assert process.stdout.readline() == "2\n"
    with run.snapshot() as old:
        assert old.execute(count).fetchone()[0] == 4
        process.communicate("continue\n" * 5, timeout=50)
        assert old.execute(count).fetchone()[0] == 4
        assert count_groups(run) == 12
    assert count_groups(run) == 12


def test_a_reader_without_locks_notices_that_a_writer_changed_the_file(tmp_path: Path):
    """A finished run is read without locks. If it is resumed meanwhile, the reader must not see a mix of states."""
    with create(tmp_path) as database:
        database.record_step(make_report(1, [make_group(2), make_group(3)]))
    run = find_run(tmp_path, "made")

    def read_while_another_process_writes() -> None:
        with run.snapshot() as old:
            assert old.execute("SELECT count(*) FROM groups").fetchone()[0] == 2
            writer(run.path, 5).communicate("continue\n" * 5, timeout=50)

    with pytest.raises(CheckpointError, match="changed while it was being read; try again"):
        read_while_another_process_writes()
    assert progress(run).step == 6


def test_a_reader_that_was_opened_before_the_writer_sees_what_it_writes(tmp_path: Path):
    with create(tmp_path) as database:
        database.record_step(make_report(1))
    path = find_run(tmp_path, "made").path
    with RunDatabase.open_readonly(path) as reader:
        assert len(list(reader.steps())) == 1
        with RunDatabase.open(path) as database:
            database.record_step(make_report(2))
            assert len(list(reader.steps())) == 2, "the new step is only in the WAL"
        assert len(list(reader.steps())) == 2


def test_nothing_can_be_written_through_a_snapshot(tmp_path: Path):
    create(tmp_path).close()
    with pytest.raises(CheckpointError, match="readonly"), find_run(tmp_path, "made").snapshot() as database:
        database.execute("DELETE FROM meta")


def test_a_new_run_that_replaces_the_old_file_is_noticed_and_not_damaged(tmp_path: Path):
    with create(tmp_path) as first:
        first.record_step(make_report(1, [make_group(serial) for serial in range(5)]))
        run = find_run(tmp_path, "made")
        with run.snapshot() as old:
            old.execute("SELECT count(*) FROM groups").fetchone()
            for leftover in run.path.parent.glob("run.db*"):
                leftover.unlink()
            with pytest.raises(CheckpointError, match="there is no run database here"):
                count_groups(run)
            run.path.touch()
            assert "is empty" in summary(tmp_path, "made").problem
            second = RunDatabase.create(run.path, (_config(tmp_path)), {})
            second.record_step(make_report(1, [make_group(7)]))
            assert old.execute("SELECT count(*) FROM groups").fetchone()[0] == 5
            assert count_groups(run) == 1
    # The old reader and the old writer are closed. Rows that the new run has only in its WAL must survive that.
    assert os.path.getsize(f"{run.path}-wal") > 0
    second.record_step(make_report(2, [make_group(8)]))
    assert [row.serial for row in groups(run).rows] == [7, 8]
    second.close()
    with run.snapshot() as database:
        assert database.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def test_a_rewound_run_shows_what_is_left(tmp_path: Path):
    with create(tmp_path) as database:
        for step in (1, 2, 3):
            database.record_step(make_report(step, [make_group(step)]))
        run = find_run(tmp_path, "made")
        before = progress(run)
        database.rewind(1)
        assert (before.step, progress(run).step, count_groups(run)) == (3, 1, 1)
        with pytest.raises(CheckpointError, match="there is no group 3"):
            group(run, 3)


def test_threads_may_query_at_the_same_time(tmp_path: Path):
    with create(tmp_path) as database:
        database.record_step(make_report(1, [make_group(serial) for serial in range(100)]))
    run = find_run(tmp_path, "made")
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(len(groups(run, limit=80).rows))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [80] * 8


def test_a_run_in_a_read_only_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with create(tmp_path) as database:
        database.record_step(make_report(1, [make_group(1)]))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert count_groups(find_run(tmp_path, "made")) == 1
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["run.db"]


def _config(folder: Path) -> str:
    with create(folder, name="other") as database:
        return database.meta()["config"]
