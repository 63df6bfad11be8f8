import io

from rich.console import Console

from dapo.terminal.console import ConsoleReporter
from dapo.types import StepReport


def test_the_line_of_a_step_ends_with_the_components_of_the_score():
    out = io.StringIO()
    metrics = {"groups/kept": 2, "groups/carried": 0, "groups/stale": 0, "score/mean": 1.5}
    components = {"score/math/mean": 0.25, "score/[b]/mean": 1.0, "metric/x": 3.0}
    reporter = ConsoleReporter(Console(file=out, width=200))
    reporter.step(StepReport(1, metrics | components, (), {}))
    assert out.getvalue().rstrip().endswith("2 kept, math 0.25, [b] 1")
