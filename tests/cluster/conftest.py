"""Fixtures for cluster tests: one PyTorch thread, and a Ray cluster of three nodes on this machine."""

from __future__ import annotations

import os

import pytest
import torch

# Must be set before Ray is first imported. The first keeps all of Ray on the loopback interface.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # by default Ray's workers run at a lower priority


@pytest.fixture(autouse=True)
def one_thread():
    """Run the test process on one thread, as Ray runs its actors: the number of threads changes how sums round."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def ray_nodes():
    """A head with one CPU and two nodes with two CPUs each. A test that removes a node must add one again."""
    from ray.cluster_utils import Cluster

    store = {"object_store_memory": 2 << 30}  # an upper limit: memory is taken only as it is used
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False} | store)
    for _ in range(2):
        nodes.add_node(num_cpus=2, **store)
    yield nodes
    nodes.shutdown()


@pytest.fixture
def cluster(ray_nodes):
    """The three nodes, as soon as Ray has noticed the death of one that an earlier test removed."""
    ray_nodes.wait_for_nodes(timeout=120)
    return ray_nodes


@pytest.fixture
def driver(cluster, monkeypatch):
    """Connect this process to the cluster as its driver for the duration of the test."""
    import ray

    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
