"""Judges placed by Ray: they give the scores of a local judge, also when workers die."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import closing

import numpy as np
import pytest

from dapo import Trainer
from dapo.config import RewardConfig
from dapo.errors import ClusterLost, ConfigError, RewardError
from dapo.rewards.judge import build_judge
from dapo.sampling.episodes import Episodes
from dapo.types import Prompt, Rollout, Score
from tests import runs
from tests.cluster.test_placement import sentence
from tests.cluster.test_runs import assert_accounts_balance, events, node, once_in_step, pid, train
from tests.rewards.test_reward_model import save

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
remote = pytest.importorskip("dapo.cluster.remote_judge")
supervisor = pytest.importorskip("dapo.cluster.supervisor")

# Scores depend only on the text. The order of `set(completion)` depends on the hash seed, which must be equal too.
REWARD = """
import os, time
def reward(completion, answer, **row):
    time.sleep(float(row.get("seconds", 0)))
    return {"score": float(len(completion) + answer), "acc": True, "letters": "".join(set(completion)),
            "pid": os.getpid(), "folder": os.getcwd()}
def odd(completion, **row):
    time.sleep(60 if completion == "slow" else 0)
    return 1 / (len(completion) % 2)
def token(completion, **row):
    return {"score": 1.0, "token": os.environ.get("DAPO_REWARD_TOKEN")}
