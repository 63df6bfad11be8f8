"""Placement: resources per process, and one sentence about a cluster that is too small or busy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dapo.cluster.placement import Demand, Placement, room, wants_gpus
from dapo.errors import ClusterError
from tests import runs

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")

ROOT = Path(__file__).parent.parent.parent


def sentence(tmp_path: Path, address: str, *overrides: str) -> str:
    """Run `dapo train`, which must exit with code 2 and write nothing. Return its error message."""
    recipe = runs.recipe(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "dapo", "train", str(recipe), *overrides],
        cwd=ROOT, env=os.environ | {"RAY_ADDRESS": address}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
    return next(line for line in done.stderr.splitlines() if line.startswith("error: ")).removeprefix("error: ")


def test_too_few_cpus_are_refused_with_what_is_needed_and_available(tmp_path, cluster):
    said = sentence(tmp_path, cluster.address, "cluster.rollout_workers=7")
    assert said == (
        "cluster.learners = 1 and cluster.rollout_workers = 7 need 8 CPUs, each process on one node, but there are "
        "5 CPUs on 3 nodes, the largest with 2 CPUs"
    )
    said = sentence(tmp_path, cluster.address, "cluster.rollout_workers={embedded: 2}", "cluster.reward_workers=3")
    assert said.startswith(
        "cluster.learners = 1, cluster.rollout_workers = 2 and cluster.reward_workers = 3 need 6 CPUs, each process"
    )


@pytest.mark.parametrize(
    ("nodes", "fits"),
    [
        ([{"CPU": 8.0, "GPU": 8.0}], True),
        ([{"CPU": 8.0, "GPU": 5.0}, {"CPU": 8.0, "GPU": 1.0}], True),  # the worker with four GPUs goes first
        ([{"CPU": 8.0, "GPU": 3.0}, {"CPU": 8.0, "GPU": 3.0}], False),  # six in all, but no four on one node
        ([{"CPU": 2.0, "GPU": 8.0}], False),
        ([{"CPU": 8.0}], False),
    ],
)
def test_every_process_must_fit_on_one_node(nodes, fits):
    demand = Demand((room(gpus=1),) * 2, (room(gpus=4),))
    if fits:
        demand.check(nodes)
    else:
        with pytest.raises(ClusterError, match="need 3 CPUs and 6 GPUs"):
            demand.check(nodes)


def test_without_rollout_workers_an_engine_shares_each_learners_bundle():
    demand = Demand((room(gpus=1),) * 2)
    assert demand.bundles == [{"CPU": 1.0, "GPU": 1.0}] * 2
    assert [demand.engine(slot) for slot in range(demand.engines)] == [demand.learner(rank) for rank in range(2)]
    assert demand.engine(1) == (1, {"CPU": 0.5, "GPU": 0.5})


def test_each_process_gets_resources_by_what_it_runs(tmp_path):
    rollout = {"n": 4, "tensor_parallel": 4}
    workers = ["cluster.rollout_workers={vllm: 1, embedded: 2}", "cluster.reward_workers=1", "reward.workers=3"]
    config = runs.load(tmp_path, *workers, rollout=rollout)
    demand = Demand.of(config, on_gpu=True)
    assert demand == Demand((room(gpus=1),), (room(gpus=4), room(gpus=1), room(gpus=1)), (room(3),))
    assert demand.engine(0) == (1, {"CPU": 1.0, "GPU": 4.0})
    assert demand.judge(0) == (4, {"CPU": 3.0})
    assert Demand.of(config, on_gpu=False) == Demand((room(),), (room(),) * 3, (room(3),))


@pytest.mark.parametrize(("device", "gpus"), [("auto", 1), ("cuda", 1), ("cpu", 0)])
def test_a_placed_reward_model_gets_a_gpu_if_learners_have_gpus(tmp_path, device, gpus):
    options = ["cluster.reward_workers=2", "reward.use={model:some/judge: 1.0}", f"reward.model.device={device}"]
    assert Demand.of(runs.load(tmp_path, *options), on_gpu=True).reward_workers == (room(gpus=gpus),) * 2


def test_a_placed_reward_model_may_not_name_a_gpu_by_number(tmp_path):
    options = ["reward.use=model:some/judge", "reward.model.device=cuda:1"]
    with pytest.raises(ClusterError, match=r"reward\.model\.device is cuda:1, but Ray assigns GPUs"):
        Demand.of(runs.load(tmp_path, *options, "cluster.reward_workers=1"), on_gpu=True)
    Demand.of(runs.load(tmp_path, *options), on_gpu=True)  # allowed for a judge that Ray does not place


def test_a_relative_model_path_is_made_absolute_for_actors(tmp_path, monkeypatch):
    from dapo.cluster.ray_parts import with_absolute_path

    config = runs.load(tmp_path, "model.path=model")
    monkeypatch.chdir(tmp_path)
    assert with_absolute_path(config).model.path == str(tmp_path / "model")
    hub = runs.load(tmp_path, "model.path=someone/some-model")
    assert with_absolute_path(hub).model.path == "someone/some-model"


def test_a_gpu_by_number_is_refused_on_a_cluster(tmp_path, driver):
    with pytest.raises(ClusterError, match=r"model\.device is cuda:1, but Ray assigns GPUs"):
        wants_gpus(runs.load(tmp_path, "model.device=cuda:1"))
    assert not wants_gpus(runs.load(tmp_path, "model.device=auto"))


def test_a_busy_cluster_is_refused_after_the_timeout(driver):
    others = ray.util.placement_group([{"CPU": 2.0}] * 2)
    assert others.wait(30)
    with pytest.raises(ClusterError, match=r"large enough but busy: 2 CPUs did not become free within 1 s"):
        Placement(Demand((room(),), (room(),)), timeout=1.0)
    ray.util.remove_placement_group(others)


def test_resources_lost_with_a_node_are_reported_until_they_return(driver):
    extra = driver.add_node(num_cpus=3)
    demand = Demand((room(),) * 4, (room(),) * 3, (room(),))
    placement = Placement(demand, timeout=30.0)
    everyone = [*map(demand.learner, range(4)), *map(demand.engine, range(3)), demand.judge(0)]
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
