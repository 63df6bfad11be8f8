"""A progress bar in Jupyter that needs no widgets: one output of the cell, which is replaced as it changes."""

from __future__ import annotations

import io
import time
from typing import Any

from rich.console import Console
from rich.progress import Progress

_INTERVAL = 0.5  # seconds between two updates
_WIDTH = 110


class NotebookProgress(Progress):
    _handle: Any = None
    _shown = 0.0

    def start(self) -> None:
        from IPython.display import display

        self._handle = display(self._output(), raw=True, display_id=True)

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        if time.monotonic() - self._shown > _INTERVAL:
            self.refresh()

    def refresh(self) -> None:
        if self._handle is not None:
            self._shown = time.monotonic()
            self._handle.update(self._output(), raw=True)

    def stop(self) -> None:
        self.refresh()
        self._handle = None  # the output of this cell is final; the next one shows a bar of its own

    def _output(self) -> dict[str, str]:
        console = Console(file=io.StringIO(), record=True, width=_WIDTH, force_jupyter=False)
        console.print(self.get_renderable())
        html = console.export_html(inline_styles=True, clear=False, code_format="<pre>{code}</pre>")
        return {"text/html": html, "text/plain": console.export_text()}