"""


class Watched:
    """A placed judge, with its events and actors."""

    def __init__(self, use, count=2, restarts=3, **options):
        self.events, self.actors, self.room = [], [], {"num_cpus": 0}
        report = {"on_event": lambda kind, message: self.events.append((kind, message))}
        rules = supervisor.Rules(supervisor.Restarts(restarts), 600.0, **report, **options)
        self.judge = remote.RemoteJudge(self.start, count, RewardConfig(use=use, timeout=2.0), rules)

    def start(self, slot, concurrency):
        if len(self.actors) > slot and "num_cpus" in self.room:
            self.judge.timeout = 600.0  # a replacement gets time to start
        options = {**self.room, "max_concurrency": concurrency}
        self.actors.append(ray.remote(remote.RewardWorker).options(**options).remote())
        return self.actors[-1]


@pytest.fixture
def watched(driver, tmp_path, monkeypatch):
    """Make placed judges in a working directory with a reward file, which is named by a relative path."""
    (tmp_path / "mine.py").write_text(REWARD, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    made = []

    def make(use="mine.py:reward", **options):
        made.append(Watched(use, **options))
        return made[-1]

    yield make
    for one in made:
        one.judge.close()


def group(serial: int, *texts: str, **extra) -> tuple[Prompt, list[Rollout]]:
    prompt = Prompt(str(serial), ({"role": "user", "content": "?"},), (1,), serial, "test", extra)
    tokens, logprobs = np.ones(2, dtype=np.int32), np.zeros(2, dtype=np.float32)
    return prompt, [Rollout(serial, i, tokens, logprobs, "stop", 0, text) for i, text in enumerate(texts)]


def groups(count: int, **extra) -> list[tuple[Prompt, list[Rollout]]]:
    return [group(serial, *(f"{serial} {'abcdefgh'[:i]}" for i in range(4)), **extra) for serial in range(count)]


def fields(score) -> dict:
    return {"value": score.value, "acc": score.acc, "error": score.error, "letters": score.extras.get("letters")}


def test_scores_equal_those_of_a_judge_in_this_process(watched, tmp_path):
    asked = groups(12, seconds=0.05)
    judge = watched().judge
    scores = [future.result() for future in [judge.submit(*one) for one in asked]]
    with closing(build_judge(RewardConfig(use="mine.py:reward", workers=1))) as local:
        expected = [local.submit(*one).result() for one in asked]
    assert [list(map(fields, one)) for one in scores] == [list(map(fields, one)) for one in expected]
    assert len({score.extras["pid"] for one in scores for score in one}) == 2
    assert {score.extras["folder"] for one in scores for score in one} == {str(tmp_path)}


def test_the_endpoint_token_comes_from_the_trainers_environment(watched, monkeypatch):
    monkeypatch.setenv("DAPO_REWARD_TOKEN", "tok-51c09e")
    [score] = watched("mine.py:token", count=1).judge.submit(*group(0, "a")).result()
    assert score.extras["token"] == "tok-51c09e"


def test_a_failure_or_timeout_affects_only_that_response(watched):
    judge = watched("mine.py:odd").judge
    one, even, late, other = judge.submit(*group(0, "a", "ab", "slow", "abc")).result()
    assert (one.value, other.value) == (1.0, 1.0)
    assert "ZeroDivisionError" in even.error
    assert late.error == "timed out after 2 s"


def test_a_reward_model_beside_a_rule_is_loaded_by_each_worker_from_a_relative_folder(watched, tmp_path):
    save(tmp_path / "judge")
    use, texts = {"model:judge": 1.0, "mine.py:reward": 0.5}, ["4", "four", "It is four."]
    judge = watched(use).judge
    placed = [judge.submit(*group(serial, *texts)) for serial in range(4)]
    with closing(build_judge(RewardConfig(use=use, workers=1))) as local:
        expected = [score.value for score in local.submit(*group(0, *texts)).result()]
    assert expected[0] != expected[1]
    for serial, future in enumerate(placed):
        assert [score.value - 0.5 * serial for score in future.result()] == pytest.approx(expected)


def test_a_worker_gets_only_what_keeps_it_busy_and_other_groups_wait(watched):
    judge = watched().judge
    futures = [judge.submit(*one) for one in groups(9, seconds=0.2)]
    deadline = time.monotonic() + 10
    while len(judge.queue) != 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [len(worker.groups) for worker in judge.workers] == [2, 2]
    assert len(judge.queue) == 5
    assert all(len(future.result()) == 4 for future in futures)


def test_groups_of_a_killed_worker_are_judged_again_and_an_event_reports_it(watched):
    one = watched()
    futures = [one.judge.submit(*asked) for asked in groups(6, seconds=0.3)]
    os.kill(pid(one.actors[0]), signal.SIGKILL)
    for (_, rollouts), future in zip(groups(6), futures, strict=True):
        serial = rollouts[0].serial
        assert [score.value for score in future.result()] == [len(r.text) + serial for r in rollouts]
    ((kind, message),) = one.events
    assert kind == "reward worker"
    assert message == "reward worker 0 died: its worker process has died; replaced, 2 groups are judged again"
    assert len(one.actors) == 3


def test_a_worker_that_stops_answering_is_replaced_but_not_one_that_judges_for_long(watched, monkeypatch):
    monkeypatch.setattr(remote, "PULSE", 0.2)
    one = watched()
    one.judge.timeout = 3.0
    long = one.judge.submit(*group(0, *"abcd", seconds=1.5))  # 6 s in all
    assert [score.value for score in long.result()] == [1.0] * 4
    assert one.events == []
    victim = pid(one.actors[1])
    futures = [one.judge.submit(*asked) for asked in groups(2, seconds=0.2)]
    os.kill(victim, signal.SIGSTOP)
    one.judge.timeout = 3.0
    assert all(len(future.result()) == 4 for future in futures)
    assert "reward worker 1 did not answer for 3 s (cluster.timeout); replaced" in one.events[0][1]


def test_more_losses_than_max_restarts_fail_pending_and_later_groups(watched):
    one = watched(restarts=0)
    future = one.judge.submit(*group(0, "a", seconds=5))
    os.kill(pid(one.actors[0]), signal.SIGKILL)
    with pytest.raises(
        ClusterLost, match=r"reward worker 0 died.*more processes than cluster\.max_restarts = 0 allows$"
    ):
        future.result()
    with pytest.raises(ClusterLost):
        one.judge.submit(*group(1, "a")).result()


def test_a_group_that_an_environment_scored_in_part_reports_losses_in_the_callers_thread(watched):
    one, seen = watched(count=1, restarts=1), []
    one.judge.on_event = lambda kind, message: seen.append(threading.current_thread())
    episodes = Episodes(None, one.judge)

    def score(serial):
        episodes.scores[serial, 0] = Score(0.5)
        future = episodes.score(*group(serial, "a", "b", seconds=1.5))
        os.kill(pid(one.actors[-1]), signal.SIGKILL)
        return future.result()

    given, judged = score(0)
    assert (given, judged.value) == (Score(0.5), 1.0)
    assert seen == [threading.current_thread()]
    with pytest.raises(ClusterLost, match="reward worker 0 died"):  # one loss too many
        score(1)


def test_groups_pending_at_close_are_returned_unjudged(watched):
    judge = watched().judge
    future = judge.submit(*group(0, "a", seconds=1.5))
    judge.close()
    assert "closed" in future.result()[0].error
    assert "closed" in judge.submit(*group(1, "a")).result()[0].error


def test_without_resources_for_a_worker_the_run_waits_reports_them_and_stops_on_request(watched):
    """The only worker dies, and the cluster has no resources for another."""
    lacking: list[str | None] = [None]
    stopping = threading.Event()
    one = watched(count=1, missing=lambda: lacking[0], is_stopping=stopping.is_set)
    victim = pid(one.actors[0])
    future = one.judge.submit(*group(0, "a", seconds=1.5))
    one.room = {"resources": {"no such thing": 1.0}}
    one.judge.timeout = 2.0
    lacking[0] = "1 CPU that left the cluster"
    os.kill(victim, signal.SIGKILL)
    threading.Timer(5.0, stopping.set).start()
    began = time.monotonic()
    with pytest.raises(ClusterLost, match=r"^stopped while waiting for 1 CPU that left the cluster"):
        future.result()
    assert time.monotonic() - began > 3.0, "a worker without resources must not time out"
    assert ("waiting", "reward workers wait for 1 CPU that left the cluster") in one.events


@pytest.mark.parametrize(
    "use", ["nowhere.py:reward", "mine.py:nothing", "broken.py:reward", "mine.py", "matth", "regex"]
)
def test_a_mistake_in_the_reward_gives_the_message_of_a_local_run(watched, tmp_path, use):
    (tmp_path / "broken.py").write_text("import no_such_module", encoding="utf-8")
    with pytest.raises(RewardError) as local:
        build_judge(RewardConfig(use=use, workers=1))
    with pytest.raises(RewardError) as placed:
        watched(use)
    assert str(placed.value) == str(local.value)


def test_a_missing_reward_file_ends_a_run_on_ray_before_anything_is_written(tmp_path, cluster):
    said = sentence(tmp_path, cluster.address, "cluster.reward_workers=1", "reward.use=nowhere.py:reward")
    assert said == "reward.use: there is no file nowhere.py; relative paths start at the working directory"


def test_a_function_given_as_an_object_cannot_be_placed(tmp_path):
    with pytest.raises(ConfigError, match=r"^cluster\.reward_workers: a reward that is given as a Python function"):
        Trainer(runs.load(tmp_path, "cluster.reward_workers=1"), lambda completion, **row: 1.0)


def test_reward_workers_alone_give_the_run_of_one_process_bit_for_bit(tmp_path, driver):
    local = runs.load(tmp_path, "run.name=local", "eval.k=2")
    train(local)
    placed = runs.load(tmp_path, "run.name=placed", "eval.k=2", "cluster.reward_workers=2")
    train(placed)
    runs.assert_same_run(local.run_dir, placed.run_dir, step=6)
    assert_accounts_balance(placed.run_dir, steps=6)


def slow_reward() -> str:
    """Return a reward slow enough that judging is in flight at any time of a step."""
    return runs.REWARD.replace("    letters", "    __import__('time').sleep(0.01)\n    letters", 1)


def test_a_run_survives_the_death_of_a_reward_worker_bit_for_bit(tmp_path, driver):
    local = runs.load(tmp_path, "run.name=local", reward=slow_reward())
    train(local)
    options = ["run.name=killed", "cluster.rollout_workers=1", "cluster.reward_workers=2"]
    config = runs.load(tmp_path, *options, reward=slow_reward())

    def prepare(trainer):
        victim = pid(trainer.judge.workers[0].actor)
        once_in_step(trainer, 3, lambda: os.kill(victim, signal.SIGKILL))

    train(config, prepare=prepare)
    runs.assert_same_run(local.run_dir, config.run_dir, step=6)
    assert_accounts_balance(config.run_dir, steps=6)
    (message,) = events(config.run_dir, "reward worker")
    assert message.startswith("reward worker 0 died: its worker process has died; replaced, ")


def test_a_run_survives_the_loss_of_a_node_with_reward_workers(tmp_path, driver):
    local = runs.load(tmp_path, "run.name=local", reward=slow_reward())
    train(local)
    options = ["run.name=left", "cluster.rollout_workers=1", "cluster.reward_workers=2"]
    config = runs.load(tmp_path, *options, reward=slow_reward())
    extra = driver.add_node(num_cpus=2)  # room for the workers of the lost node

    def prepare(trainer):
        home = node(trainer.policy.ranks.workers[0].actor)
        judging = [node(worker.actor) for worker in trainer.judge.workers]
        gone = next(found for found in driver.worker_nodes if found.node_id != home and found.node_id in judging)
        once_in_step(trainer, 2, lambda: driver.remove_node(gone))

    try:
        train(config, prepare=prepare)
    finally:
        if extra in driver.worker_nodes:
            driver.remove_node(extra)
        while len(driver.worker_nodes) < 2:
            driver.add_node(num_cpus=2)
    assert_accounts_balance(config.run_dir, steps=6)
    assert runs.verdicts(config.run_dir) == runs.verdicts(local.run_dir)
    assert "died" in events(config.run_dir, "reward worker")[0]
