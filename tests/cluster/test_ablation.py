"""`dapo ablate --ray`: runs side by side have the records of runs in turn, also if workers, nodes or the driver die."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")

from dapo.ablation.placed_worker import PlacedWorker  # noqa: E402
from dapo.ablation.plan import Budget, Plan  # noqa: E402
from dapo.ablation.records import Status, read_status  # noqa: E402
from dapo.ablation.session import Session  # noqa: E402
from dapo.ablation.side_by_side import SideBySide, Site  # noqa: E402
from dapo.cluster.placement import room  # noqa: E402
from dapo.cluster.supervisor import Restarts  # noqa: E402
from dapo.errors import ClusterError  # noqa: E402
from dapo.store.database import RunDatabase  # noqa: E402
from tests.ablation.recipes import plan_of, write_recipe  # noqa: E402
from tests.runs import REWARD, metrics, verdicts  # noqa: E402

pytestmark = pytest.mark.timeout(1200)  # some tests train three ablations

ROOT = Path(__file__).parent.parent.parent
RUNS = ["hot-s5", "hot-s6", "recipe-s5", "recipe-s6"]
# After some steps every run tells the number of its process, and waits until the file `go` exists.
WAITS = REWARD.replace(
    "def reward(completion, answer, **row):",
    "import os, time\nfrom pathlib import Path\ncalls = 0\n"
    "def reward(completion, answer, **row):\n"
    "    global calls\n    calls += 1\n"
    "    if calls == 60 and not Path('FOLDER/go').exists():\n"
    "        Path(f'FOLDER/waits-{os.getppid()}').touch()\n"
    "        while not Path('FOLDER/go').exists():\n            time.sleep(0.05)",
)


class Ablation:
    """`dapo ablate` of two arms with two seeds, in a process group of its own, and its output so far."""

    def __init__(self, recipe: Path, out: Path, *more: str) -> None:
        command = [sys.executable, "-m", "dapo", "ablate", str(recipe), "--arm", "hot: optim.lr=0.01", "--seeds", "2",
                   "--steps", "4", "--out", str(out), "reward.workers=1", "reward.timeout=700", *more]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.output = ""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def wait(self) -> int:
        """Wait until the ablation ends, and return its exit status."""
        self.wait_for(lambda: self.process.poll() is not None)
        self.reader.join()
        return self.process.returncode

    def wait_for(self, is_there, seconds: float = 400) -> None:
        """Wait until `is_there()`. If that takes too long, end the ablation and fail with what it has said."""
        deadline = time.monotonic() + seconds
        while not is_there():
            if time.monotonic() > deadline:
                self.kill()
            assert self.process.poll() is None, self.output
            time.sleep(0.1)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def waiting_processes(folder: Path) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in folder.glob("waits-*")]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def evaluations(folder: Path) -> list:
    with RunDatabase.open_readonly(folder / "run.db") as database:
        return [
            (row["step"], row["metrics"], [
                (sample.prompt, sample.rollout.text, sample.score)
                for report in database.eval_reports(row["step"]) for sample in report.samples
            ])
            for row in database.evals()
        ]  # fmt: skip


def base_of(folder: Path) -> list[str]:
    with RunDatabase.open_readonly(folder / "run.db") as database:
        return [event["message"] for event in database.events() if "evaluation before the first" in event["message"]]


def assert_same(out: Path, other: Path, names: Sequence[str] = RUNS) -> None:
    for name in names:
        one, two = out / "runs" / name, other / "runs" / name
        assert metrics(one) == metrics(two)
        assert verdicts(one) == verdicts(two)
        assert evaluations(one) == evaluations(two)
        assert not (one / "checkpoints").exists()
    assert not list(out.glob(".shared-*"))


def results(out: Path) -> list:
    """Return the differences at the end and at equal tokens."""
    found = json.loads((out / "ablation.json").read_text())
    return [
        [arm["differences"].get(where) for where in ("end", "tokens")]
        for arm in found["sets"]["held_out"]["arms"].values()
    ]


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("in_turn")
    done = Ablation(write_recipe(folder), folder / "out", "-q")
    assert done.wait() == 0, done.output
    return folder / "out"


@pytest.fixture
def waiting(cluster, tmp_path) -> Iterator[Ablation]:
    """Four runs side by side, each in the middle of a step."""
    recipe = write_recipe(tmp_path, run={"save_every": 1})
    (tmp_path / "reward.py").write_text(WAITS.replace("FOLDER", str(tmp_path)), encoding="utf-8")
    started = Ablation(recipe, tmp_path / "out", "--ray", cluster.address)
    started.wait_for(lambda: len(waiting_processes(tmp_path)) == 4)
    yield started
    started.kill()


def test_runs_side_by_side_have_the_records_of_runs_in_turn(cluster, in_turn, tmp_path):
    done = Ablation(write_recipe(tmp_path), tmp_path / "out", "--ray", cluster.address)
    assert done.wait() == 0, done.output
    assert "4 runs side by side on 3 nodes, each with 1 CPU" in done.output
    assert "runs on the same node slow each other" in done.output
    for number, name in enumerate(["recipe-s5", "hot-s5", "recipe-s6", "hot-s6"], start=1):
        lines = re.findall(f"run {number} of 4: {name} (.*)", done.output)
        assert [line.split(":")[0].split(" on ")[0] for line in lines] == [
            "starts", "at step 0", "at step 2", "at step 4", "finished"
        ]  # fmt: skip
    assert "\x1b" not in done.output and "\r" not in done.output
    assert_same(tmp_path / "out", in_turn)
    assert results(tmp_path / "out") == results(in_turn)
    for name in RUNS:  # made once per seed
        shared = base_of(tmp_path / "out" / "runs" / name)
        assert shared == base_of(in_turn / "runs" / name)
        assert len(shared) == name.startswith("hot")


@pytest.mark.parametrize("victim", ["actor", "node", "process"])
def test_a_lost_worker_costs_its_run_an_attempt(victim, cluster, waiting, in_turn, tmp_path):
    pids = waiting_processes(tmp_path)
    raylets = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
    pid = next(pid for pid in pids if parent(parent(pid)) in raylets)  # not on the head
    try:
        if victim == "node":
            cluster.remove_node(raylets[parent(parent(pid))], allow_graceful=False)
        else:
            os.kill(parent(pid) if victim == "actor" else pid, signal.SIGKILL)
        (tmp_path / "go").touch()
        code = waiting.wait()
    finally:
        while len(cluster.worker_nodes) < 2:
            cluster.add_node(num_cpus=2)
    if victim == "process":  # as without Ray: it would happen again
        assert code == 3, waiting.output
        (name,) = re.findall(
            r"run . of 4: (\S+) failed: the process that trained the run died \(signal 9", waiting.output
        )
        assert read_status(tmp_path / "out" / "runs" / name) == Status.FAILED
        assert_same(tmp_path / "out", in_turn, [other for other in RUNS if other != name])
    else:
        assert code == 0, waiting.output
        assert re.search(r"run . of 4: \S+ will resume: the worker on \S+ died: ", waiting.output), waiting.output
        assert_same(tmp_path / "out", in_turn)
        assert results(tmp_path / "out") == results(in_turn)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_ablation_leaves_no_process_and_resumes(number, cluster, waiting, in_turn, tmp_path):
    out, pids = tmp_path / "out", waiting_processes(tmp_path)
    os.killpg(waiting.process.pid, number)  # as Ctrl-C does
    if number == signal.SIGINT:
        waiting.wait_for(lambda: "stopping all runs" in waiting.output)
        time.sleep(5)  # until the signal has reached all runs
        (tmp_path / "go").touch()
    code = waiting.wait()
    deadline = time.monotonic() + 120
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    if number == signal.SIGINT:
        assert code == 130, waiting.output
        assert "to continue: the same command with --resume" in waiting.output
        for run in (out / "runs").iterdir():
            assert read_status(run) == Status.UNFINISHED
            assert (run / "checkpoints" / f"step_{len(metrics(run))}").exists()
    (tmp_path / "go").touch()
    again = Ablation(tmp_path / "recipe.yaml", out, "--ray", cluster.address, "--resume", "run.save_every=1")
    assert again.wait() == 0, again.output
    assert again.output.count(" resumes on ") == 4
    for leftover in out.glob(".shared-*"):
        assert number == signal.SIGKILL
        leftover.unlink()
    assert_same(out, in_turn)
    assert results(out) == results(in_turn)


def test_a_folder_that_a_node_does_not_see_is_refused(driver, tmp_path):
    """A file that only this process has open stands for a folder on a disk of the driver."""
    plan = plan_of(write_recipe(tmp_path), "hot: optim.lr=0.01")
    plan.write()
    session = Session(plan, False, "quiet", on_run=lambda *_: None)
    runs = SideBySide(session, Site(room(), (1,)), say=lambda line: None)
    with (tmp_path / "own").open("wb") as own:
        runs.witness = Path(f"/proc/self/fd/{fcntl.fcntl(own, fcntl.F_DUPFD, 900)}")
        with pytest.raises(
            ClusterError, match=r"does not see /proc/self/fd, which every node must share .* \(--out\)$"
        ):
            runs.train()
    assert [read_status(run.folder) for run in plan.runs] == [Status.MISSING] * 2


def test_an_idle_worker_that_dies_is_replaced_while_runs_wait(driver, tmp_path, monkeypatch):
    class DiesAtFirst(PlacedWorker):
        def open(self, witness, folder, variables):
            if not (marker := Path(witness).with_name("has-died")).exists():
                marker.touch()
                os._exit(1)
            return super().open(witness, folder, variables)

    monkeypatch.setattr("dapo.ablation.side_by_side.PlacedWorker", DiesAtFirst)
    plan, said = plan_of(write_recipe(tmp_path), "hot: optim.lr=0.01"), []
    plan.write()
    train_on_one_worker(plan, said)
    assert [line.partition(":")[0] for line in said] == ["another worker starts in place of one that died"]
    assert [read_status(run.folder) for run in plan.runs] == [Status.FINISHED] * 2


def test_a_worker_that_dies_before_it_begins_its_run_costs_that_run_nothing(driver, tmp_path, monkeypatch):
    """As if its node had died while it was idle, which Ray reports only when the worker is called."""

    class DiesAtFirst(PlacedWorker):
        def train(self, task):
            if not (marker := Path(task.config.run.dir).parent / "has-died").exists():
                marker.touch()
                os._exit(1)
            return super().train(task)

    monkeypatch.setattr("dapo.ablation.side_by_side.PlacedWorker", DiesAtFirst)
    plan, said = plan_of(write_recipe(tmp_path), "hot: optim.lr=0.01", overrides=["cluster.max_restarts=1"]), []
    plan.write()
    runs = train_on_one_worker(plan, said)
    assert [line.partition(":")[0] for line in said] == ["another worker starts in place of one that died"]
    assert [read_status(run.folder) for run in plan.runs] == [Status.FINISHED] * 2
    assert [restarts.spent for restarts in runs.losses.values()] == [0]


def test_no_more_idle_workers_are_replaced_than_cluster_max_restarts(driver, tmp_path, monkeypatch):
    class Dies(PlacedWorker):
        def open(self, witness, folder, variables):
            os._exit(1)

    monkeypatch.setattr("dapo.ablation.side_by_side.PlacedWorker", Dies)
    plan, said = plan_of(write_recipe(tmp_path), "hot: optim.lr=0.01", overrides=["cluster.max_restarts=2"]), []
    plan.write()
    with pytest.raises(ClusterError, match=r"--ray: there is no worker, the last one died: "):
        train_on_one_worker(plan, said)
    assert len(said) == 2


def train_on_one_worker(plan: Plan, said: list[str]) -> SideBySide:
    runs = SideBySide(Session(plan, False, "quiet", on_run=lambda *_: None), Site(room(), (1,)), say=said.append)
    runs.slow_at = None  # however long a worker takes to start
    runs.train()
    return runs


def test_each_run_gets_one_gpu_or_as_many_cpus_as_it_has_threads(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    recipe = write_recipe(tmp_path)
    plan = plan_of(recipe, "hot: optim.lr=0.01", budget=Budget("seconds", 5))
    site = Site.of(plan, [room(1), room(9), room(4)])
    assert (site.each, site.per_node, site.shared) == (room(4), (2, 1), "node")
    assert site.sentence(left=3) == "3 runs side by side on 2 nodes, each with 4 CPUs"
    assert site.sentence(left=6).endswith("each with 4 CPUs; with a lower OMP_NUM_THREADS there is room for more")
    assert Site.of(plan, [room(5), room(4)]).shared is None
    with pytest.raises(ClusterError, match=r"needs 4 CPUs on one node, but the largest node has 3 CPUs; set OMP_NUM"):
        Site.of(plan, [room(3), room(2)])
    on_gpu = plan_of(recipe, "hot: optim.lr=0.01", overrides=["model.device=auto"])
    site = Site.of(on_gpu, [room(16), room(6, 2), room(64, 8)])
    assert (site.each, site.per_node, site.shared) == (room(3, 1), (2, 8), None)
    assert Site.of(on_gpu, [room(16, 2), {"GPU": 1.0}]).per_node == (2,)  # Ray leaves out what a node has none of
    with pytest.raises(
        ClusterError, match=r"a run needs 4 CPUs and 1 GPU on one node, but the largest node has 16 CPUs$"
    ):
        Site.of(plan_of(recipe, "hot: optim.lr=0.01", overrides=["model.device=cuda"]), [room(16)])


def test_runs_that_share_a_gpu_divide_its_cpus_and_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    recipe = write_recipe(tmp_path)
    plan = plan_of(recipe, "hot: optim.lr=0.01", overrides=["model.device=auto"])
    site = Site.of(plan, [room(6, 2), room(64, 1), room(16)], per_gpu=3)
    assert (site.each, site.per_node, site.shared) == (room(1, 1), (6, 3), "GPU")
    assert site.sentence(left=9) == "9 runs side by side on 2 nodes, each with 1 CPU and 1/3 of a GPU"
    assert site.variables()["PYTORCH_CUDA_ALLOC_CONF"] == "per_process_memory_fraction:0.3067"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert site.variables()["PYTORCH_CUDA_ALLOC_CONF"].startswith("expandable_segments:True,per_process_memory")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in Site.of(plan, [room(6, 2)]).variables()
    for per_gpu in range(1, 65):  # Ray counts in steps of 0.0001: all shares of a GPU must fit on it
        shared = Site.of(plan, [room(64, 1)], per_gpu)
        assert shared.per_node == (per_gpu,)
        assert 0.99 < round(shared.gpu_share * 10_000) * per_gpu / 10_000 <= 1
    with pytest.raises(ClusterError, match=r"--runs-per-gpu: the runs train on CPUs; leave it out"):
        Site.of(plan_of(recipe, "hot: optim.lr=0.01"), [room(64)], per_gpu=2)


def test_runs_that_share_a_gpu_are_trained_at_once(cluster, in_turn, tmp_path):
    """A node that only claims to have a GPU: its runs train on a CPU."""
    node = cluster.add_node(num_cpus=2, num_gpus=1)
    try:
        done = Ablation(
            write_recipe(tmp_path), tmp_path / "out", "--ray", cluster.address, "--runs-per-gpu", "2",
            "model.device=auto",
        )  # fmt: skip
        assert done.wait() == 0, done.output
    finally:
        cluster.remove_node(node)
    assert "2 runs side by side on 1 node, each with 1 CPU and 1/2 of a GPU" in done.output
    assert "runs on the same GPU slow each other" in done.output
    assert_same(tmp_path / "out", in_turn)


def test_a_lost_run_whose_folder_stays_locked_fails_after_a_while(tmp_path):
    plan, said = plan_of(write_recipe(tmp_path), "hot: optim.lr=0.01", budget=Budget("steps", 2)), []
    session = Session(plan, False, "quiet", lambda number, run, what, style: said.append(what))
    runs = SideBySide(session, Site(room(1), (1,)), say=said.append)
    (number, run), *others = runs.waiting
    runs.losses[number], runs.timeout = Restarts(3), 0.2
    run.folder.mkdir(parents=True)
    with (run.folder / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        runs._give_up_locked()
        assert said == ["waits until its lost process unlocks its folder"] and len(runs.waiting) == 1 + len(others)
        time.sleep(0.3)
        runs._give_up_locked()
    assert runs.waiting == others
    assert "still locks" in session.failures[run.config.run.name]
