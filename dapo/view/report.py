"""Write a run as one self-contained HTML file: it needs no server, no network and no other file."""

from __future__ import annotations

from pathlib import Path

from dapo.errors import CheckpointError
from dapo.store.configuration import DATABASE_FILE
from dapo.view.curves import EvalCurve, evaluations
from dapo.view.document import TIME, short_text, write_document
from dapo.view.groups import extremes, group
from dapo.view.health import newest_events, unjudged
from dapo.view.page.charts import Look
from dapo.view.page.panels import all_charts, load
from dapo.view.page.text import format_number, format_time
from dapo.view.runs import find_run, summary
from dapo.view.source import Run, configuration

GROUPS = 3  # best and worst groups shown, each
_RESPONSES = 16  # per group
_EVENTS = 200


def write_report(folder: Path, out: Path) -> None:
    """Write the report of the run in `folder` to the file `out`."""
    folder = Path(folder).resolve()
    if not (folder / DATABASE_FILE).exists():
        raise CheckpointError(f"{folder}: there is no run database here; pass the folder of one run, such as runs/my")
    run = find_run(folder, folder.name)
    best, worst = ([group(run, serial) for serial in serials] for serials in extremes(run, GROUPS))
    write_document(
        out,
        Path(__file__).parent / "report.html",
        name=folder.name,
        kind="a run of dapo",
        facts=_facts(folder),
        events=_events(run),
        unjudged=[(f"{each.responses:,}", f"{each.first_step:,} to {each.last_step:,}", each.reason)
                  for each in unjudged(run)],
        evaluations=[(short_text(each.dataset, 60), short_text(each.metric, 60), *_value(each, 0), *_value(each, -1))
                     for each in evaluations(run)],
        best=best,
        worst=worst,
        max_responses=_RESPONSES,
        configuration=configuration(run),
        charts=list(all_charts([load(run)], Look()).values()),
    )  # fmt: skip


def _facts(folder: Path) -> dict[str, str]:
    found = summary(folder, folder.name)
    if found.problem is not None:
        raise CheckpointError(found.problem)
    return {
        "status": found.status or "–",
        "model": found.model,
        "recipe": found.recipe,
        "step": f"{found.step:,}" + (f" of {found.planned:,}" if found.planned else ""),
        "last reward": format_number(found.reward),
        "started": format_time(found.started, TIME),
        "last change": format_time(found.changed, TIME),
    }


def _events(run: Run) -> list[tuple[str, str, str, str]]:
    found = reversed(newest_events(run, limit=_EVENTS))
    return [(f"{each.step:,}", each.severity, short_text(each.kind, 60), each.message) for each in found]


def _value(curve: EvalCurve, index: int) -> tuple[str, str]:
    """Return a step of an evaluation, and the metric's value then with its interval."""
    low, high = float(curve.low[index]), float(curve.high[index])
    interval = f" [{low:.3f}, {high:.3f}]" if low == low and high == high else ""
    return f"{curve.steps[index]:,}", f"{curve.values[index]:.3f}{interval}"
