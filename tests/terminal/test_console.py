import io

import numpy as np
import pytest
from rich.console import Console

from dapo.config import Config
from dapo.evaluation.evaluate import differences
from dapo.terminal.console import ConsoleReporter, before_after_table
from dapo.types import EvalReport, EvalSample, Prompt, Rollout, Score, StepReport


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
