"""A sample of `make test-faults`, and tests of its foundations: the log of calls and the model of a disk."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.faults.disk import Disk, Survives, kills, without_shared_memory
from tests.faults.interpose import Call, Mode, has_compiler
from tests.faults.trials import Campaign

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs a C compiler (apt install gcc)")
ROOT = Path("/runs")


@pytest.fixture(scope="module")
def campaign(tmp_path_factory) -> Iterator[Campaign]:
    with closing(Campaign(tmp_path_factory.mktemp("faults"), ["strict", "evaluation", "saved at the end"])) as made:
        yield made


@needs_compiler
def test_runs_broken_at_a_sample_of_all_points_resume_to_the_same_weights_and_metrics(campaign):
    tally = campaign.run(every=61)
    assert not tally.failures, tally.summary()
    assert sum(tally.tried.values()) > 30
    assert len(tally.tried) >= 6, "the sample must contain all kinds of faults"


@needs_compiler
def test_a_killed_process_leaves_the_files_that_the_log_predicts(campaign):
    kind = "saved at the end"
    known = list(kills(campaign.calls[kind], campaign.root(kind, "whole")))
    for number, expected in known[5::30]:
        root = campaign.root(kind, f"k{number:04}")  # as long as "whole": files contain their paths
        root.mkdir(parents=True)
        ended = campaign.servers[0].run(campaign.job(kind, root, Mode.KILL, number))
        assert ended.code == -signal.SIGKILL
        there = {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in root.rglob("*")}
        # Random names and times differ, but not the set of files and their sizes.
        assert sizes(there) == sizes(expected), number


def sizes(content: dict[str, bytes | None]) -> list[tuple[str, int]]:
    """Return names with sizes, in units of 64 bytes: the digits of a time must not show."""
    return sorted((name, len(data or b"") // 64) for name, data in without_shared_memory(content).items())


@needs_compiler
def test_a_different_outcome_is_noticed(campaign, monkeypatch):
    """Compare with the outcome of another run: the trial must fail."""
    point = next(point for point in campaign.points() if point.fault == "EIO" and point.at == (100,))
    server = campaign.servers[0]
    campaign.attempt(server, point, "as-it-is")
    other = campaign.whole["evaluation"]
    monkeypatch.setitem(campaign.whole, "strict", other)
    with pytest.raises(Exception, match="differ"):
        campaign.attempt(server, point, "compared-with-another")


def call(what: str, path: str, to: str = "", inode: int = 0, offset: int = 0, data: bytes = b"") -> Call:
    return Call(what, ROOT / path, ROOT / to, inode, offset, data)


def test_a_power_cut_loses_what_was_not_synced():
    disk = Disk(ROOT)
    for each in [
        call("create", "a.tmp", inode=1),
        call("write", "a.tmp", inode=1, data=b"hello"),
        call("rename", "a.tmp", "a"),
    ]:
        disk.apply(each)
    assert disk.content() == {"a": b"hello"}
    assert disk.content(Survives.NOTHING) == {}
    assert disk.content(Survives.NAMES) == {"a": b""}, "a file renamed before it was synced can be empty"
    disk.apply(call("sync", "", inode=99))
    assert disk.content(Survives.NOTHING) == {"a": b""}
    assert disk.content(Survives.BYTES) == {"a": b"hello"}
    disk.apply(call("sync", "a", inode=1))
    disk.apply(call("write", "a", inode=1, offset=7, data=b"!"))
    disk.apply(call("unlink", "a"))
    assert disk.content() == {}
    assert disk.content(Survives.NOTHING) == {"a": b"hello"}
    assert disk.content(Survives.BYTES) == {"a": b"hello\0\0!"}


def test_syncing_a_folder_does_not_sync_the_names_in_its_subfolders():
    disk = Disk(ROOT)
    for each in [
        call("mkdir", "run"),
        call("create", "run/x", inode=1),
        call("write", "run/x", inode=1, data=b"x"),
        call("sync", "run/x", inode=1),
        call("sync", "", inode=99),
    ]:
        disk.apply(each)
    assert disk.content(Survives.NOTHING) == {"run": None}, "the folder's name was synced, the names in it were not"
    disk.apply(call("sync", "run", inode=98))
    assert disk.content(Survives.NOTHING) == {"run": None, "run/x": b"x"}
    disk.apply(call("truncate", "run/x", inode=1, offset=0))
    assert disk.content() == {"run": None, "run/x": b""}
