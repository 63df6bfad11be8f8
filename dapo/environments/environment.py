"""Environments as their authors write them: a class or functions, the end of an episode, and the format of messages."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dapo.config.functions import load_function
from dapo.environments.protocol import Message, ToolCall
from dapo.errors import EpisodeError

MAX_CHARACTERS = 2**16  # of one reply; an environment should set its own, lower limit that fits the context
_ROLES = ("user", "tool", "system")
_KEYS = {"role", "content", "name"}
USE = "environment.use"


class End:
    """The end of an episode: its score, whether it succeeded (`acc`), and named extras.

    Without a score, the run's `reward` judges the text of the model's last turn.
    """

    def __init__(self, score: Any = None, acc: Any = None, **extras: Any) -> None:
        self.score, self.acc, self.extras = score, acc, extras


class Turn:
    """A reply with a reward for the turn that it answers: messages as `reply` returns them, and a number.

    The rewards of an episode's turns are added to its score.
    """

    def __init__(self, messages: Any, reward: Any = 0.0) -> None:
        self.messages, self.reward = messages, reward


class Environment(Protocol):
    """One episode. Methods may be coroutine functions.

    Two methods are optional. `start` returns the first messages; by default they are the row's prompt. `cut_off`
    returns the End of an episode that has used up its turns or tokens; by default such an episode scores 0.
    """

    def reply(self, text: str) -> Any:
        """Answer the model's turn with text or messages, with a Turn that has them, or with an End."""
        ...


class Maker:
    """Makes an environment for each episode.

    patience: a reply may take this many times environment.timeout.
    reads_thoughts: the environment gets turns with their thoughts (reward.think_tags), not only the text after them.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    patience = 1.0
    reads_thoughts = True

    def __init__(self, make: Callable[[dict[str, Any]], Any], *, is_async: bool) -> None:
        self.make, self.is_async = make, is_async


class _Functions:
    """An environment made of functions: `reply(messages, row)`, and `start(row)` if the file has one."""

    def __init__(self, row: dict[str, Any], begin: Callable[..., Any] | None, answer: Callable[..., Any]) -> None:
        self.row, self.begin, self.answer = row, begin, answer
        self.messages: list[Message] = [*row["prompt"]]

    async def start(self) -> Any:
        if self.begin is None:
            return None
        messages = await finished(self.begin(self.row))
        self.messages = [*first_messages(messages, self.messages)]
        return messages

    async def reply(self, text: str) -> Any:
        self.messages.append({"role": "assistant", "content": text})
        found = await finished(self.answer(copy.deepcopy(self.messages), self.row))
        if not isinstance(found, End):
            self.messages += to_messages(found.messages if isinstance(found, Turn) else found)
        return found


async def finished(value: Any) -> Any:
    """Return a method's result, awaited if the method is a coroutine function."""
    return await value if inspect.isawaitable(value) else value


def load_maker(spec: str) -> Maker:
    """Import the class or function that `path/to/file.py:Name` names."""
    found = load_function(spec, USE, EpisodeError)
    if inspect.isclass(found):
        return Maker(found, is_async=inspect.iscoroutinefunction(_checked_reply(spec, found)))
    _check_parameters(spec, found, ["messages", "row"])
    begin = getattr(inspect.getmodule(found), "start", None)
    if begin is not None and not inspect.isroutine(begin):
        raise EpisodeError(f"{USE}: 'start' in the file of {spec} is not a function; expected start(row), or none")
    return Maker(lambda row: _Functions(row, begin, found), is_async=inspect.iscoroutinefunction(found))


def _checked_reply(spec: str, found: type) -> Callable[..., Any]:
    """Check the methods of an environment class, and return its `reply`."""
    reply = getattr(found, "reply", None)
    if not callable(reply):
        raise EpisodeError(f"{USE}: the class {spec} has no method reply(self, text)")
    _check_parameters(spec, found, ["row"])
    for name, parameters in (("reply", ["text"]), ("start", []), ("cut_off", [])):
        if (method := getattr(found, name, None)) is not None:
            _check_parameters(f"{spec}.{name}", method, ["self", *parameters])
    return reply


def _check_parameters(name: str, function: Callable[..., Any], parameters: Sequence[str]) -> None:
    try:
        inspect.signature(function).bind(*parameters)
    except ValueError:  # a callable without a signature
        return
    except TypeError as error:
        raise EpisodeError(f"{USE}: {name} must take ({', '.join(parameters)}): {error}") from None


def first_messages(found: Any, own: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages that begin an episode: what `start` returned, or the row's own if that is None."""
    return tuple(own) if found is None else to_messages(found, is_first=True)


def to_messages(found: Any, *, is_first: bool = False) -> tuple[Message, ...]:
    """Validate messages for the model: text, a message, or a list of these. Raises EpisodeError."""
    members = [found] if isinstance(found, str | Mapping) else found
    if not isinstance(members, list | tuple):
        raise EpisodeError(f"the environment returned {type(found).__name__}; expected text, messages, or End(score)")
    if not members:
        raise EpisodeError("the environment returned no messages; expected at least one, or End(score)")
    messages = tuple(_message(member, is_first=is_first) for member in members)
    if is_first and messages[-1]["role"] == "assistant":
        raise EpisodeError("the first messages end with one of the assistant, whose turn comes next; leave it out")
    characters = sum(len(message["content"]) for message in messages)
    if characters > MAX_CHARACTERS:
        raise EpisodeError(f"the environment returned {characters:,} characters, more than {MAX_CHARACTERS:,}")
    return messages


def _message(member: Any, *, is_first: bool) -> Message:
    if isinstance(member, str):
        return {"role": "user", "content": member}
    if not isinstance(member, Mapping):
        raise EpisodeError(f"the environment returned a list with {type(member).__name__}; expected text or messages")
    role, others = member.get("role"), sorted(map(str, member.keys() - _KEYS))
    if role == "assistant" and not is_first:
        raise EpisodeError(
            "the environment returned a message of the assistant, but what the model said cannot be changed; return "
            "only new messages"
        )
    if role not in (*_ROLES, "assistant"):
        raise EpisodeError(f"the environment returned a message with role {role!r:.50}; expected {', '.join(_ROLES)}")
    if others:
        raise EpisodeError(f"the environment returned a message with '{others[0]}'; it may have role, content and name")
    for key in member:
        if not isinstance(member[key], str):
            raise EpisodeError(
                f"the environment returned a message whose {key} is {type(member[key]).__name__}; expected text"
            )
    if "content" not in member:
        raise EpisodeError("the environment returned a message without content")
    # Lone surrogates cannot be tokenized or stored.
    return {key: value.encode("utf-8", "replace").decode() for key, value in member.items()}


def take_calls(environment: Any) -> list[ToolCall]:
    """Take the tool calls that the environment has recorded in its list `calls`, if it has one."""
    calls = getattr(environment, "calls", None)
    if not isinstance(calls, list):
        return []
    found = [call for call in calls if isinstance(call, ToolCall)]
    calls.clear()
    return found
