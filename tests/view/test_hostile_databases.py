"""Every reader of a damaged or hostile database answers or raises one sentence, and good runs stay listed.

`tests/view/hostile.py` has the cases.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("nicegui", reason="the page needs dapo[view]")

from nicegui import json as page_json
from nicegui import ui
from nicegui.testing import user_simulation

from dapo.checkpoint.card import model_card
from dapo.errors import CheckpointError, ConfigError
from dapo.store import connection
from dapo.store.database import RunDatabase
from dapo.store.encoding import to_json
from dapo.terminal.history import json_lines, print_history
from dapo.types import EvalReport, Event
from dapo.view import document, report, runs
from dapo.view.curves import (
    curves,
    curves_csv,
    differences,
    evaluations,
    metric_names,
    spread,
    tokens_over_steps,
    verdicts_over_steps,
)
from dapo.view.groups import GroupFilter, count_groups, data_sources, extremes, group, group_json, groups, verdicts
from dapo.view.health import event_kinds, newest_events, unjudged
from dapo.view.page.charts import Look
from dapo.view.page.health import _counters, _event
from dapo.view.page.panels import all_charts, load
from dapo.view.page.prompts import history_chart
from dapo.view.page.runs import _row
from dapo.view.page.server import register
from dapo.view.page.tokens import color_values, tokens_html
from dapo.view.prompts import history, prompts
from dapo.view.source import Run, configuration, progress
from dapo.view.tokens import decoder, tokens
from tests.view.hostile import MAY_FAIL, MUST_FAIL, SAVED, SHOWN, endless_view
from tests.view.made import create, make_group, make_report

ROOT = Path(__file__).parent.parent.parent
FORBIDDEN = re.compile("[\x00-\x1f\x7f]")  # in an error message
LIMIT_S = 0.1  # instead of 10, because many cases run into it


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one good run."""
    folder = tmp_path_factory.mktemp("runs")
    with create(folder, name="good") as database:
        for step in (1, 2, 3):
            made = [make_group(2 * step), make_group(2 * step + 1, accs=(True, None))]
            metrics = {"reward/mean": step / 8, "tokens/generated": 12.0, "tokens/trained": 7.0, "timing_s/train": 0.5}
            database.record_step(make_report(step, made, metrics, [Event("unjudged", "one was not judged", step)]))
        scores = {"avg@2": 0.5, "avg@2/low": 0.25, "avg@2/high": 0.75, "reward/mean": float("nan"), "unjudged": 1.0}
        database.record_eval(EvalReport(3, "set", scores, ()))
        (folder / "good" / "config.yaml").write_text(database.meta()["config"], encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "library_urls", dict)  # a megabyte that does not depend on the run
    monkeypatch.setattr(connection, "READ_SECONDS", LIMIT_S)
    monkeypatch.setattr(connection, "_BUSY_SECONDS", LIMIT_S)
    monkeypatch.setattr(runs, "_SUMMARY_SECONDS", LIMIT_S)


# Each reader gets the run's folder and does what a command or a view of the page does.

Reader = Callable[[Path], Any]


def of_run(query: Callable[[Run], Any]) -> Reader:
    """Query as the page does. The result, which the page would send to the browser, must be valid JSON."""

    def reader(folder: Path) -> None:
        page_json.dumps(_plain(query(runs.find_run(folder.parent, folder.name))))

    return reader


def of_database(query: Callable[[RunDatabase], Any]) -> Reader:
    def reader(folder: Path) -> None:
        with RunDatabase.open_readonly(folder / "run.db") as database:
            query(database)

    return reader


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value


def _history(folder: Path) -> None:
    output = io.StringIO()
    print_history(Console(file=output), folder)
    assert "\x1b" not in output.getvalue(), "control characters must be named, not printed"


def _listed(folder: Path) -> None:
    """List all runs: the good one must be there, whatever is wrong with the other."""
    found = {each.name: each for each in runs.summaries(folder.parent)}
    assert found["good"].problem is None
    assert (found["good"].step, found["good"].status) == (3, "crashed")
    page_json.dumps([_row(each) for each in found.values()])
    problem = found[folder.name].problem
    if problem is not None:
        raise CheckpointError(problem)


def _tokens(run: Run) -> None:
    read = decoder(run.path.parent.parent, lambda path: Path(path), run)
    for serial in (2, 3):
        found = tokens(run, serial, 0, read)
        if found is not None:
            for color_by in ("log-probability", "ratio", "entropy", "advantage"):
                tokens_html(found, *color_values(found, color_by))


