import io

from rich.console import Console

from dapo.config import Config
from dapo.terminal.console import ConsoleReporter
from dapo.types import StepReport


def test_the_line_of_a_step_ends_with_the_components_of_the_score():
    out = io.StringIO()
    metrics = {"groups/kept": 2, "groups/carried": 0, "groups/stale": 0, "score/mean": 1.5}
    components = {"score/math/mean": 0.25, "score/[b]/mean": 1.0, "metric/x": 3.0}
    reporter = ConsoleReporter(Console(file=out, width=200))
    reporter.step(StepReport(1, metrics | components, (), {}))
    assert out.getvalue().rstrip().endswith("2 kept, math 0.25, [b] 1")


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
