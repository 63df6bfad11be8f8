"""The contract tests of all engines, run on an engine over two Ray workers."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from dapo.config import ModelConfig
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.model.loading import load_model
from dapo.types import Extension, SamplingParams
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
def connected(ray_nodes):
    ray.init(address=ray_nodes.address, log_to_driver=False, logging_level="ERROR")
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


@pytest.mark.parametrize("moment", ["parked", "extended"])
def test_episodes_of_a_lost_worker_go_on_elsewhere_from_what_is_fixed(connected, tmp_path, moment):
    from dapo.cluster.rollout_worker import RolloutWorker
    from dapo.engine.packed import packed

    directory, model = tiny_pair(tmp_path)
    requests = episodes(4, 3, SamplingParams(max_tokens=10), seed=29)  # noqa: F405
    alone = EmbeddedEngine(model, tiny_tokenizer(), STOP, SEED, MAX_CONCURRENT, max_length=MAX_LENGTH)
    expected, seen = play(Subject(alone, model), requests, turns=2)  # noqa: F405
    actors = []

    def start(slot):
        actors.append(ray.remote(RolloutWorker).options(num_cpus=0).remote(partial(build, str(directory))))
        return actors[-1]

    rules = supervisor.Rules(supervisor.Restarts(1), 300.0)
    weights = packed(model.state_dict().items())
    engine = remote.RemoteEngine(start, 2, lambda: ray.put(weights), rules, limit=64)
    try:
        engine.submit(requests)
        first = by_key(rest(engine))  # noqa: F405
        assert all(np.array_equal(first[key].tokens, turns[0].tokens) for key, turns in seen.items())
        if moment == "parked":
            ray.kill(actors[0])
        engine.extend([Extension(requests[key[0]], first[key], (6, 7, 9), 200) for key in first])
        if moment == "extended":
            ray.kill(actors[0])
        second = by_key(rest(engine))  # noqa: F405
        assert len(actors) == 3
        assert all(np.array_equal(second[key].tokens, expected[key].tokens) for key in expected)
        engine.end(second)
        assert not engine.homes and engine.poll() == []
    finally:
        engine.close()
