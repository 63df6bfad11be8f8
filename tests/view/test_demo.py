"""make demo prints how to view the run, and VIEW=1 keeps the page open during the training and after it."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny import save_tiny
from tests.view.test_server import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def demo(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start the real make target, with this interpreter as its environment and a tiny model for its recipe."""
    (folder / "venv" / "bin").mkdir(parents=True)
    program = folder / "venv" / "bin" / "dapo"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'from dapo.cli import main; main()' \"$@\"\n")
    program.chmod(0o755)
    (folder / "venv" / ".ready").touch()
    save_tiny(folder / "model")
    values = f"model.path={folder / 'model'} run.steps=1 eval.k=2 data.max_prompt_length=256"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "NICEGUI", "MAKE"))}
    return subprocess.Popen(
        ["make", "demo", f"VENV={folder / 'venv'}", f"RUNS={folder / 'runs'}", f"ARGS={values}", *options],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def test_the_demo_ends_with_how_to_look_at_the_run(tmp_path: Path):
    output, _ = demo(tmp_path).communicate(timeout=300)
    assert re.search(rf"the run is in {tmp_path}/runs/guess_five-\d+-\d+\n", output), output
    last = f" dapo view {tmp_path}/runs shows it in the browser, at http://127.0.0.1:8080/"
    assert output.splitlines()[-1].endswith(last)


@pytest.mark.timeout(400)
def test_the_demo_with_the_page_shows_the_run_and_leaves_the_page_open_until_interrupted(tmp_path: Path):
    pytest.importorskip("nicegui", reason="the page needs dapo[view]")
    process = demo(tmp_path, "VIEW=1", "PORT=0")
    try:
        seen = ""
        while "The page stays open until Ctrl-C." not in seen:
            line = process.stdout.readline()
            assert line, seen
            seen += line
        place = re.search(r"shown at http://([\d.:]+)/", seen)
        assert place, seen
        (run,) = (path.name for path in (tmp_path / "runs").iterdir())
        connection = http.client.HTTPConnection(place[1], timeout=30)
        connection.request("GET", f"/run/{run}/curves")
        assert connection.getresponse().status == 200
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while is_open(place[1]):
        assert time.monotonic() < deadline, "the page is still there"
        time.sleep(0.2)


def is_open(place: str) -> bool:
    try:
        http.client.HTTPConnection(place, timeout=5).connect()
    except OSError:
        return False
    return True
