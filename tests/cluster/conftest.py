"""Ray's own multi-node cluster on this machine: three nodes, of which each is a set of processes."""

from __future__ import annotations

import os

import pytest

# Before Ray is first imported: all of it stays on this machine's loopback.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # else its processes stand behind all others


@pytest.fixture(scope="session")
def cluster():
    """A head with one CPU, and two nodes with two each; whoever removes one adds another."""
    from ray.cluster_utils import Cluster

    store = {"object_store_memory": 2 << 30}  # of which only what is used is taken
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False} | store)
    for _ in range(2):
        nodes.add_node(num_cpus=2, **store)
    yield nodes
    nodes.shutdown()


@pytest.fixture
def driver(cluster, monkeypatch):
    """This process as a driver of that cluster, until the test ends."""
    import ray

    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
