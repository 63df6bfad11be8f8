"""Verdicts and event kinds are strings in files, and every place takes an event's severity from its kind."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dapo.terminal.console import ConsoleReporter
from dapo.types import Event, EventKind, Verdict, event_severity


def test_a_rollback_of_the_learners_is_a_warning_and_a_stop_is_an_error():
    assert event_severity("learners") == EventKind.LEARNERS.severity == "warning"
    assert event_severity("stopped") == "error"
    assert event_severity("finished") == "info"


def test_a_kind_that_this_version_does_not_know_is_shown_as_information():
    assert event_severity("a kind of an older version") == "info"


@pytest.mark.parametrize(("kind", "code"), [("learners", "33"), ("stopped", "31"), ("plan", "2"), ("unknown", "2")])
def test_the_terminal_colors_an_event_by_its_severity(kind, code):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=80)
    ConsoleReporter(console).event(Event(kind, "message", 1))
    assert f"\x1b[{code}m{kind}: message\x1b[0m" in out.getvalue()


def test_verdicts_and_kinds_format_as_the_strings_that_files_hold():
    assert f"{Verdict.NOTHING_TO_TRAIN} {EventKind.REWARD_WORKER}" == "nothing_to_train reward worker"
    assert EventKind("reward worker") is EventKind.REWARD_WORKER
