"""Test training in a real notebook kernel: its event loop, its display, its stop button, and cells that fail."""

from __future__ import annotations

import pytest

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install nbclient ipykernel")
pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install nbclient ipykernel")
nbformat = pytest.importorskip("nbformat")

SETUP = """
import os, signal
from pathlib import Path
from tests.training.conftest import is_unlocked, make_trainer

folder, model = Path({folder!r}), Path({model!r})

def press_stop(trainer, step):
    os.kill(os.getpid(), signal.SIGINT)  # what the stop button does
"""
CELLS = {
    "whole": "trainer = make_trainer(folder, model, quiet=False)\ntrainer.train()",
    "generate": "trainer.model.generate(**trainer.tokenizer('a', return_tensors='pt'), max_new_tokens=2).shape",
    "ended": "trainer.train()",
    "again": "again = make_trainer(folder, model, callbacks=press_stop)\nagain.train().steps, again.config.run.name",
    "continued": "again.callbacks.members.clear()\nprint(again.train().steps)",
    "broken": "for step in make_trainer(folder, model).steps():\n    1 / 0",
    "locks": "print([is_unlocked(run) for run in sorted(folder.iterdir())])",
}


@pytest.mark.slow
def test_a_notebook_shows_progress_stops_and_fails_without_traces(tmp_path, tiny_model):
    sources = [SETUP.format(folder=str(tmp_path / "runs"), model=str(tiny_model)), *CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", allow_errors=True).execute()
    outputs = dict(zip(CELLS, (cell.outputs for cell in notebook.cells[1:]), strict=True))

    def shown(name: str) -> str:
        texts = [output.get("text") or output.get("data", {}).get("text/plain") or "" for output in outputs[name]]
        return "\n".join(texts)

    def error(name: str) -> str:
        return "".join(f"{o.ename}: {o.evalue}" for o in outputs[name] if o.output_type == "error")

    assert [name for name in CELLS if error(name)] == ["ended", "broken"]
    for text in ("4/4", "finished: after step 4", "RunResult of"):
        assert text in shown("whole")
    assert "widgets" not in shown("whole")
    assert "torch.Size([1, 3])" in shown("generate")
    assert error("ended").startswith("CheckpointError: ")
    assert "has already finished 4 steps" in error("ended")
    assert shown("again").strip() == "(1, 'run-2')"
    assert shown("continued").strip() == "4"
    assert error("broken") == "ZeroDivisionError: division by zero"
    assert shown("locks").strip() == "[True, True, True]"
