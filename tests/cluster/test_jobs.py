"""`ray job submit`: a run with its own reward file, on a head that requires a token and has a dashboard."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from dapo.cluster.ray_connection import check_address
from dapo.errors import ClusterError
from dapo.store.database import RunDatabase
from tests import runs

pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
pytestmark = pytest.mark.skipif(
    find_spec("aiohttp_cors") is None, reason="Ray's dashboard is not installed: pip install 'ray[default]'"
)

RAY = (sys.executable, "-m", "ray.scripts.scripts")


@pytest.fixture(scope="module")
def head():
    """Start a head on loopback; yield its address, its dashboard's address, and an environment with the token."""
    gcs, dashboard, agent, client = free_ports(4)
    ports = ["--port", gcs, "--dashboard-port", dashboard, "--dashboard-agent-listen-port", agent]
    only_here = ["--node-ip-address", "127.0.0.1", "--dashboard-host", "127.0.0.1", "--ray-client-server-port", client]
    size = ["--num-cpus", "2", "--object-store-memory", str(1 << 29), "--disable-usage-stats"]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = own | token | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [*RAY, "start", "--head", "--block", *ports, *only_here, *size]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(int(dashboard), process)
            yield f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}", environment
        finally:
            process.terminate()


def free_ports(count: int) -> list[str]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 90
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    pytest.fail("the head did not start")


def submit(head, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    _, dashboard, environment = head
    command = [*RAY, "job", "submit", "--address", dashboard, "--working-dir", ".", "--"]
    return subprocess.run(
        [*command, "dapo", "train", "recipe.yaml", "cluster.rollout_workers=1", *overrides],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A working directory with recipe, data, reward and model, all named by relative paths."""
    work = tmp_path / "work"
    recipe = runs.recipe(work, run={"steps": 2, "dir": "runs"})
    recipe.write_text(recipe.read_text(encoding="utf-8").replace(f"{work}/", ""), encoding="utf-8")
    return work


def test_a_submitted_run_finds_its_reward_file_and_writes_to_its_run_dir(head, folder, tmp_path):
    kept = tmp_path / "kept"
    done = submit(head, folder, f"run.dir={kept}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"2 steps, \d+ s of training; the run is in {kept}/recipe", done.stdout)
    with RunDatabase.open_readonly(kept / "recipe" / "run.db") as database:
        assert [step["step"] for step in database.steps()] == [1, 2]
    assert not (folder / "runs").exists()


def test_a_submitted_run_that_is_refused_fails_the_job_with_its_message(head, folder):
    done = submit(head, folder)
    assert done.returncode == 1
    assert "error: run.dir is runs, in a copy of the working directory that Ray deletes after the job" in done.stdout
    assert "exit code 2" in done.stdout + done.stderr


def test_a_missing_token_is_reported_within_seconds(head, monkeypatch):
    address, _, environment = head
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ClusterError, match="this cluster requires a token, which is missing or wrong"):
        check_address(address)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, environment[name])
    check_address(address)
