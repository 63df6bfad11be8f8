"""The protocol between the sampler and the environments that reply to the model's turns."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dapo.types import Prompt, Score

Message = Mapping[str, Any]  # role, content, and for the result of a tool its name
ROW_PROMPT = "row_prompt"  # extra column with the row's own messages, if the environment's `start` replaced them
Episode = tuple[int, int]  # group serial and sample index


class ToolCall(NamedTuple):
    """One call of a tool, for the record."""

    name: str
    arguments: str
    result: str
    seconds: float
    error: bool  # the call was malformed or failed; `result` says why


@dataclass(frozen=True, slots=True)
class Reply:
    """The environment's answer to one turn of the model: messages to append, or the end of the episode."""

    messages: tuple[Message, ...] = ()  # empty if the episode has ended
    ended: bool = False
    is_out_of_turns: bool = False  # ended because `environment.max_turns` were used up
    score: Score | None = None  # if None at the end, the run's reward judges the text of the last turn
    reward: float | None = None  # for this turn alone, added to the score
    seconds: float = 0.0  # time of the call
    calls: tuple[ToolCall, ...] = ()


class EnvironmentPool(Protocol):
    """Runs the environments of all episodes in flight.

    Futures of replies always get a result, never an exception. An episode whose environment fails ends with a Score
    that has the reason.
    """

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """JSON schemas of the tools, for the chat template."""
        ...

    def first_messages(self, prompt: Prompt) -> Future[tuple[Message, ...]]:
        """Return the messages that begin every episode of this row. If it fails, the future raises EpisodeError."""
        ...

    def start(self, episode: Episode, prompt: Prompt) -> None: ...

    def reply(self, episode: Episode, text: str, turn: int) -> Future[Reply]:
        """Answer the model's turn; `turn` counts from 1. At `environment.max_turns` the episode ends."""
        ...

    def cut_off(self, episode: Episode, text: str, turn: int) -> Future[Reply]:
        """End an episode that has no tokens left, in the turn with this text."""
        ...

    def waiting_for(self) -> str:
        """Return a noun for what slow replies are waiting for, for messages to the user."""
        ...

    def end(self, episode: Episode) -> None:
        """Forget the episode: it has ended, or was canceled."""
        ...

    def close(self) -> None: ...
