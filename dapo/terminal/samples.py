"""A few of a step's responses for the terminal: question, response, score and verdict, cut to a few lines."""

from __future__ import annotations

from collections.abc import Sequence

from dapo.store.encoding import to_text, visible
from dapo.types import Group, Score

_LINES = 3  # of a response
_LABEL = 10  # characters in front of question and response


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
    """Return the lines to print: the verdict, the question in one line and the response in at most three."""
    rollout, score = group.rollouts[index], group.scores[index]
    cut = ", cut off" if rollout.finish_reason == "length" else ""
    head = f"{verdict(score)}, {rollout.sampled} tokens{cut}; group {group.serial} {group.verdict.replace('_', ' ')}"
    room = max(width - _LABEL - 4, 20)
    question = _shortened(group.prompt.messages[-1]["content"], room)
    response = _shortened(rollout.text, _LINES * room)
    parts = [response[at : at + room] for at in range(0, len(response), room)] or ["(empty)"]
    labels = ["response", *[""] * (len(parts) - 1)]
    rows = [("question", question), *zip(labels, parts, strict=True)]
    return [f"  {head}", *(f"    {label:<{_LABEL}}{text}" for label, text in rows)]


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
