"""An episode is shown as a conversation, and what the environment gave is marked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dapo.store.encoding import turns_from_json
from dapo.view.groups import GroupFilter, group, group_json, groups
from dapo.view.runs import find_run
from dapo.view.tokens import tokens
from tests.view.made import HOSTILE, create, make_group, make_report


def recorded(folder: Path, first: str = "Let me see.", given: str = "42", arguments: str = '{"code": "1"}') -> None:
    """Record a group whose second response is an episode of two turns."""
    call = {"name": "python", "arguments": arguments, "result": given, "seconds": 0.25, "error": False}
    failed = {"name": "", "arguments": "{", "result": "Error: not valid JSON", "seconds": 0.0, "error": True}
    messages = [{"role": "tool", "name": "python", "content": given}, {"role": "user", "content": "Go on."}]
    turns = (
        {"text": first, "messages": messages, "seconds": 0.5, "calls": [call, failed], "reward": 0.125},
        {"text": "It is 42.", "messages": [], "seconds": 0.001, "calls": [], "ended": "no turns left"},
    )
    made = make_group(1, accs=(True, False, True), texts=["single", "It is 42.", "single"])
    rollouts = list(made.rollouts)
    rollouts[1] = replace(rollouts[1], given=((1, 3),), turns=turns)
    with create(folder, name="episodes") as database:
        database.record_step(make_report(1, [replace(made, rollouts=tuple(rollouts))]))


def test_turns_and_given_tokens_are_read_as_recorded(tmp_path):
    recorded(tmp_path)
    run = find_run(tmp_path, "episodes")
    found = group(run, 1)
    assert [len(response.turns) for response in found.responses] == [0, 2, 0]
    assert found.responses[1].turns[0]["calls"][0]["result"] == "42"
    assert [turn.get("reward") for turn in found.responses[1].turns] == [0.125, None]
    assert found.responses[1].length == 2  # the model's own tokens
    assert '"Let me see."' in group_json(found)
    shown = tokens(run, 1, 1, str)
    assert shown is not None and shown.length == 4 and shown.given.tolist() == [False, True, True, False]
    part = tokens(run, 1, 1, str, start=2)
    assert part is not None and part.given.tolist() == [True, False]


def test_a_turn_whose_reward_is_no_number_is_refused():
    with pytest.raises(ValueError, match="the reward of a turn"):
        turns_from_json('[{"text": "a", "messages": [], "calls": [], "seconds": 1, "reward": "much"}]')


@pytest.mark.parametrize(("text", "hits"), [("let me SEE", 1), ("go on", 1), ("it is 42", 1), ("nowhere", 0)])
def test_a_search_finds_what_was_said_in_any_turn(tmp_path, text, hits):
    recorded(tmp_path)
    assert len(groups(find_run(tmp_path, "episodes"), GroupFilter(text=text)).rows) == hits


def test_given_tokens_are_marked_and_have_no_values(tmp_path):
    pytest.importorskip("nicegui", reason="the page needs dapo[view]")
    from dapo.view.page.tokens import color_values, legend_html, tokens_html

    recorded(tmp_path)
    found = tokens(find_run(tmp_path, "episodes"), 1, 1, lambda token: f"<{token}>")
    assert found is not None
    values, scale = color_values(found, "log-probability")
    spans = tokens_html(found, values, scale).split("</span>")[:-1]
    assert ['class="given"' in span for span in spans] == [False, True, True, False]
    assert ["given by the environment" in span for span in spans] == [False, True, True, False]
    assert ["background" in span for span in spans] == [True, False, False, True]
    assert "given by the environment" in legend_html(scale, False, True)
    assert "given" not in legend_html(scale, False)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["plain", *HOSTILE])
def test_the_page_shows_a_conversation(tmp_path, page: Any, text: str):
    from tests.view.test_server import running

    recorded(tmp_path, first=f"first {text}", given=f"given {text}", arguments=text)
    with running(tmp_path) as url:
        page.goto(f"{url.rstrip('/')}/run/episodes/groups/1")
        page.get_by_text("model, turn 2").wait_for()
        assert page.get_by_text("model, turn 1, reward 0.125", exact=True).count() == 1
        given = page.locator(".given")
        assert given.count() == 2
        assert "python, took 0.250 s" in given.first.inner_text()
        assert "malformed call, failed\n" in given.first.inner_text()
        assert "the environment took 0.500 s" in given.first.inner_text()
        assert "Go on." in given.first.inner_text()
        assert "took" not in given.last.inner_text()  # too short to matter
        assert page.get_by_text("no turns left", exact=True).count() == 1
