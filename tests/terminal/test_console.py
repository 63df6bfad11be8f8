import io
import threading
from contextlib import suppress

import numpy as np
import pytest
from rich.console import Console

from dapo.config import Config
from dapo.evaluation.evaluate import differences
from dapo.terminal import console as console_module
from dapo.terminal.console import ConsoleReporter, before_after_table
from dapo.types import EvalReport, EvalSample, Event, EventKind, Prompt, Rollout, Score, StepReport


def test_the_line_of_a_step_ends_with_the_components_of_the_score():
    out = io.StringIO()
    metrics = {"groups/kept": 2, "groups/carried": 0, "groups/stale": 0, "score/mean": 1.5}
    components = {"score/math/mean": 0.25, "score/[b]/mean": 1.0, "metric/x": 3.0}
    reporter = ConsoleReporter(Console(file=out, width=200))
    reporter.step(StepReport(1, metrics | components, (), {}))
    assert out.getvalue().rstrip().endswith("2 kept, math 0.25, [b] 1")


@pytest.mark.parametrize("score", [1e30, -1e30, 12345678.0, -1234.5678, 1e300])
def test_large_scores_stay_in_their_columns(score):
    out = io.StringIO()
    names = ("score/mean", "reward/mean", "response_length/mean")
    metrics = {"groups/kept": 2, "groups/carried": 0, "groups/stale": 0} | dict.fromkeys(names, score)
    ConsoleReporter(Console(file=out, width=200)).step(StepReport(1, metrics, (), {}))
    step, *cells = out.getvalue().split()[:4]
    assert step == "1"
    assert [float(cell) for cell in cells] == pytest.approx([score] * 3, rel=0.2)


def test_the_time_of_the_progress_bar_begins_with_training_and_not_in_an_earlier_cell():
    config = Config.parse({"model": {"path": "none"}, "data": {"train": "none"}, "run": {"steps": 5}})
    reporter = ConsoleReporter(Console(file=io.StringIO()))
    for first_step in (0, 3):
        (task,) = reporter.progress.tasks
        assert task.start_time is not None
        task.start_time -= 3600  # an hour between two cells
        with reporter.training(config, first_step):
            assert task.elapsed is not None and task.elapsed < 600
            assert (task.completed, task.total) == (first_step, 5)


def test_a_training_that_follows_an_interrupted_one_shows_no_phase_of_it():
    config = Config.parse({"model": {"path": "none"}, "data": {"train": "none"}, "run": {"steps": 5}})
    reporter = ConsoleReporter(Console(file=io.StringIO()))
    (bar,) = reporter.progress.tasks
    with suppress(KeyboardInterrupt), reporter.training(config, 0):
        reporter.verdicts["kept"] = 3
        reporter.phase("saving")
        raise KeyboardInterrupt
    shown, start = [], reporter.progress.start
    reporter.progress.start = lambda: (shown.append(bar.fields["now"]), start())
    with reporter.training(config, 1):
        assert shown == ["sampling"]
        reporter.responses(4, 16)
        assert bar.fields["now"] == "sampling, 4 of 16 responses"


def in_a_file(out: io.StringIO, *, steps: bool = True) -> tuple[ConsoleReporter, list[float]]:
    """Return a reporter of a run of eight steps, of which two are done, and its clock."""
    clock = [1000.0]
    reporter = ConsoleReporter(Console(file=out, width=200), clock=lambda: clock[0])
    run = {"steps": 8} if steps else {"steps": None, "epochs": 1.5}
    reporter.epochs = run.get("epochs")
    reporter.reset_bar(Config.parse({"model": {"path": "none"}, "data": {"train": "none"}, "run": run}), 2)
    return reporter, clock


