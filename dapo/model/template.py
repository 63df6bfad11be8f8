"""A model's chat template, which is a program that comes with the model: its variables, and a limit to its time."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dapo.errors import ConfigError

TEMPLATE_SECONDS = 10.0
_SET_HERE = {"messages", "add_generation_prompt"}  # variables that every template gets


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
    """Return the variables that the model's chat template reads; `option` is why they are asked for."""
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template  # it alone knows every tag of templates

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
