"""Group filters agree with plain Python over all rows, paging returns each group once, and texts are exact."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapo.errors import CheckpointError
from dapo.store.database import RunDatabase
from dapo.types import Event
from dapo.view import groups as module
from dapo.view.groups import GroupFilter, count_groups, data_sources, group, groups, verdicts
from dapo.view.health import newest_events
from dapo.view.report import write_report
from dapo.view.runs import find_run
from dapo.view.source import Run
from tests.view.made import HOSTILE, create, make_group, make_report

FILTERS = [
    GroupFilter(),
    GroupFilter(first_step=2),
    GroupFilter(first_step=2, last_step=2),
    GroupFilter(last_step=0),
    GroupFilter(verdicts=("all_right",)),
    GroupFilter(verdicts=("all_right", "carried")),
    GroupFilter(min_accuracy=0.5),
    GroupFilter(min_accuracy=0.25, max_accuracy=0.5),
    GroupFilter(max_accuracy=0.0, verdicts=("all_wrong",), first_step=3),
    GroupFilter(data_source="geometry"),
    GroupFilter(data_source="geo%"),
    GroupFilter(prompt_uid="p000007"),
    GroupFilter(error="timed out after 11 s"),
    GroupFilter(text="question 7:"),
    GroupFilter(text="EQUALS CHECK"),
    GroupFilter(text="equals check", data_source="words", min_accuracy=0.5),
    GroupFilter(text="_"),
    GroupFilter(text="100%"),
    GroupFilter(text="nowhere to be found"),
    GroupFilter(text="nowhere Ä"),
]


def stored(run: Run) -> list[dict[str, Any]]:
    with RunDatabase.open_readonly(run.path) as database:
        return [{**row, "rollouts": list(database.rollouts(row["serial"]))} for row in database.groups()]


def fits(row: dict[str, Any], wanted: GroupFilter) -> bool:
    accs = [rollout["acc"] for rollout in row["rollouts"] if rollout["acc"] is not None]
    accuracy = sum(accs) / len(accs) if accs else float("nan")
    texts = [message["content"] for message in row["messages"]] + [rollout["text"] for rollout in row["rollouts"]]
    return (
        (wanted.first_step is None or row["generated_step"] >= wanted.first_step)
        and (wanted.last_step is None or row["generated_step"] <= wanted.last_step)
        and (not wanted.verdicts or row["verdict"] in wanted.verdicts)
        and (wanted.min_accuracy is None or accuracy >= wanted.min_accuracy)
        and (wanted.max_accuracy is None or accuracy <= wanted.max_accuracy)
        and wanted.data_source in (None, row["data_source"])
        and wanted.prompt_uid in (None, row["prompt_uid"])
        and (wanted.error is None or any(rollout["error"] == wanted.error for rollout in row["rollouts"]))
        and any(wanted.text.lower() in text.lower() for text in texts)
    )


def all_serials(run: Run, wanted: GroupFilter, limit: int, **options: Any) -> list[int]:
    found, after = [], None
    while True:
        page = groups(run, wanted, after, limit, **options)
        assert len(page.rows) <= limit
        found += [row.serial for row in page.rows]
        if page.after is None:
            return found
        after = page.after


@pytest.mark.parametrize("wanted", FILTERS, ids=repr)
def test_filters_agree_with_plain_python_over_all_rows_on_every_page_size(generated: Run, wanted: GroupFilter):
    expected = [row["serial"] for row in stored(generated) if fits(row, wanted)]
    assert all_serials(generated, wanted, limit=1_000) == expected
    assert all_serials(generated, wanted, limit=7) == expected
    assert all_serials(generated, wanted, limit=7, newest_first=True) == expected[::-1]
    assert count_groups(generated, wanted) == (None if wanted.text else len(expected))


def test_the_filters_under_test_find_some_and_not_all(generated: Run):
    rows = stored(generated)
    sizes = [sum(fits(row, wanted) for row in rows) for wanted in FILTERS]
    assert sum(0 < size < len(rows) for size in sizes) >= 10


def test_a_search_that_ran_out_of_time_continues_where_it_stopped(generated: Run):
    wanted = GroupFilter(text="question 7:")
    page = groups(generated, wanted, search_seconds=0.0)
    assert page.after is not None
    assert page.after < 191
    expected = [row["serial"] for row in stored(generated) if fits(row, wanted)]
    assert all_serials(generated, wanted, limit=50, search_seconds=0.0) == expected


def test_a_line_about_a_group_agrees_with_its_responses(trained: Run, generated: Run):
    for run in (trained, generated):
        for line, row in zip(groups(run, limit=1_000).rows, stored(run), strict=True):
            rollouts = row["rollouts"]
            accs = [rollout["acc"] for rollout in rollouts if rollout["acc"] is not None]
            rewards = [rollout["reward"] for rollout in rollouts if rollout["reward"] is not None]
            assert (line.serial, line.verdict, line.prompt_uid) == (row["serial"], row["verdict"], row["prompt_uid"])
            assert (line.generated_step, line.decided_step) == (row["generated_step"], row["decided_step"])
            assert (line.responses, line.judged) == (len(rollouts), sum(r["error"] is None for r in rollouts))
            assert line.question == row["messages"][-1]["content"][:300]
            assert line.accuracy == pytest.approx(np.mean(accs))
            assert line.reward == pytest.approx(np.mean(rewards))
            assert line.length == pytest.approx(np.mean([rollout["length"] for rollout in rollouts]))


def test_a_real_group_comes_back_in_full(trained: Run):
    for row in stored(trained):
        found = group(trained, row["serial"])
        assert (found.answer, list(found.messages), found.extra) == (row["answer"], row["messages"], row["extra"])
        assert (found.verdict, found.decided_step) == (row["verdict"], row["decided_step"])
        for response, rollout in zip(found.responses, row["rollouts"], strict=True):
            names = ("sample", "text", "score", "acc", "reward", "advantage", "trains", "length", "finish_reason")
            for name in (*names, "weight_version", "error", "extracted", "extras"):
                assert getattr(response, name) == rollout[name], name
            assert list(response.switches) == rollout["switches"]
            assert response.has_tokens == (rollout["tokens"] is not None)
    with pytest.raises(CheckpointError, match="there is no group 12345"):
        group(trained, 12345)


def test_a_response_comes_apart_into_thought_and_reply(tmp_path: Path):
    texts = ("<think>hm</think>5", "<think>hm", "5", "5")
    starts = ({"reply_start": 17}, {"reply_start": None}, {}, {"reply_start": "mine"})
    made = make_group(1, (True, False, True, True), texts=texts)
    scores = tuple(replace(score, extras=extra) for score, extra in zip(made.scores, starts, strict=True))
    with create(tmp_path) as database:
        database.record_step(make_report(1, [replace(made, scores=scores)]))
    found = group(find_run(tmp_path, "made"), 1)
    assert [response.parts for response in found.responses] == [
        ("<think>hm</think>", "5"), ("<think>hm", None), ("", "5"), ("", "5")
    ]  # fmt: skip
    report = tmp_path / "report.html"
    write_report(tmp_path / "made", report)
    text = report.read_text().replace("\n", "")
    assert "<summary>thought</summary><pre>&lt;think&gt;hm&lt;/think&gt;</pre></details><pre>5</pre></div>" in text
    assert "<summary>thought, without an end</summary><pre>&lt;think&gt;hm</pre></details></div>" in text
    assert text.count("<details") == 2 * text.count("<h3>Group 1:")


def test_the_verdicts_and_sources_there_are(generated: Run):
    rows = stored(generated)
    assert verdicts(generated) == Counter(row["verdict"] for row in rows)
    assert data_sources(generated) == sorted({row["data_source"] for row in rows})


def test_groups_that_nobody_could_judge(tmp_path: Path):
    with create(tmp_path) as database:
        database.record_step(
            make_report(1, [make_group(1, (None, None), verdict="unjudged"), make_group(2, (True, None))])
        )
    run = find_run(tmp_path, "made")
    nobody, one = groups(run).rows
    assert (nobody.judged, nobody.accuracy, nobody.reward, nobody.length) == (0, None, None, 3.5)
    assert (one.judged, one.accuracy) == (1, 1.0)
    assert [row.serial for row in groups(run, GroupFilter(min_accuracy=0.0)).rows] == [2]


@pytest.mark.parametrize("text", HOSTILE, ids=["html", "ansi", "nul", "long", "sql"])
def test_hostile_texts_come_back_exactly_and_are_found(tmp_path: Path, text: str):
    hostile = make_group(
        1, (True, False), uid=text, texts=(text, "other"), data_source=text, answer=text,
        messages=({"role": "system", "content": text}, {"role": "user", "content": "harmless"}),
    )  # fmt: skip
    hostile = replace(
        hostile, scores=(replace(hostile.scores[0], extras={text: text, "extracted": text}), hostile.scores[1])
    )
    with create(tmp_path) as database:
        innocent = make_group(2, data_source="s")
        report = make_report(1, [hostile, innocent], events=[Event(text, text, 1)], metrics={text: 1.0})
        database.record_step(report)
    run = find_run(tmp_path, "made")
    found = group(run, 1)
    assert (found.prompt_uid, found.data_source, found.answer, found.messages[0]["content"]) == (text,) * 4
    assert (found.responses[0].text, found.responses[0].extracted) == (text, text)
    assert found.responses[0].extras == {text: text, "extracted": text}
    for wanted in (GroupFilter(text=text), GroupFilter(data_source=text), GroupFilter(prompt_uid=text)):
        assert [row.serial for row in groups(run, wanted).rows] == [1]
    assert [row.serial for row in groups(run, GroupFilter(text=text[1:].upper())).rows] == [1]
    (event,) = newest_events(run, kinds=[text])
    assert (event.kind, event.message) == (text, text)


@pytest.mark.parametrize("where", ["prompt", "response"])
def test_a_search_sees_the_text_and_not_how_it_is_stored(tmp_path: Path, where: str):
    text = 'a "quoted"\nline\0 then ÄRGER and 50%_off \\frac'
    content = text if where == "prompt" else "?"
    texts = ("-", text) if where == "response" else None
    with create(tmp_path) as database:
        first = make_group(1, texts=texts, messages=({"role": "user", "content": content},))
        database.record_step(make_report(1, [first, make_group(2)]))
    run = find_run(tmp_path, "made")
    for part in ('"quoted"\nline', "LINE\0 then", "ärger", "50%_OFF", "0%_o", "\\FRAC", text):
        assert [row.serial for row in groups(run, GroupFilter(text=part)).rows] == [1], part
    for part in ("role", "content", "50%off", "\\n", "frac\0", "q%d"):
        assert groups(run, GroupFilter(text=part)).rows == (), part


def test_a_search_for_a_very_long_text_finds_nothing(tmp_path: Path):
    with create(tmp_path) as database:
        database.record_step(make_report(1, [make_group(1)]))
    assert groups(find_run(tmp_path, "made"), GroupFilter(text="x" * 200_000)).rows == ()


def test_questions_over_all_responses_read_the_index_and_not_the_texts(generated: Run):
    condition, values = module._conditions(GroupFilter(min_accuracy=0.5))
    queries = [
        (f"SELECT count(*) FROM groups WHERE {condition}", values),
        ("SELECT sum(judged), sum(correct), avg(mean_score) FROM prompt_history", []),
    ]
    with generated.snapshot() as database:
        for query, values in queries:
            plan = [row["detail"] for row in database.execute(f"EXPLAIN QUERY PLAN {query}", values)]
            assert any("rollouts USING COVERING INDEX" in line for line in plan), json.dumps(plan)
