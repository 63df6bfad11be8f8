"""The responses that are printed after a step: which ones, and how."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
from rich.console import Console

from dapo.terminal.console import ConsoleReporter
from dapo.terminal.samples import choose, sample_lines
from dapo.training.trainer import Trainer
from dapo.types import Group, Prompt, Rollout, Score, Verdict
from tests import runs


def group(serial: int, *scores: Score, text: str = "an answer", question: str = "a question") -> Group:
    prompt = Prompt(f"u{serial}", ({"role": "user", "content": question},), (1,), "gold")
    tokens = np.zeros(3, np.int32)
    rollouts = [Rollout(serial, i, tokens, np.zeros(3, np.float32), "stop", 0, text) for i in range(len(scores))]
    nothing = np.zeros(len(scores))
    return Group(serial, prompt, tuple(rollouts), scores, nothing, nothing, nothing > 0, Verdict.ALL_WRONG)


RIGHT, WRONG, BAD = Score(1.0, acc=True), Score(0.0, acc=False), Score(None, error="it raised")


def chosen(groups: list[Group], count: int) -> list[tuple[int, int]]:
    return [(group.serial, index) for group, index in choose(groups, count)]


def test_one_right_and_one_wrong_come_first_and_then_the_other_groups():
    groups = [group(3, WRONG, WRONG), group(4, BAD, WRONG, RIGHT), group(5, WRONG)]
    assert chosen(groups, 1) == [(4, 2)]
    assert chosen(groups, 2) == [(4, 2), (3, 0)]
    assert chosen(groups, 4) == [(4, 2), (3, 0), (4, 0), (5, 0)]
    assert chosen(groups, 99) == [(4, 2), (3, 0), (4, 0), (5, 0), (3, 1), (4, 1)]


def test_without_a_verdict_the_highest_and_the_lowest_score_are_shown():
    groups = [group(1, Score(0.5), Score(-2.0)), group(2, Score(0.7), Score(0.1))]
    assert chosen(groups, 2) == [(2, 0), (1, 1)]


def test_all_alike_unjudged_and_no_groups_show_what_there_is():
    assert chosen([group(1, WRONG, WRONG)], 2) == [(1, 0), (1, 1)]
    assert chosen([group(1, BAD)], 2) == [(1, 0)]
    assert chosen([], 2) == []


def test_a_response_is_cut_to_a_few_lines_with_its_end_and_controls_nothing():
    text = "start \x1b[31m\n\n " + "middle " * 500 + " the end"
    lines = sample_lines(group(7, RIGHT, text=text, question="q " * 500), 0, 80)
    assert lines[0] == "  right, score 1, 3 tokens; group 7 all wrong"
    assert len(lines) == 5 and all(len(line) <= 80 and line.isprintable() for line in lines)
    assert lines[1].startswith("    question  q q q") and " ... " in lines[1]
    assert lines[2].startswith("    response  start ⟨esc⟩[31m middle")
    assert lines[4].endswith("the end")
    assert sample_lines(group(7, BAD, text=""), 0, 80)[0::2] == [
        "  unjudged (it raised), 3 tokens; group 7 all wrong",
        "    response  (empty)",
    ]


def turn(text: str, *messages: tuple[str, str], **rest: str) -> dict[str, object]:
    given = [{"role": role, "content": content} for role, content in messages]
    return {"text": text, "messages": given, "seconds": 0.0, "calls": [], **rest}


def episode(*turns: dict[str, object]) -> Group:
    only = group(7, WRONG)
    return replace(only, rollouts=(replace(only.rollouts[0], turns=turns),))


def test_an_episode_is_shown_as_a_conversation():
    turns = turn("8", ("user", "Lower.\n\x1b"), ("tool", "")), turn("", ended="no turns left")
    assert sample_lines(episode(*turns), 0, 80) == [
        "  wrong, score 0, 3 tokens in 2 turns, no turns left; group 7 all wrong",
        "    question     a question",
        "    model        8",
        "    environment  Lower. ⟨esc⟩",
        "    tool         (empty)",
        "    model        (empty)",
    ]
    many = [turn("x " * 500, ("user", f"reply {i} " * 50)) for i in range(40)]
    lines = sample_lines(episode(*many, turn("the end", ended="by the environment")), 0, 80)
    assert lines[0] == "  wrong, score 0, 3 tokens in 41 turns; group 7 all wrong"
    assert len(lines) == 14 and all(len(line) <= 80 for line in lines)
    assert lines[8].strip() == "... 35 more turns ..." and lines[-1] == "    model        the end"


def test_a_run_prints_the_samples_of_every_step_and_the_same_ones_again(tmp_path):
    printed = []
    for name in ("first", "second"):
        console = Console(file=io.StringIO(), width=100)
        options = ("run.show_samples=3", "run.steps=2", f"run.name={name}")
        Trainer(runs.load(tmp_path, *options), reporter=ConsoleReporter(console)).train()
        printed.append([line for line in console.file.getvalue().splitlines() if "score " in line and "group" in line])  # pyright: ignore[reportAttributeAccessIssue]
    samples = [line for line in printed[0] if line.startswith("  ") and " tokens" in line]
    assert len(samples) == 6
    assert samples[0].startswith("  right, ") and samples[1].startswith("  wrong, ")
    assert samples == [line for line in printed[1] if line.startswith("  ") and " tokens" in line]
