"""A limit on a model's chat template, which is a program: it comes with the model, and may never end."""

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
    """Stop templates that are rendered in the block after this much time of the CPU, by a TimeoutError.

    Jinja compiles a template to Python, whose every line is watched here: that works in any thread, and needs no
    signal. Its sandbox bounds a single `range`, but not one loop inside another. A debugger's own watch is left alone.
    """
    if sys.gettrace() is not None:
        yield
        return
    end = time.thread_time() + TEMPLATE_SECONDS

    def watch_line(frame: FrameType, event: str, argument: Any) -> Any:
        if time.thread_time() > end:
            raise TimeoutError(f"the chat template was still running after {TEMPLATE_SECONDS:g} s")
        return watch_line

    def watch_call(frame: FrameType, event: str, argument: Any) -> Any:
        return watch_line if frame.f_code.co_filename == "<template>" else None

    sys.settrace(watch_call)
    try:
        yield
    finally:
        sys.settrace(None)
