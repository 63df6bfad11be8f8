"""A model's chat template, a program that comes with the model: its variables, a time limit, and later turns."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

from dapo.errors import ConfigError

TEMPLATE_SECONDS = 10.0
_SET_HERE = {"messages", "add_generation_prompt"}  # variables that every template gets
# Turns of the model that a template must not change when the conversation continues.
_TURNS = ("1", "two words", "<think>\n3\n</think>\n\n4")

_CHANGES = "it changes earlier turns when a conversation continues"


def check_template_variables(tokenizer: Any, names: Collection[str]) -> None:
    """Refuse names for data.chat_template_kwargs that the model's chat template never reads."""
    if not names:
        return
    if tokenizer.chat_template is None:
        raise ConfigError(
            "data.chat_template_kwargs: the model has no chat template that could read them; leave it out"
        )
    read = _variables(tokenizer, "data.chat_template_kwargs")
    read -= _SET_HERE | tokenizer.special_tokens_map.keys()
    for name in names:
        if name not in read:
            known = f"it reads {', '.join(sorted(read))}" if read else "it reads none but the messages"
            raise ConfigError(f"data.chat_template_kwargs: the model's chat template does not read '{name}'; {known}")


def check_template_tools(tokenizer: Any) -> None:
    """Refuse a model whose chat template cannot offer tools."""
    if tokenizer.chat_template is None or "tools" not in _variables(tokenizer, "environment.use", tools=[{}]):
        raise ConfigError(
            "environment.use offers tools, but the model's chat template does not read them; use a model that was "
            "trained with tools, or an environment that explains them in its messages"
        )


def _variables(tokenizer: Any, option: str, tools: Any = None) -> set[str]:
    """Return the variables that the model's chat template reads. Errors name `option`."""
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template  # knows the tags that templates use

    try:
        text = tokenizer.get_chat_template(tools=tools)
        environment = _compile_jinja_template(text).environment
        return meta.find_undeclared_variables(environment.parse(text)) - environment.globals.keys()
    except Exception as error:  # a template can be broken in any way
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{option}: the model's chat template cannot be read ({reason})") from None


@contextmanager
def limited_template() -> Iterator[None]:
    """Raise a TimeoutError if the templates rendered in the block take more than TEMPLATE_SECONDS of CPU time.

    Jinja compiles a template to Python, so a trace function can check the clock at each of its lines. That works in any
    thread and needs no signal. Jinja's sandbox bounds a single `range`, but not nested loops. Under a debugger, which
    has its own trace function, there is no limit.
    """
    if sys.gettrace() is not None:
        yield
        return
    end = time.thread_time() + TEMPLATE_SECONDS

    def trace_line(frame: FrameType, event: str, argument: Any) -> Any:
        if time.thread_time() > end:
            raise TimeoutError(f"the chat template was still running after {TEMPLATE_SECONDS:g} s")
        return trace_line

    def trace_call(frame: FrameType, event: str, argument: Any) -> Any:
        return trace_line if frame.f_code.co_filename == "<template>" else None

    sys.settrace(trace_call)
    try:
        yield
    finally:
        sys.settrace(None)


class TurnTemplate:
    """The tokens between two turns of the model: the end of a turn, the environment's messages, the next turn's start.

    They are appended to what the model sampled, which is never rendered or tokenized again. So they may not depend on
    the conversation before them, and a template that changes earlier turns is refused.
    """

    def __init__(
        self, tokenizer: Any, kwargs: Mapping[str, Any] | None = None, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        if tokenizer.chat_template is None:
            raise ConfigError(
                "environment.use: the model has no chat template, which a conversation of several turns needs; use a "
                "model that has one, or set environment.max_turns to 1"
            )
        self.tokenizer, self.kwargs, self.tools = tokenizer, kwargs or {}, list(tools) or None
        self._cached = lru_cache(maxsize=1024)(lambda messages: tuple(self._tokens(json.loads(messages), _TURNS[:1])))
        self._check({"role": "tool" if tools else "user", "content": "5"})

    def between(self, messages: Sequence[Mapping[str, Any]], last_token: int) -> tuple[int, ...]:
        """Return the tokens to append for these messages after a turn that ended with `last_token`.

        A turn that was cut off, or that a stop string ended, also gets the token that ends a turn. Raises whatever the
        template raises.
        """
        tokens = self._cached(json.dumps([dict(message) for message in messages]))
        return tokens[1:] if tokens[:1] == (last_token,) else tokens

    def _check(self, message: Mapping[str, Any]) -> None:
        reason = _CHANGES
        try:
            found = {tuple(self._tokens([message], turns)) for turns in [*((turn,) for turn in _TURNS), _TURNS]}
        except Exception as error:  # a template can be broken in any way
            found, reason = set(), " ".join(str(error).split())[:300] or type(error).__name__
        if len(found) != 1:
            raise ConfigError(
                f"environment.use: the chat template of {self.tokenizer.name_or_path or 'the model'} cannot be "
                f"continued token by token ({reason}); use another model, or set environment.max_turns to 1"
            )

    def _tokens(self, messages: Sequence[Mapping[str, Any]], turns: Sequence[str]) -> list[int]:
        """Return the tokens that follow the last of the turns, or raise ValueError if the text before it changes."""
        conversation: list[Mapping[str, Any]] = [{"role": "user", "content": "0"}]
        before, text = "", self._render(conversation)
        for turn in turns:
            before = text + turn
            conversation += [{"role": "assistant", "content": turn}, *messages]
            text = self._render(conversation)
            if not text.startswith(before):
                raise ValueError(_CHANGES)
        parts = [self.tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, text[len(before) :])]
        if self.tokenizer(text, add_special_tokens=False)["input_ids"] != [*parts[0], *parts[1]]:
            raise ValueError("its tokens reach across the end of a turn")
        return parts[1]

    def _render(self, conversation: Sequence[Mapping[str, Any]]) -> str:
        with limited_template():
            return self.tokenizer.apply_chat_template(
                conversation, tools=self.tools, add_generation_prompt=True, tokenize=False, **self.kwargs
            )
