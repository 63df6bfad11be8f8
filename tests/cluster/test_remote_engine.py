"""The engine over Ray actors: no response is lost or doubled when actors die, and no call waits forever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from functools import partial

import pytest

from benchmarks.controller import SimulatedEngine, length_of
from dapo.cluster.rollout_worker import RolloutWorker
from dapo.errors import ClusterLost, EngineError, LearnerLost, ModelError
from dapo.types import Request, SamplingParams

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
RemoteEngine = pytest.importorskip("dapo.cluster.remote_engine").RemoteEngine
supervisor = pytest.importorskip("dapo.cluster.supervisor")
Restarts, Rules = supervisor.Restarts, supervisor.Rules

RATE = 400.0  # tokens per second
PARAMS = SamplingParams(max_tokens=100)


def simulated(rate, weights):
    return SimulatedEngine(rate)


class Watched:
    """An engine over simulated workers, with its events and actors."""

    def __init__(self, count=2, rate=RATE, build=None, limit=16, restarts=3, broadcast=None):
        self.events = []
        self.actors = []
        self.build = build or partial(simulated, rate)
        rules = Rules(Restarts(restarts), 600.0, on_event=lambda kind, message: self.events.append((kind, message)))
        self.engine = RemoteEngine(self.start, count, lambda: ray.put({}), rules, limit=limit, broadcast=broadcast)

    def start(self, slot):
        if len(self.actors) > slot:
            self.engine.timeout = 600.0  # a replacement gets time to start
        self.actors.append(ray.remote(RolloutWorker).options(num_cpus=0).remote(self.build))
        return self.actors[-1]

    def kill(self, slot, number=signal.SIGKILL):
        os.kill(ray.get(self.actors[slot].__ray_call__.remote(lambda self: os.getpid())), number)


@pytest.fixture
def watched(driver):
    made = []

    def make(*args, **options):
        made.append(Watched(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


def requests(count, n=4, start=0):
    return [Request(serial, (1, 2, 3), n, PARAMS) for serial in range(start, start + count)]


def drain(engine):
    found = []
    while rollouts := engine.poll():
        found += rollouts
    return found


def assert_each_once(rollouts, count, n=4, start=0):
    found = Counter((rollout.serial, rollout.index) for rollout in rollouts)
    assert found == {(serial, index): 1 for serial in range(start, start + count) for index in range(n)}


def test_every_response_of_every_group_arrives_once_also_in_bursts(watched):
    engine = watched().engine
    engine.submit(requests(20))
    first = engine.poll()
    engine.submit(requests(10, start=20))
    rollouts = [*first, *drain(engine)]
    assert_each_once(rollouts, 30)
    assert all(len(rollout) == length_of(rollout.serial, rollout.index, 100) for rollout in rollouts)
    assert engine.poll() == []


def test_a_worker_gets_at_most_its_limit_and_other_groups_wait(watched):
    one = watched(limit=8)
    one.engine.submit(requests(10))
    with one.engine.changed:
        assert [worker.load for worker in one.engine.workers] == [8, 8]
        assert [group.request.serial for group in one.engine.queue] == [4, 5, 6, 7, 8, 9]
    assert_each_once(drain(one.engine), 10)


def test_groups_of_a_worker_killed_while_sampling_arrive_once_and_an_event_reports_it(watched):
    one = watched()
    one.engine.submit(requests(12))
    found = one.engine.poll()
    one.kill(0)
    found += drain(one.engine)
    assert_each_once(found, 12)
    ((kind, message),) = one.events
    assert kind == "worker"
    assert message.startswith("rollout worker 0 died: its worker process has died; replaced, ")
    assert len(one.actors) == 3


class Ending(SimulatedEngine):
    """Fails once, in its first `poll`."""

    def __init__(self, marker, weights):
        super().__init__(RATE)
        self.marker = marker

    def poll(self):
        if not self.marker.exists():
            self.marker.touch()
            raise EngineError("the engine has ended; resume with --resume")
        return super().poll()


def test_an_engine_that_fails_inside_a_worker_is_replaced_and_its_advice_left_out(watched, tmp_path):
    one = watched(1, build=partial(Ending, tmp_path / "ended"))
    one.engine.submit(requests(4))
    assert_each_once(drain(one.engine), 4)
    message = "rollout worker 0 failed: the engine has ended; replaced, 4 groups are sampled again"
    assert one.events == [("worker", message)]


def test_a_worker_that_stops_answering_is_replaced(watched):
    one = watched()
    one.kill(1, signal.SIGSTOP)
    one.engine.timeout = 2.0
    one.engine.submit(requests(4))
    assert_each_once(drain(one.engine), 4)
    assert "rollout worker 1 did not answer for 2 s" in one.events[0][1]


def test_more_losses_than_max_restarts_stop_with_one_sentence(watched):
    one = watched(restarts=0)
    one.engine.submit(requests(4))
    one.kill(0)
    with pytest.raises(
        ClusterLost, match=r"rollout worker 0 died.*more processes than cluster\.max_restarts = 0 allows$"
    ):
        drain(one.engine)


def test_new_weights_reach_every_worker_before_it_samples_again_also_a_replaced_one(watched):
    one = watched()
    one.engine.sync_weights(1)
    one.engine.submit(requests(4))
    assert {rollout.weight_version for rollout in drain(one.engine)} == {1}
    one.engine.sync_weights(2)
    one.kill(0)
    one.engine.submit(requests(4))
    assert {rollout.weight_version for rollout in drain(one.engine)} == {2}


class Stamped(SimulatedEngine):
    """Gives responses the number that comes with the weights, in place of their version."""

    def __init__(self, weights):
        super().__init__(100.0)
        self.weights = weights

    def sync_weights(self, version):
        self.version = self.weights()["number"]


@pytest.mark.parametrize("version", [5, 7])
def test_weights_that_go_back_reach_a_worker_with_groups_in_flight(watched, version):
    """A run that returned to a checkpoint can also reach the worker's version again before the worker is called."""
    engine = watched(1, build=Stamped).engine
    engine.weights = lambda: ray.put({"number": 70})
    engine.sync_weights(7)
    engine.submit(requests(4))
    assert {rollout.weight_version for rollout in engine.poll()} == {70}
    engine.weights = lambda: ray.put({"number": 50})
    engine.sync_weights(version)
    assert drain(engine)[-1].weight_version == 50


