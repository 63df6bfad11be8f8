"""Joining a cluster: a wrong address is refused within seconds, and a local start stays on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

from dapo.cluster.ray_connection import check_address, check_room, check_run_dir, join, needs_ray
from dapo.errors import ClusterError, DapoError
from dapo.evaluation.compare import evaluate_models
from tests import runs
from tests.tiny import save_tiny

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")

ROOT = Path(__file__).parent.parent.parent


def train(tmp_path: Path, address: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run `dapo train` with RAY_ADDRESS and no other variable of Ray."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run(
        [sys.executable, "-m", "dapo", "train", str(runs.recipe(tmp_path)), *overrides],
        cwd=ROOT, env=environment | {"RAY_ADDRESS": address}, capture_output=True, text=True,
    )  # fmt: skip


def test_an_address_where_nothing_answers_is_refused_within_seconds():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(ClusterError, match=f"RAY_ADDRESS is {address}, but nothing answers there"):
            check_address(address)
        assert time.monotonic() - began < 10


def test_a_service_that_is_not_a_head_is_refused_within_seconds_without_output_of_ray(capfd):
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address, began = f"127.0.0.1:{server.server_port}", time.monotonic()
    with pytest.raises(ClusterError, match=f"RAY_ADDRESS is {address}, but the service there is not the head of a"):
        check_address(address)
    server.shutdown()
    assert time.monotonic() - began < 25  # Ray itself takes 53 s on an idle machine
    assert "rpc_client" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("address", "expected"),
    [("ray://head:10001", "ray job submit"), ("nonsense", "expected HOST:PORT"), ("head:", "expected HOST:PORT")],
)
def test_an_address_of_the_wrong_kind_is_refused(address, expected):
    with pytest.raises(ClusterError, match=expected):
        check_address(address)


def test_a_head_that_listens_on_loopback_only_is_joined(tmp_path, cluster):
    """The driver reports the cluster's size, which it knows only after joining."""
    done = train(tmp_path, cluster.address, "cluster.rollout_workers=7")
    assert (done.returncode, "there are 5 CPUs on 3 nodes" in done.stderr) == (2, True), done.stderr


def test_missing_ray_is_reported(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match=r"need Ray: pip install -e '.*\[ray\]'"):
        join()


def test_ray_is_used_only_if_a_process_must_be_placed(tmp_path, monkeypatch):
    assert not needs_ray(runs.load(tmp_path))
    assert needs_ray(runs.load(tmp_path, "cluster.rollout_workers=1"))
    assert needs_ray(runs.load(tmp_path, "cluster.learners=2"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert not needs_ray(runs.load(tmp_path, "cluster.learners=2"))
    with pytest.raises(ClusterError, match="start the run without torchrun"):
        needs_ray(runs.load(tmp_path, "cluster.rollout_workers=1"))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["cluster.rollout_workers=4000"], r"need 4001 CPUs, each process on one node, but there are \d+ CPU"),
        (["cluster.rollout_workers=1", "model.device=cuda:1"], r"model\.device is cuda:1, but Ray assigns GPUs"),
        (["cluster.learners=2", "model.device=cuda", "cluster.rollout_workers=400"], "402 GPUs"),
    ],
)  # fmt: skip
def test_a_run_too_large_for_this_machine_is_refused_before_ray_is_started(tmp_path, monkeypatch, overrides, sentence):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with pytest.raises(ClusterError, match=sentence):
        check_room(runs.load(tmp_path, *overrides))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_room(runs.load(tmp_path, *overrides))  # the size of a remote cluster is not known yet


def test_a_run_that_is_too_large_exits_with_code_2_one_sentence_and_no_files(tmp_path):
    done = train(tmp_path, "", "cluster.rollout_workers=4000")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: cluster.learners = 1 and cluster.rollout_workers = 4000 need 4001 CPUs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_missing_vllm_is_reported_before_ray_is_started(tmp_path, cluster):
    done = train(tmp_path, cluster.address, "rollout.engine=vllm", "cluster.rollout_workers=1")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: rollout.engine is vllm, but vLLM is not installed: pip install -e '")
    assert "Joining" not in done.stderr


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_a_model_unknown_to_vllm_is_reported_before_ray_is_started(tmp_path, monkeypatch):
    from dapo.cluster.assemble import assemble

    config = runs.load(tmp_path, "rollout.engine=vllm", "cluster.rollout_workers=1")
    file = tmp_path / "model" / "config.json"
    file.write_text(file.read_text().replace("LlamaForCausalLM", "ZebraForCausalLM"))
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr("dapo.cluster.assemble.join", lambda: pytest.fail("Ray was started"))
    with pytest.raises(DapoError, match="vLLM cannot run this model"):
        assemble(config)


def test_a_run_directory_in_a_jobs_copy_of_the_working_directory_is_refused(tmp_path, monkeypatch):
    copy = tmp_path / "_ray_pkg_0123456789abcdef"
    copy.mkdir()
    monkeypatch.chdir(copy)
    check_run_dir(runs.load(tmp_path))  # an absolute path
    with pytest.raises(ClusterError, match=r"run\.dir is runs, in a copy of the working directory that Ray deletes"):
        check_run_dir(runs.load(tmp_path, "run.dir=runs"))
    with pytest.raises(ClusterError, match=r"--out is runs/.*, in a copy of the working directory"):
        evaluate_models([str(save_tiny(tmp_path / "model"))], data="d")


def test_a_local_start_listens_on_loopback_only():
    """Every listening socket of the process and its children is on loopback."""
    program = (
        "import os, psutil\nos.environ.pop('RAY_ADDRESS', None)\nfrom dapo.cluster.ray_connection import join\njoin()\n"
        "for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:\n"
        "    for c in process.net_connections('inet'):\n"
        "        if c.status == 'LISTEN': print(c.laddr.ip)\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert done.stdout


def test_ray_prints_nothing_about_a_killed_worker(cluster):
    """Ray's own long message would interrupt the run's output, which reports the loss in one line."""
    program = (
        "from dapo.cluster.ray_connection import join\njoin()\nimport os, ray, time\n"
        "@ray.remote(max_restarts=0)\nclass Worker:\n"
        "    def pid(self): return os.getpid()\n    def wait(self): time.sleep(60)\n"
        "worker = Worker.remote()\npid = ray.get(worker.pid.remote())\ncall = worker.wait.remote()\n"
        "time.sleep(0.5)\nos.kill(pid, 9)\n"
        "try: ray.get(call)\nexcept ray.exceptions.RayActorError: print('died')\ntime.sleep(3)\n"
    )
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "died\n"), done.stderr
    assert "worker died" not in done.stderr
