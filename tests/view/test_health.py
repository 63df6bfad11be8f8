"""Queries of events, and of the reasons why responses were not judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dapo.store.database import RunDatabase
from dapo.types import Event, Score
from dapo.view.groups import GroupFilter, groups
from dapo.view.health import event_kinds, newest_events, unjudged
from dapo.view.runs import find_run
from dapo.view.source import Run
from tests.view.made import create, make_group, make_report


def test_the_events_of_a_real_run_come_back(trained: Run):
    with RunDatabase.open_readonly(trained.path) as database:
        expected = list(database.events())
    found = newest_events(trained)[::-1]
    assert [{"step": e.step, "time": e.time, "kind": e.kind, "message": e.message} for e in found] == expected
    assert found[-1].kind == "finished"


def test_the_newest_events_of_a_kind_come_first_and_kinds_are_counted(tmp_path: Path):
    with create(tmp_path) as database:
        for step in range(1, 12):
            kind = "even" if step % 2 == 0 else "odd"
            database.record_step(make_report(step, events=[Event(kind, str(step), step)] * 2))
    run = find_run(tmp_path, "made")
    for kinds, count in (((), 22), (("odd",), 12), (("even", "odd"), 22), (("none",), 0)):
        found = newest_events(run, kinds)
        assert [event.id for event in found] == sorted({event.id for event in found}, reverse=True)
        assert len(found) == count
        assert newest_events(run, kinds, limit=5) == found[:5]
    assert event_kinds(run) == {"even": 10, "odd": 12}


def test_reasons_are_counted_with_their_first_and_last_step(tmp_path: Path):
    def failing(serial: int, *reasons: str | None):
        scores = tuple(Score(1.0, True) if reason is None else Score(None, None, reason) for reason in reasons)
        return replace(make_group(serial, (True,) * len(reasons)), scores=scores)

    with create(tmp_path) as database:
        database.record_step(make_report(1, [failing(1, None, "slow"), failing(2, "odd", "slow")]))
        database.record_step(make_report(2, [failing(3, None, None), failing(4, "slow", None)]))
    run = find_run(tmp_path, "made")
    slow, odd = unjudged(run)
    assert (slow.reason, slow.responses, slow.first_step, slow.last_step) == ("slow", 3, 1, 2)
    assert (odd.reason, odd.responses, odd.first_step, odd.last_step) == ("odd", 1, 1, 1)
    assert [row.serial for row in groups(run, GroupFilter(error="slow")).rows] == [1, 2, 4]


def test_a_run_in_which_everything_was_judged_has_no_reasons(trained: Run):
    assert unjudged(trained) == []
