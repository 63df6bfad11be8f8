"""A time limit for a model's chat template, which is a program that comes with the model and may never end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

TEMPLATE_SECONDS = 10.0


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