def test_a_file_gets_a_line_after_each_minute_without_one():
    out = io.StringIO()
    reporter, clock = in_a_file(out)
    reporter.responses(412, 640)
    for seconds in (0, 59, 1, 30, 29):
        clock[0] += seconds
        reporter.show_life()
    assert out.getvalue() == "2 of 8 steps done: sampling, 412 of 640 responses\n"
    clock[0] += 1
    reporter.phase("training")
    reporter.show_life()
    assert out.getvalue().splitlines()[1:] == ["2 of 8 steps done: training"]


def test_a_line_of_the_run_delays_the_next_sign_of_life_by_a_minute():
    out = io.StringIO()
    reporter, clock = in_a_file(out, steps=False)
    clock[0] += 50
    reporter.event(Event(EventKind.DATA, "rows", 1))
    clock[0] += 50
    reporter.show_life()
    assert out.getvalue() == "data: rows\n"
    clock[0] += 10
    reporter.phase("evaluating [b], 1 of 2 responses")
    reporter.show_life()
    assert out.getvalue().splitlines()[1:] == ["0 of 1.5 epochs done: evaluating [b], 1 of 2 responses"]


def test_a_terminal_and_quiet_runs_get_no_signs_of_life():
    for console, verbosity in ((Console(file=io.StringIO(), force_terminal=True), "normal"), (None, "quiet")):
        console = console or Console(file=io.StringIO())
        clock = [0.0]
        reporter = ConsoleReporter(console, verbosity, clock=lambda clock=clock: clock[0])
        clock[0] = 1000.0
        reporter.show_life()
        assert console.file.getvalue() == ""


def test_signs_of_life_come_while_the_main_thread_is_busy(monkeypatch):
    class Lines(io.StringIO):
        def write(self, text: str) -> int:
            if "done: training" in text:
                has_come.set()
            return super().write(text)

    has_come = threading.Event()
    monkeypatch.setattr(console_module, "SILENCE", 0.01)
    config = Config.parse({"model": {"path": "none"}, "data": {"train": "none"}, "run": {"steps": 5}})
    reporter = ConsoleReporter(Console(file=Lines(), width=200))
    with reporter.training(config, 0):
        reporter.phase("training")
        assert has_come.wait(30)
    assert "dapo-progress" not in {thread.name for thread in threading.enumerate()}


def test_the_bar_of_a_notebook_shows_a_phase_soon_after_it_has_begun(monkeypatch):
    display = pytest.importorskip("IPython.display", reason="IPython is not installed")
    has_come = threading.Event()

    class Handle:
        def update(self, output: dict[str, str], raw: bool) -> None:
            if "waiting for rewards" in output["text/plain"]:
                has_come.set()

    monkeypatch.setattr(display, "display", lambda *args, **options: Handle())
    config = Config.parse({"model": {"path": "none"}, "data": {"train": "none"}, "run": {"steps": 5}})
    reporter = ConsoleReporter(Console(force_jupyter=True))
    monkeypatch.setattr(reporter, "_print", lambda *args: None)
    with reporter.training(config, 0):
        reporter.responses(16, 16)
        reporter.phase("waiting for rewards")  # too soon after the phase before to be shown at once
        assert has_come.wait(30)


def test_the_table_says_if_differences_leave_out_questions_that_were_not_judged_both_times():
    def shown(*judged: bool) -> str:
        scores = [Score(1.0) if each else Score(None, error="no gold") for each in judged]
        tokens = np.zeros(1, np.int32)
        samples = tuple(
            EvalSample(Prompt(str(i), (), (), None), Rollout(0, 0, tokens, tokens, "stop", 0, "5"), score)
            for i, score in enumerate(scores)
        )
        reports = [EvalReport(step, "test", {"reward/mean": 1.0}, samples) for step in (0, 1)]
        console = Console(file=io.StringIO(), width=120)
        console.print(before_after_table(*reports, differences(*reports)))
        return " ".join(console.file.getvalue().split())

    assert "over the 2 that were judged both times" in shown(True, False, True)
    assert "judged both times" not in shown(True, True, True)
