"""Whole runs with an endpoint as judge: Ctrl-C ends a run whose judge hangs, and the token is never written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dapo.checkpoint.export import export_run
from dapo.store.database import RunDatabase
from dapo.view.report import write_report
from tests import runs
from tests.rewards.test_endpoint import raw_server, server

ROOT = Path(__file__).parents[2]
TOKEN = "tok-8d1f7a02c9"


def dapo(*arguments, **variables):
    return subprocess.Popen(
        [sys.executable, "-m", "dapo", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "no_proxy": "127.0.0.1", **variables},
    )


def test_a_second_ctrl_c_ends_a_run_whose_judges_hang(tmp_path):
    asked = threading.Event()

    def hang(connection, stop):
        connection.recv(2**16)
        asked.set()
        stop.wait()

    recipe = runs.recipe(tmp_path, reward="import time\ndef reward(completion):\n    time.sleep(1000)\n")
    with raw_server(hang) as address:
        use = f"{{http://{address}/: 1.0, {tmp_path}/reward.py:reward: 1.0}}"
        run = dapo("train", recipe, f"reward.use={use}", "reward.timeout=1000", "reward.workers=1")
        try:
            assert asked.wait(120)
            run.send_signal(signal.SIGINT)
            output = []
            for line in run.stdout:  # wait for the first one to be handled: the kernel merges two pending signals
                output.append(line)
                if "stopping after this step" in line:
                    break
            time.sleep(1)  # a second one is ignored until the line above is written whole
            run.send_signal(signal.SIGINT)
            output.append(run.communicate(timeout=60)[0])
        finally:
            with suppress(ProcessLookupError):
                run.kill()
    assert run.returncode == 130
    assert "Traceback" not in "".join(output)
    assert "Exception" not in "".join(output)


@pytest.mark.slow
def test_the_endpoint_token_is_in_no_file_that_a_run_writes(tmp_path):
    def answer(handler, number):
        """Echo the token everywhere: in scores, in reasons, and in an answer that is not HTTP."""
        token = handler.headers["Authorization"]
        if token != f"Bearer {TOKEN}":
            return 401, {}
        if number % 5 == 2:
            handler.connection.sendall(f"HTTP/1.1 {token}\r\n\r\n".encode())
            handler.connection.shutdown(2)
            return None
        scores = [{"score": number % 3 + i, "acc": i % 2, "seen": token} for i in range(3)]
        return 200, {"scores": [*scores, {token: 1}]}

    recipe = runs.recipe(tmp_path, run={"steps": 2, "trackers": ["tensorboard"]}, eval={"k": 4, "every": 1})
    with server(answer) as (url, requests):
        run = dapo("train", recipe, f"reward.use={url}", "reward.timeout=20", DAPO_REWARD_TOKEN=TOKEN)
        output, _ = run.communicate(timeout=240)
    assert run.returncode == 0, output
    assert len(requests) > 10
    run_dir = tmp_path / "runs" / "recipe"
    with RunDatabase.open_readonly(run_dir / "run.db") as database:
        recorded = "".join(map(str, database.events()))
    assert "could not be judged" in recorded
    write_report(run_dir, tmp_path / "report.html")
    export_run(run_dir, tmp_path / "exported", None, adapters=False)
    assert url in (tmp_path / "exported" / "README.md").read_text()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.db", "config.yaml", "report.html", "README.md"} <= {path.name for path in files}
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []
    assert any(b"Bearer [DAPO_REWARD_TOKEN]" in path.read_bytes() for path in files)  # it was echoed, and is masked
    assert TOKEN not in output
