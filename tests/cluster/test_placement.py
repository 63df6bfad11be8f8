"""What is wrong with a cluster is said in one sentence, before anything is started."""

from __future__ import annotations

import builtins
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dapo.cluster.joining import check_address, join, needs_ray
from dapo.cluster.placement import Demand, Placement, wants_gpus
from dapo.errors import ClusterError
from tests import runs

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")

ROOT = Path(__file__).parent.parent.parent


def sentence(tmp_path: Path, address: str, *overrides: str) -> str:
    """What `dapo train` says; it ends with code 2, and leaves nothing behind."""
    recipe = runs.recipe(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "dapo", "train", str(recipe), *overrides],
        cwd=ROOT, env=os.environ | {"RAY_ADDRESS": address}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
    return next(line for line in done.stderr.splitlines() if line.startswith("error: ")).removeprefix("error: ")


def test_too_few_cpus_are_refused_with_what_is_there_and_what_is_needed(tmp_path, cluster):
    said = sentence(tmp_path, cluster.address, "cluster.rollout_workers=7")
    assert said == (
        "cluster.learners = 1 and cluster.rollout_workers = 7 need 8 CPUs, each process on one node, but Ray has "
        "5 CPUs on 3 nodes, the largest with 2 CPUs"
    )


def test_an_address_where_nothing_answers_is_refused_within_seconds(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(ClusterError, match=f"RAY_ADDRESS is {address}, but nothing answers there"):
            check_address(address)
        assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("address", "expected"),
    [("ray://head:10001", "ray job submit"), ("nonsense", "expected HOST:PORT"), ("head:", "expected HOST:PORT")],
)
def test_an_address_of_the_wrong_kind_is_refused(address, expected):
    with pytest.raises(ClusterError, match=expected):
        check_address(address)


def test_ray_that_is_not_installed_is_named(monkeypatch):
    real = builtins.__import__

    def without_ray(name, *args, **kwargs):
        if name == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        return real(name, *args, **kwargs)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(ClusterError, match="need Ray: pip install ray"):
        join()


@pytest.mark.parametrize(
    ("nodes", "fits"),
    [
        ([{"CPU": 8.0, "GPU": 8.0}], True),
        ([{"CPU": 8.0, "GPU": 5.0}, {"CPU": 8.0, "GPU": 1.0}], True),  # the worker of four GPUs goes where they are
        ([{"CPU": 8.0, "GPU": 3.0}, {"CPU": 8.0, "GPU": 3.0}], False),  # six, but no four on one node
        ([{"CPU": 2.0, "GPU": 8.0}], False),
        ([{"CPU": 8.0}], False),
    ],
)
def test_every_process_must_fit_on_one_node(nodes, fits):
    demand = Demand(learners=2, rollout_workers=1, gpus=4)
    if fits:
        demand.check(nodes)
    else:
        with pytest.raises(ClusterError, match="need 3 CPUs and 6 GPUs"):
            demand.check(nodes)


def test_without_rollout_workers_an_engine_shares_each_learners_bundle():
    demand = Demand(learners=2, rollout_workers=0, gpus=1)
    assert demand.bundles == [{"CPU": 1.0, "GPU": 1.0}] * 2
    assert [demand.engine(slot) for slot in range(demand.engines)] == [demand.learner(rank) for rank in range(2)]
    assert demand.engine(1) == (1, {"CPU": 0.5, "GPU": 0.5})


def test_ray_is_used_only_where_something_is_to_be_placed(tmp_path, monkeypatch):
    assert not needs_ray(runs.load(tmp_path))
    assert needs_ray(runs.load(tmp_path, "cluster.rollout_workers=1"))
    assert needs_ray(runs.load(tmp_path, "cluster.learners=2"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert not needs_ray(runs.load(tmp_path, "cluster.learners=2"))
    with pytest.raises(ClusterError, match="start the run without torchrun"):
        needs_ray(runs.load(tmp_path, "cluster.rollout_workers=1"))


def test_a_model_in_a_relative_folder_is_found_by_processes_that_work_elsewhere(tmp_path, monkeypatch):
    from dapo.cluster.place import with_absolute_path

    config = runs.load(tmp_path, "model.path=model")
    monkeypatch.chdir(tmp_path)
    assert with_absolute_path(config).model.path == str(tmp_path / "model")
    hub = runs.load(tmp_path, "model.path=someone/some-model")
    assert with_absolute_path(hub).model.path == "someone/some-model"


def test_a_single_gpu_by_its_number_is_refused_on_a_cluster(tmp_path, driver):
    with pytest.raises(ClusterError, match=r"model\.device is cuda:1, but Ray chooses"):
        wants_gpus(runs.load(tmp_path, "model.device=cuda:1"))
    assert not wants_gpus(runs.load(tmp_path, "model.device=auto"))


def test_room_that_others_use_is_waited_for_and_then_named(driver):
    others = ray.util.placement_group([{"CPU": 2.0}] * 2)
    assert others.wait(30)
    with pytest.raises(ClusterError, match=r"others use it: no room for 2 CPUs within 1 s"):
        Placement(Demand(1, 1, 0), timeout=1.0)
    ray.util.remove_placement_group(others)


def test_what_left_with_a_node_is_named_until_it_is_back(driver):
    extra = driver.add_node(num_cpus=3)
    demand = Demand(4, 4, 0)
    placement = Placement(demand, timeout=30.0)
    everyone = [*map(demand.learner, range(4)), *map(demand.engine, range(4))]
    assert placement.missing(everyone) is None
    driver.remove_node(extra)
    deadline = time.monotonic() + 60
    while placement.missing(everyone) is None and time.monotonic() < deadline:
        time.sleep(0.2)
    assert placement.missing(everyone) == "3 CPUs that left the cluster"
    parts = [placement.missing([place]) for place in everyone]
    assert parts.count("1 CPU that left the cluster") == 3
    assert parts.count(None) == 5
    again = driver.add_node(num_cpus=3)
    assert placement.group.wait(30)
    assert placement.missing(everyone) is None
    placement.remove()
    driver.remove_node(again)


def test_a_local_start_listens_on_loopback_alone():
    """What this machine has started and listens with, beyond 127.0.0.1, is nothing of Ray's."""
    program = (
        "import os, psutil\nos.environ.pop('RAY_ADDRESS', None)\nfrom dapo.cluster.joining import join\njoin()\n"
        "for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:\n"
        "    for c in process.net_connections('inet'):\n"
        "        if c.status == 'LISTEN': print(c.laddr.ip)\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert done.stdout
