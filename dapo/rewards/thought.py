"""Split a response of a thinking model into its thought and its reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from dapo.types import Prompt, Rollout, Score

REPLY_START = "reply_start"  # the extra of a score that says where the reply starts in the response


class Split(NamedTuple):
    """A response in two parts. `reply` is None if the last thought does not end."""

    thought: str  # without its first opening and its last closing tag
    reply: str | None


def split_thought(text: str, tags: Sequence[str] | None, is_open: bool = False) -> Split:
    """Split at the end of the last thought.

    `tags` are the texts that open and close a thought; without tags, everything is the reply. `is_open`: the prompt has
    opened a thought already. The last tag decides: after a closing one comes the reply, after an opening one there is
    none. Without any tag, all is the thought if it is open, else all is the reply.
    """
    if not tags:
        return Split("", text)
    opening, closing = tags
    last_opening, last_closing = text.rfind(opening), text.rfind(closing)
    if last_opening == last_closing == -1 and not is_open:
        return Split("", text)
    is_finished = last_closing > last_opening
    thought = text[:last_closing] if is_finished else text
    return Split(_without_opening(thought, opening), text[last_closing + len(closing) :] if is_finished else None)


def _without_opening(thought: str, opening: str) -> str:
    start = thought.lstrip()
    return start[len(opening) :] if start.startswith(opening) else thought


def with_reply_start(
    prompt: Prompt, rollouts: Sequence[Rollout], scores: Sequence[Score], tags: Sequence[str] | None
) -> list[Score]:
    """Add the extra REPLY_START to the score of each response that has a thought; None if the thought does not end.

    The name is reserved: an extra of this name that a judge returned is dropped.
    """
    marked = []
    for rollout, score in zip(rollouts, scores, strict=True):
        _, reply = split_thought(rollout.text, tags, prompt.opens_thought)
        extras = {name: value for name, value in score.extras.items() if name != REPLY_START}
        if reply != rollout.text:
            extras[REPLY_START] = None if reply is None else len(rollout.text) - len(reply)
        marked.append(replace(score, extras=extras))
    return marked
