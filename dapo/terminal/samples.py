"""A few of a step's responses for the terminal: question, response or turns, score and verdict, cut to a few lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dapo.store.encoding import to_text, visible
from dapo.types import Ending, Group, Rollout, Score

_LINES = 3  # of a response
_LABEL = 10  # characters in front of question and response
_TURN_LABEL = 13  # the same for an episode
_TURNS = 3  # shown of an episode at its start, and as many at its end


def choose(groups: Sequence[Group], count: int) -> list[tuple[Group, int]]:
    """Choose responses as (group, index): one of the best, one of the worst, then one of each further group.

    The choice depends only on the groups, so that two runs of one seed show the same responses.
    """
    every = [(group, index) for group in groups for index in range(len(group.rollouts))]
    judged = [pair for pair in every if pair[0].scores[pair[1]].judged]
    first_of_each = [(group, 0) for group in groups]
    ends = [pick(judged, key=_value) for pick in (max, min)] if judged else []
    chosen: list[tuple[Group, int]] = []
    for pair in [*ends, *first_of_each, *every]:
        if pair not in chosen and len(chosen) < count:
            chosen.append(pair)
    return chosen


def _value(pair: tuple[Group, int]) -> tuple[float, float]:
    score = pair[0].scores[pair[1]]
    return -1.0 if score.acc is None else float(score.acc), score.value or 0.0


def sample_lines(group: Group, index: int, width: int) -> list[str]:
    """Return the lines to print: the verdict, the question in one line, and the response in at most three.

    The turns of an episode take a line each, as do the environment's messages.
    """
    rollout, score = group.rollouts[index], group.scores[index]
    head = f"{verdict(score)}, {_length(rollout)}; group {group.serial} {group.verdict.replace('_', ' ')}"
    label_width = _TURN_LABEL if rollout.turns else _LABEL
    room = max(width - label_width - 4, 20)
    question = _shortened(group.prompt.messages[-1]["content"], room)
    rows = [("question", question), *(_turn_rows(rollout.turns, room) or _response_rows(rollout.text, room))]
    return [f"  {head}", *(f"    {label:<{label_width}}{text}" for label, text in rows)]


def _length(rollout: Rollout) -> str:
    if not rollout.turns:
        return f"{rollout.sampled} tokens" + ", cut off" * (rollout.finish_reason == "length")
    count, ended = len(rollout.turns), rollout.turns[-1].get("ended")
    limit = f", {ended}" if ended in (Ending.NO_TURNS, Ending.NO_TOKENS) else ""
    return f"{rollout.sampled} tokens in {count} turn{'s' * (count > 1)}{limit}"


def _response_rows(text: str, room: int) -> list[tuple[str, str]]:
    response = _shortened(text, _LINES * room)
    parts = [response[at : at + room] for at in range(0, len(response), room)] or ["(empty)"]
    return [("" if at else "response", part) for at, part in enumerate(parts)]


def _turn_rows(turns: Sequence[Mapping[str, Any]], room: int) -> list[tuple[str, str]]:
    """Return labels and lines of a conversation; the middle of a long one is left out."""
    hidden = range(_TURNS, len(turns) - _TURNS)
    rows: list[tuple[str, str]] = []
    for at, turn in enumerate(turns):
        if at in hidden:
            if at == hidden[0]:
                rows.append(("", f"... {len(hidden)} more turns ..."))
            continue
        rows.append(("model", _shortened(turn["text"], room) or "(empty)"))
        for message in turn["messages"]:
            label = "tool" if message["role"] == "tool" else "environment"
            rows.append((label, _shortened(message["content"], room) or "(empty)"))
    return rows


def verdict(score: Score) -> str:
    """Return what the judge said about one response."""
    if score.error is not None:
        return f"unjudged ({_shortened(score.error, 60)})"
    found = "right" if score.acc == 1 else "wrong" if score.acc == 0 else f"{score.acc:.0%} right" if score.acc else ""
    return ", ".join(filter(None, [found, f"score {score.value:.4g}"]))


def sample_style(score: Score) -> str:
    if score.error is not None:
        return "yellow"
    return "bold" if score.acc is None else "green" if score.acc == 1 else "red"


def _shortened(text: str, limit: int) -> str:
    """Put the text into one line. Of a long one show the start and the end, where the answer usually is."""
    line = visible(to_text(" ".join(text.split())))
    if len(line) <= limit:
        return line
    end = limit // 3
    return f"{line[: limit - end - 5]} ... {line[-end:]}"
