"""The contract tests of all engines, run on an engine over two Ray workers."""

from __future__ import annotations

from functools import partial

import pytest

from dapo.config import ModelConfig
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.model.loading import load_model
from tests.engine.conftest import MAX_CONCURRENT, MAX_LENGTH, SEED, STOP, Subject, tiny_pair
from tests.engine.test_contract import *  # noqa: F403
from tests.tiny import tiny_tokenizer

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
remote = pytest.importorskip("dapo.cluster.remote_engine")
supervisor = pytest.importorskip("dapo.cluster.supervisor")


def build(directory, weights):
    """Build the engine inside a worker."""
    from dapo.engine.build import Follower
    from dapo.engine.packed import unpacked

    model = load_model(ModelConfig(path=directory, device="cpu")).model
    engine = EmbeddedEngine(model, tiny_tokenizer(), STOP, SEED, MAX_CONCURRENT, max_length=MAX_LENGTH)
    return Follower(engine, model, lambda: unpacked(weights()))


@pytest.fixture(scope="module")
def connected(cluster):
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def subject(connected, tmp_path_factory):
    from dapo.cluster.rollout_worker import RolloutWorker
    from dapo.engine.packed import packed

    directory, model = tiny_pair(tmp_path_factory.mktemp("placed"))
    engine = remote.RemoteEngine(
        lambda slot: ray.remote(RolloutWorker).options(num_cpus=1).remote(partial(build, str(directory))),
        2,
        lambda: ray.put(packed(model.state_dict().items())),
        supervisor.Rules(supervisor.Restarts(0), 300.0),
        limit=2 * MAX_CONCURRENT,
    )
    yield Subject(engine, model)
    engine.close()
