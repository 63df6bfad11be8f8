"""The transport to learners on Ray: calls reach all ranks, and the loss of one ends all with one reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from dapo.errors import ClusterLost, EngineError, LearnerLost
from tests import runs

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
learners = pytest.importorskip("dapo.cluster.ray_learners")
supervisor = pytest.importorskip("dapo.cluster.supervisor")


class Rank(learners.RayLearnerRank):
    """A rank without a model, whose calls do what a rank's calls do."""

    def open(self, options, saved, address, custom):
        assert address.startswith("tcp://")
        return frozenset({self.rank}), False

    def add(self, *numbers):
        return sum(numbers) + 100 * self.rank

    def pid(self):
        return os.getpid()

    def refuse(self):
        raise EngineError("no NCCL here")

    def crash(self):
        """Rank 1 dies, and rank 0 fails because of it, earlier than Ray reports the death."""
        if self.rank == 1:
            time.sleep(0.5)
            os._exit(1)
        raise RuntimeError("Connection closed by peer")


@pytest.fixture
def make(driver, tmp_path):
    made = []

    def start(rank):
        return ray.remote(Rank).options(num_cpus=0).remote(rank, 2, shares_gpu=False)

    def make(start=start, timeout=600.0, **options):
        rules = supervisor.Rules(supervisor.Restarts(3), timeout, **options)
        made.append(learners.RayRanks(start, 2, runs.load(tmp_path), None, rules))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


def test_a_call_has_the_same_arguments_on_all_ranks_and_returns_the_answer_of_rank_0(make):
    ranks = make()
    assert ranks.call("add", 1, 2) == 3
    assert ranks._answers([rank.actor.call.remote("add", (1,)) for rank in ranks.workers]) == [1, 101]


def test_a_mistake_that_all_ranks_report_is_raised_once_and_the_ranks_continue(make):
    ranks = make()
    with pytest.raises(EngineError, match="no NCCL here"):
        ranks.call("refuse")
    assert ranks.call("add", 1) == 1


def test_the_rank_that_died_is_named_and_not_the_one_that_failed_because_of_it(make):
    ranks = make()
    with pytest.raises(LearnerLost, match=r"^learner 1 died: "):
        ranks.call("crash")
    assert ranks.workers == []
    ranks.restart(LearnerLost("learner 1 died"), None)
    assert ranks.call("add", 1) == 1


def test_a_rank_that_stops_answering_ends_all_ranks(make):
    ranks = make()
    os.kill(ray.get(ranks.workers[1].actor.pid.remote()), signal.SIGSTOP)
    ranks.timeout = 2.0
    with pytest.raises(LearnerLost, match=r"^a learner did not answer for 2 s \(cluster\.timeout\)$"):
        ranks.call("add", 1)
    assert ranks.workers == []


def test_without_resources_for_a_rank_the_run_waits_reports_them_and_stops_on_request(make):
    events, stopping = [], threading.Event()
    threading.Timer(5.0, stopping.set).start()

    def start(rank):
        room = {"resources": {"no such thing": 1.0}} if rank == 1 else {}
        return ray.remote(Never).options(num_cpus=0, **room).remote(rank, 2, shares_gpu=False)

    with pytest.raises(ClusterLost, match=r"^stopped while waiting for 1 GPU that left the cluster$"):
        make(
            start,
            timeout=2.0,
            missing=lambda: "1 GPU that left the cluster",
            on_event=lambda kind, message: events.append((kind, message)),
            is_stopping=stopping.is_set,
        )
    assert events == [("waiting", "learners wait for 1 GPU that left the cluster")]


class Never(Rank):
    def open(self, options, saved, address, custom):
        """Wait for the other rank, as in a rendezvous."""
        time.sleep(60)
        return super().open(options, saved, address, custom)


class FailsTwice(learners.RayRanks):
    """Opens the first time, then fails twice, then opens."""

    def _open(self, saved):
        self.tries = [*getattr(self, "tries", ()), saved]
        if len(self.tries) in (2, 3):
            raise LearnerLost(f"learner {len(self.tries)} died")


@pytest.mark.parametrize("limit", [3, 2])
def test_learners_lost_while_restarting_are_retried_up_to_max_restarts(tmp_path, limit):
    rules = supervisor.Rules(supervisor.Restarts(limit), 600.0)
    ranks = FailsTwice(lambda rank: None, 1, runs.load(tmp_path), None, rules)
    if limit == 2:
        with pytest.raises(
            ClusterLost, match=r"^learner 3 died; .* more processes than cluster\.max_restarts = 2 allows$"
        ):
            ranks.restart(LearnerLost("learner 1 died"), tmp_path)
    else:
        ranks.restart(LearnerLost("learner 1 died"), tmp_path)
        assert ranks.tries == [None, tmp_path, tmp_path, tmp_path]


def test_a_run_without_ray_does_not_import_it():
    program = "import sys, dapo.training.trainer, dapo.cluster.torchrun_parts\nassert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
