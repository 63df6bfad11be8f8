"""Pass rates of prompts over a run, and their ranking as hardest, solved or flickering."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from dapo.store.database import RunDatabase
from dapo.view.prompts import history, prompts
from dapo.view.runs import find_run
from dapo.view.source import Run
from tests.view.made import create, make_group, make_report

RATES = {  # correct responses out of four, group by group
    "hard": [0, 0, 0],
    "harder to see": [0, 0],
    "solved": [1, 4, 4],
    "solved for longer": [4, 4, 4],
    "lost": [4, 4, 1],
    "flickering": [0, 4, 1, 2, 3],
    "half": [2, 2, 2],
}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    groups = [
        make_group(10 * index + turn, [i < right for i in range(4)], uid=uid)
        for index, (uid, rates) in enumerate(RATES.items())
        for turn, right in enumerate(rates)
    ]
    unjudged = make_group(900, (None, None), uid="nobody knows")
    with create(tmp_path) as database:
        database.record_step(make_report(1, [*groups, unjudged]))
    return find_run(tmp_path, "made")


def test_each_order_has_the_right_prompts_in_the_right_order(run: Run):
    hardest = [row.uid for row in prompts(run, "hardest").rows]
    assert hardest[:2] == ["hard", "harder to see"]
    assert set(hardest) == set(RATES) - {"solved for longer"}
    assert [row.uid for row in prompts(run, "solved").rows] == ["solved for longer", "solved"]
    assert [(row.uid, row.flips) for row in prompts(run, "flickering").rows] == [
        ("flickering", 3), ("lost", 1), ("solved", 1)
    ]  # fmt: skip
    longer, solved = prompts(run, "solved").rows
    assert (longer.pass_rate, longer.solved_in_a_row) == (1.0, 3)
    assert (solved.groups, solved.responses, solved.pass_rate, solved.solved_in_a_row) == (3, 12, 0.75, 2)
    assert (solved.first_pass_rate, solved.last_pass_rate, solved.question) == (0.25, 1.0, "question 20")
    with pytest.raises(ValueError, match="there is no order"):
        prompts(run, "best")


def test_the_statistics_agree_with_plain_python_over_all_rows(generated: Run):
    rates: dict[str, list[float]] = {}
    with RunDatabase.open_readonly(generated.path) as database:
        for group in database.groups():
            accs = [rollout["acc"] for rollout in database.rollouts(group["serial"]) if rollout["acc"] is not None]
            rates.setdefault(group["prompt_uid"], []).append(sum(accs) / len(accs))
    rows = {row.uid: row for kind in ("hardest", "solved", "flickering") for row in prompts(generated, kind).rows}
    assert len(rows) > 20
    for uid, row in rows.items():
        sides = [rate > 0.5 for rate in rates[uid] if rate != 0.5]
        unsolved = [index for index, rate in enumerate(rates[uid]) if rate < 1]
        assert row.groups == len(rates[uid])
        assert row.flips == sum(a != b for a, b in pairwise(sides))
        assert (row.first_pass_rate, row.last_pass_rate) == (rates[uid][0], rates[uid][-1])
        assert row.solved_in_a_row == len(rates[uid]) - 1 - (unsolved[-1] if unsolved else -1)


@pytest.mark.parametrize("order", ["hardest", "solved", "flickering"])
def test_paging_gives_every_prompt_once(run: Run, generated: Run, order: str):
    for source in (run, generated):
        whole = prompts(source, order, limit=1_000)
        pages = [prompts(source, order, offset, 2) for offset in range(0, whole.total + 2, 2)]
        assert tuple(row for page in pages for row in page.rows) == whole.rows
        assert {page.total for page in pages} == {len(whole.rows)}


def test_the_history_of_a_prompt_is_that_of_the_sql_view(generated: Run):
    with generated.snapshot() as database:
        expected = [
            tuple(row)
            for row in database.execute(
                "SELECT step, correct * 1.0 / judged FROM prompt_history WHERE prompt_uid = 'p000007' ORDER BY serial"
            )
        ]
    found = history(generated, "p000007")
    assert len(found) > 2
    assert [(point.step, point.pass_rate) for point in found] == expected
    assert history(generated, "unknown") == []


def test_a_run_without_groups_has_no_ranking(tmp_path: Path):
    with create(tmp_path) as database:
        database.record_step(make_report(1))
    assert prompts(find_run(tmp_path, "made"), "hardest").rows == ()


def test_a_new_step_is_visible_at_once(tmp_path: Path):
    with create(tmp_path) as database:
        database.record_step(make_report(1, [make_group(1, uid="a")]))
        run = find_run(tmp_path, "made")
        assert [prompts(run, "hardest").total for _ in range(2)] == [1, 1]
        database.record_step(make_report(2, [make_group(2, uid="b"), make_group(3, uid="a")]))
        found = prompts(run, "hardest")
        assert {row.uid: row.groups for row in found.rows} == {"a": 2, "b": 1}