def test_workers_keep_sampling_while_the_caller_is_busy(watched):
    engine = watched(limit=8).engine
    engine.submit(requests(8))  # twice the limit of the two workers
    deadline = time.monotonic() + 30
    while engine.queue or any(worker.groups for worker in engine.workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert_each_once(engine.poll(), 8)


def test_canceled_groups_do_not_arrive_and_their_tokens_are_counted(watched):
    engine = watched(rate=100.0).engine
    engine.submit(requests(6))
    seen = engine.poll()
    canceled = engine.cancel([0, 1, 5])
    rollouts = seen + drain(engine)
    assert {rollout.serial for rollout in rollouts if rollout not in seen} == {2, 3, 4}
    assert canceled > 0
    assert_each_once([rollout for rollout in rollouts if rollout.serial in (2, 3, 4)], 3, start=2)


class Timed(SimulatedEngine):
    def __init__(self, weights):
        super().__init__(RATE)

    def metrics(self):
        return super().metrics() | {"engine/sync_s": 2.0}


def test_counts_are_summed_over_workers_and_shares_and_seconds_are_means(watched):
    expected = {"engine/decode_steps": 3.0, "engine/batch_occupancy": 0.5, "engine/sync_s": 2.0}
    assert watched(3, build=Timed).engine.metrics() == expected


def refused(weights):
    raise ModelError("no such model")


def test_a_users_mistake_in_a_worker_is_raised_as_it_is_and_not_counted_as_a_loss(watched):
    with pytest.raises(ModelError, match=r"^no such model$"):
        watched(build=refused)


class FailsInConstructor:
    def __init__(self):
        raise AttributeError("no such attribute")

    def ask(self): ...


def test_an_actor_whose_constructor_fails_is_explained_in_one_line(driver):
    with pytest.raises(ray.exceptions.RayError) as caught:
        ray.get(ray.remote(FailsInConstructor).remote().ask.remote())
    assert supervisor.explain(caught.value) == "its constructor failed: AttributeError: no such attribute"


def test_without_resources_for_a_worker_the_run_waits_reports_them_and_stops_on_request(driver):
    """The only worker dies, and the cluster has no resources for another."""
    lacking: list[str | None] = [None]
    stopping = threading.Event()
    options = iter([{"num_cpus": 1}, {"resources": {"no such thing": 1.0}}])
    actors, events = [], []

    def start(slot):
        actors.append(ray.remote(RolloutWorker).options(**next(options)).remote(partial(simulated, RATE)))
        return actors[-1]

    rules = Rules(
        Restarts(3), 600.0, lambda: lacking[0], lambda kind, message: events.append((kind, message)), stopping.is_set
    )
    engine = RemoteEngine(start, 1, lambda: None, rules, limit=16)
    engine.submit(requests(1))
    engine.timeout = 2.0
    lacking[0] = "1 GPU that left the cluster"
    os.kill(ray.get(actors[0].__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)
    threading.Timer(5.0, stopping.set).start()
    began = time.monotonic()
    with pytest.raises(ClusterLost, match=r"^stopped while waiting for 1 GPU that left the cluster"):
        drain(engine)
    assert time.monotonic() - began > 3.0, "a worker without resources must not time out"
    assert ("waiting", "rollout workers wait for 1 GPU that left the cluster") in events
    engine.close()


def test_weights_are_broadcast_to_live_workers_and_stored_for_later_ones(watched):
    """If learners send directly to the workers, the store is used only for a worker that was replaced."""
    sent, stored = [], []

    def broadcast(actors, version):
        sent.append((list(actors), version))
        ray.get([a.__ray_call__.remote(lambda self, new: self.engine.sync_weights(new), version) for a in actors])

    one = watched(broadcast=broadcast)
    one.engine.weights = lambda: stored.append(one.engine.newest.version) or ray.put({})
    one.engine.submit(requests(6))
    early = one.engine.poll()
    one.engine.sync_weights(1)
    found = [*early, *drain(one.engine)]
    assert_each_once(found, 6)
    assert {rollout.weight_version for rollout in found} == {0, 1}
    one.engine.submit(requests(2, start=6))
    one.kill(0)
    found = drain(one.engine)
    while not all(worker.is_open for worker in one.engine.workers):
        time.sleep(0.1)
    assert stored == [], "stored only when a worker needs them"
    one.engine.submit(requests(8, start=8))
    found += drain(one.engine)
    assert_each_once(found, 10, start=6)
    assert {rollout.weight_version for rollout in found} == {1}, "the new worker has the version of the others"
    assert stored == [1]
    one.engine.sync_weights(2)
    one.engine.submit(requests(8, start=16))
    assert {rollout.weight_version for rollout in drain(one.engine)} == {2}
    first, second, third = one.actors
    assert sent == [([first, second], 1), ([third, second], 2)]
    assert stored == [1]


def test_weights_that_cannot_be_broadcast_go_through_the_store(watched):
    def broadcast(actors, version):
        raise EngineError("no NCCL here")

    one = watched(broadcast=broadcast)
    for version in (1, 2):
        one.engine.sync_weights(version)
    one.engine.submit(requests(4))
    assert {rollout.weight_version for rollout in drain(one.engine)} == {2}
    assert one.events == [("weights", "no NCCL here; weights go through Ray's object store instead")]


@pytest.mark.parametrize("error", [None, EngineError("no NCCL here")])
def test_after_a_broadcast_all_workers_continue_also_if_the_thread_had_just_collected(watched, error):
    def broadcast(actors, version):
        if error is not None:
            raise error

    engine = watched(rate=50.0, broadcast=broadcast).engine
    collect, collected, may_continue = engine._collect, threading.Event(), threading.Event()

    def collect_and_pause():
        collect()
        collected.set()
        may_continue.wait(10)

    engine._collect = collect_and_pause
    engine.submit(requests(6))
    collected.wait()
    engine.sync_weights(1)
    with engine.changed:
        assert all(worker.groups and worker.calls for worker in engine.workers)
    may_continue.set()
    assert_each_once(drain(engine), 6)


def test_weights_are_not_broadcast_to_a_worker_that_died_while_idle(watched):
    sent = []
    one = watched(broadcast=lambda actors, version: sent.append(list(actors)))
    first, second = one.actors
    one.kill(0)
    one.engine.sync_weights(1)
    assert sent == [[second]]
    one.engine.submit(requests(6))
    assert_each_once(drain(one.engine), 6)
    assert [kind for kind, _ in one.events] == ["worker"]
    assert one.actors[0] is first and len(one.actors) == 3


def test_too_many_workers_lost_while_weights_are_sent_are_reported_by_the_next_poll(watched):
    """The step whose weights these are can then be completed and saved."""
    one = watched(restarts=0, broadcast=lambda actors, version: None)
    one.kill(0)
    one.engine.sync_weights(1)
    one.engine.metrics()
    one.engine.submit(requests(4))
    with pytest.raises(ClusterLost, match=r"^rollout worker 0 died.*max_restarts = 0 allows$"):
        one.engine.poll()


def test_learners_lost_during_a_broadcast_replace_the_workers_and_the_store_takes_over(watched):
    """Workers may wait in the collective forever, so they are replaced. They did not fail, so no restart is counted."""
    tried = []

    def broadcast(actors, version):
        tried.append(version)
        raise LearnerLost("learner 0 died")

    one = watched(broadcast=broadcast, restarts=0)
    one.engine.submit(requests(6))
    found = one.engine.poll()
    with pytest.raises(LearnerLost, match=r"^learner 0 died while weights were sent to the rollout workers, which now"):
        one.engine.sync_weights(1)
    assert len(one.actors) == 4
    one.engine.sync_weights(1)
    found += drain(one.engine)
    assert_each_once(found, 6)
    assert {rollout.weight_version for rollout in found} == {0, 1}
    assert (tried, one.events) == ([1], [])