READERS: dict[str, Reader] = {
    "list": _listed,
    "metrics --json": lambda folder: list(json_lines(folder)),
    "metrics": _history,
    "report": lambda folder: report.write_report(folder, folder.parent.parent / "report.html"),
    "model card": lambda folder: model_card(folder, folder / "checkpoints" / SAVED, adapters=False),
    "database": of_database(
        lambda database: (
            database.meta(), list(database.steps()), list(database.events()), list(database.evals()),
            list(database.groups()), [list(database.rollouts(serial)) for serial in range(2, 8)],
        )
    ),
    "progress": of_run(progress),
    "configuration": of_run(lambda run: to_json(configuration(run))),
    "charts": of_run(lambda run: all_charts([load(run)], Look(0.5, is_log=True))),
    "names": of_run(metric_names),
    "csv": of_run(lambda run: curves_csv(curves(run, metric_names(run)))),
    "spreads": of_run(lambda run: [spread(run, column) for column in ("reward", "score", "acc", "length")]),
    "parts": of_run(lambda run: [verdicts_over_steps(run), tokens_over_steps(run)]),
    "evaluations": of_run(evaluations),
    "differences": of_run(lambda run: differences([run, runs.find_run(run.path.parent.parent, "good")])),
    "groups": of_run(groups),
    "newest groups": of_run(lambda run: groups(run, GroupFilter(min_accuracy=0.1, data_source=""), newest_first=True)),
    "search": of_run(lambda run: groups(run, GroupFilter(text="response 1"))),
    "counts": of_run(lambda run: [count_groups(run), verdicts(run), data_sources(run)]),
    "extremes": of_run(lambda run: extremes(run, 2)),
    "group": of_run(lambda run: [group_json(group(run, serial)) for serial in range(2, 8)]),
    "tokens": of_run(_tokens),
    "prompts": of_run(lambda run: [prompts(run, order) for order in ("hardest", "solved", "flickering")]),
    "history": of_run(lambda run: history_chart(history(run, "p2"))),
    "events": of_run(lambda run: [event_kinds(run), [_event(each) for each in newest_events(run)]]),
    "health": of_run(lambda run: [unjudged(run), _counters(run)]),
}  # fmt: skip


def read_all(folder: Path) -> list[str]:
    """Run every reader, and return the sentences of those that refused the run."""
    found = []
    for name, reader in READERS.items():
        try:
            reader(folder)
        except (CheckpointError, ConfigError) as error:
            sentence = str(error)
            assert not FORBIDDEN.search(sentence), (name, sentence)
            assert len(sentence) < 600 + len(str(folder)), (name, sentence)
            found.append(sentence)
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    return found


@pytest.fixture
def bad(root: Path) -> Iterator[Path]:
    folder = shutil.copytree(root / "good", root / "bad")
    yield folder
    shutil.rmtree(folder)


def test_every_reader_accepts_the_good_run(root: Path, bad: Path):
    assert read_all(bad) == []
    assert sorted(os.listdir(bad)) == ["config.yaml", "run.db"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", MUST_FAIL)
def test_a_file_that_is_not_a_run_s_database_is_refused_in_one_sentence(bad: Path, case: str):
    MUST_FAIL[case](bad)
    assert len(read_all(bad)) > 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", MAY_FAIL)
def test_wrong_values_and_damage_are_read_or_refused_in_one_sentence(bad: Path, case: str):
    MAY_FAIL[case](bad)
    read_all(bad)


def test_every_view_of_a_bad_run_says_what_is_wrong_while_the_good_run_is_shown(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Drive the real page with NiceGUI's simulated user."""
    shutil.copytree(root / "good", tmp_path / "good")
    names = {f"bad {index}": case for index, case in enumerate(SHOWN)}
    for name, case in names.items():
        SHOWN[case](shutil.copytree(root / "good", tmp_path / name))
    os.mkdir(os.fsencode(tmp_path) + b"/no \xff UTF-8")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/no \xff UTF-8/run.db")).touch()
    lists: list[list[dict[str, Any]]] = []
    monkeypatch.setattr("dapo.view.page.runs.fill", lambda table, rows: lists.append(rows))

    async def visit() -> None:
        async with user_simulation() as user:
            register(tmp_path, lambda path: None)
            await user.open("/")
            for _ in range(200):
                if lists:
                    break
                await asyncio.sleep(0.05)
            for view in ("curves", "groups/2", "prompts", "health"):
                await user.open(f"/run/good/{view}")
                await user.should_see("step 3", retries=100)
                await user.should_not_see("cannot be read")
                for name, case in names.items():
                    if view == "curves" or not case.startswith("configuration"):  # the other views do not read it
                        await user.open(f"/run/{name}/{view}")
                        await user.should_see(kind=ui.label, content="run.db", retries=100)

    asyncio.run(visit())
    rows = {row["name"]: row for row in lists[0]}
    assert rows.keys() == {"good", "no \\udcff UTF-8", *names}
    assert (rows["good"]["status"], rows["good"]["step"]) == ("crashed", 3)
    for name in rows.keys() - {"good"}:
        assert rows[name]["status"] == "unreadable"
        assert len(rows[name]["model"]) > 20
    page_json.dumps(lists[0])


def test_the_commands_give_one_sentence_and_exit_code_2(bad: Path, tmp_path: Path):
    endless_view("steps", ["step", "time"])(bad)
    for command in (["metrics"], ["metrics", "--json"], ["report", "--out", str(tmp_path / "report.html")]):
        found = subprocess.run(
            [sys.executable, "-m", "dapo", *command, str(bad)], capture_output=True, text=True, timeout=60, cwd=ROOT
        )
        assert (found.returncode, found.stdout) == (2, ""), command
        assert (
            found.stderr
            == f"error: {bad}/run.db: its table steps is not as dapo makes it, so this is not a run's database\n"
        )
    assert list(tmp_path.iterdir()) == []
