"""`dapo ablate` from the command line: whole ablations of a tiny model, arms that fail, and interruptions."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dapo.ablation import results
from dapo.ablation.process import WorkerProcess
from dapo.ablation.records import Status, _read_run, read_runs, read_status
from dapo.ablation.report import _X_TICK
from dapo.ablation.session import Session, train_in_turn
from dapo.ablation.task import Outcome
from dapo.cli import app
from dapo.errors import CheckpointError, ConfigError, DapoError, NotReady, TrainingStopped
from dapo.store.database import RunDatabase
from dapo.training.run_directory import RunDirectory
from dapo.types import Event, EventKind
from tests.ablation.recipes import plan_of, write_recipe
from tests.runs import REWARD, metrics

ROOT = Path(__file__).parent.parent.parent
ARMS = """
recipe: {}
hot: {optim.lr: 0.01, algorithm.clip_ratio_high: 0.5}
broken: {reward.use: 'FOLDER/broken.py:reward'}
"""


def ablate(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["ablate", *map(str, arguments)])


def evaluations(folder: Path) -> Any:
    with RunDatabase.open_readonly(folder / "run.db") as database:
        return [(row["step"], row["metrics"]) for row in database.evals()]


BROKEN = """
import json

def reward(completion, answer):
    with open("FOLDER/out/ablation.json") as file:
        statuses = [run["status"] for run in json.load(file)["runs"]]
    raise ValueError(f"no, after {statuses.count('finished')} runs")
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """An ablation of three arms with one seed and two steps; the reward of one arm fails in its first step."""
    folder = tmp_path_factory.mktemp("ablation")
    recipe = write_recipe(folder)
    (folder / "broken.py").write_text(BROKEN.replace("FOLDER", str(folder)), encoding="utf-8")
    (folder / "arms.yaml").write_text(ARMS.replace("FOLDER", str(folder)), encoding="utf-8")
    out = folder / "out"
    return out, ablate(recipe, "--arms", folder / "arms.yaml", "--seeds", 1, "--steps", 2, "--out", out, "-q")


def test_an_arm_that_fails_is_recorded_and_the_others_are_compared(done):
    out, result = done
    assert isinstance(result.exception, TrainingStopped)
    assert result.exception.exit_code == 3
    assert str(result.exception).startswith("1 of 3 runs failed, first broken-s5 (")
    statuses = {path.name: read_status(path) for path in sorted((out / "runs").iterdir())}
    assert statuses == {"broken-s5": Status.FAILED, "hot-s5": Status.FINISHED, "recipe-s5": Status.FINISHED}
    found = json.loads((out / "ablation.json").read_text())
    assert {run["name"]: run["status"] for run in found["runs"]} == statuses
    hot = found["sets"]["held_out"]["arms"]["hot"]
    assert hot["seeds"] == [5] and hot["differences"]["end"]["verdict"] == "one seed: no verdict"
    assert found["sets"]["held_out"]["arms"]["broken"]["differences"]["end"]["verdict"] == "too few results"
    assert "broken-s5: failed: " in result.output
    assert "no, after 2 runs" in str(result.exception), "the result is written each time a run ends"


def test_a_damaged_database_costs_only_its_own_run(tmp_path: Path):
    recipe, out = write_recipe(tmp_path, eval={"every": 0}), tmp_path / "out"
    arguments = (recipe, "--arm", "hot: optim.lr=0.01", "--arm", "mild: optim.lr=0.002", "--seeds", 1, "--steps", 1,
                 "--out", out, "-q")  # fmt: skip
    assert ablate(*arguments).exit_code == 0
    database = out / "runs" / "hot-s5" / "run.db"
    for file in database.parent.glob("run.db*"):
        file.unlink()
    database.write_bytes(b"junk" * 1000)
    result = ablate(*arguments, "--resume")
    assert isinstance(result.exception, TrainingStopped)
    assert "1 of 3 runs failed, first hot-s5" in str(result.exception)
    found = json.loads((out / "ablation.json").read_text())
    assert {run["arm"]: run["status"] for run in found["runs"]} == {
        "recipe": "finished", "hot": "failed", "mild": "finished",
    }  # fmt: skip
    assert not math.isnan(found["sets"]["held_out"]["arms"]["mild"]["differences"]["end"]["value"])
    assert database.read_bytes() == b"junk" * 1000  # it may still be repaired


def test_a_page_that_cannot_be_read_costs_only_its_own_run(done):
    out, _ = done
    folder = out / "runs" / "hot-s5"
    original = (folder / "run.db").read_bytes()
    statuses, reasons = [], []
    for page in range(1, len(original) // 4096):
        broken = original[: 4096 * page] + b"\xff" * 4096 + original[4096 * (page + 1) :]
        (folder / "run.db").write_bytes(broken)
        record = _read_run(folder, "hot", 5, None)
        statuses.append(record.status)
        reasons.append(str(record.reason))
    (folder / "run.db").write_bytes(original)
    assert Status.FINISHED in statuses, "some pages are not needed here"
    assert any("run.db: cannot be read" in reason for reason in reasons), "some faults show only after opening"


def test_an_arm_with_nothing_left_to_learn_ends_early_and_counts(tmp_path: Path):
    recipe, out = write_recipe(tmp_path, eval={"every": 0}), tmp_path / "out"
    reward = 'def reward(completion, answer):\n    return {"score": 1.0, "acc": True}\n'
    (tmp_path / "solved.py").write_text(reward, encoding="utf-8")
    arguments = (recipe, "--arm", f"solved: reward.use={tmp_path / 'solved.py'}:reward", "--seeds", 1, "--steps", 5,
                 "--out", out, "-q", "algorithm.filter_groups.max_num_gen_batches=1")  # fmt: skip
    first = ablate(*arguments)
    assert first.exit_code == 0, first.output
    folder = out / "runs" / "solved-s5"
    assert read_status(folder) == Status.ENDED_EARLY
    assert [step for step, _ in evaluations(folder)] == [0, 3]
    assert not (folder / "checkpoints").exists()
    assert "solved-s5: ended early after step 3, and its last evaluation is carried forward to the end" in " ".join(
        first.output.split()
    )
    found = json.loads((out / "ablation.json").read_text())
    arms = found["sets"]["held_out"]["arms"]
    assert (arms["solved"]["seeds"], arms["recipe"]["seeds"]) == ([5], [5])
    (solved,) = (run for run in found["runs"] if run["arm"] == "solved")
    assert solved["failure"] is None and "all responses were right" in solved["ended_early"]
    again = ablate(*arguments, "--resume")
    assert again.exit_code == 0, again.output
    assert len(metrics(folder)) == 3


def test_a_run_that_fails_twice_for_the_same_reason_has_failed(tmp_path: Path):
    plan = plan_of(write_recipe(tmp_path), "hot: optim.lr=0.01")
    run, reason = plan.runs[0], "the process that trained the run died (signal 9, Killed)"
    run.folder.mkdir(parents=True)
    session = Session(plan, False, "quiet", on_run=lambda *_: None)
    RunDatabase.create(run.folder / "run.db", run.config.to_yaml(), {}).close()
    for _ in range(2):
        with RunDatabase.open(run.folder / "run.db") as database:
            database.record_event(Event(EventKind.RESUMED, "resumed", 0))
        assert session.end(1, run, Outcome(failure=reason)) == Status.FAILED
        session.end(1, run, Outcome(failure=reason))  # a failure that the trainer has recorded is not added
        assert read_status(run.folder) == Status.FAILED
    assert read_runs(plan, {})[0].reason == reason
    with RunDatabase.open_readonly(run.folder / "run.db") as database:
        assert [event["kind"] for event in database.endings()] == [EventKind.RESUMED, EventKind.STOPPED] * 2


def test_a_run_that_another_process_trains_gets_no_failure(tmp_path: Path):
    """Recorded during the last evaluation, it would make a finished run one that ended early."""
    plan = plan_of(write_recipe(tmp_path), "hot: optim.lr=0.01")
    run = plan.runs[0]
    directory = RunDirectory(run.config, resume=False)
    RunDatabase.create(run.folder / "run.db", run.config.to_yaml(), {}).close()
    session = Session(plan, False, "quiet", on_run=lambda *_: None)
    assert session.end(1, run, Outcome(failure="another process is training this run")) == Status.FAILED
    assert list(session.failures) == ["recipe-s5"]
    assert read_status(run.folder) == Status.UNFINISHED
    directory.close()


def test_a_process_that_dies_after_its_run_has_finished_does_not_undo_that(tmp_path: Path):
    plan = plan_of(write_recipe(tmp_path), "hot: optim.lr=0.01")
    run = plan.runs[0]
    (run.folder / "checkpoints").mkdir(parents=True)
    with RunDatabase.create(run.folder / "run.db", run.config.to_yaml(), {}) as database:
        database.record_event(Event(EventKind.FINISHED, "finished", 0))
    session = Session(plan, False, "quiet", on_run=lambda *_: None)
    assert session.end(1, run, Outcome(failure="the process that trained the run died")) == Status.FINISHED
    assert (session.failures, read_status(run.folder)) == ({}, Status.FINISHED)
    assert not (run.folder / "checkpoints").exists()


@pytest.mark.parametrize(("option", "number"), [("--seconds", "inf"), ("--reach", "nan"), ("--reach", "inf")])
def test_a_number_that_is_not_finite_is_refused(tmp_path: Path, option, number):
    result = ablate(tmp_path / "recipe.yaml", option, number)
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == f"{option} is {number}; expected a finite number"


@pytest.mark.parametrize("number", ["-5", "0", "120"])
def test_a_level_that_no_accuracy_has_is_refused_or_taken_for_a_mean_reward(tmp_path: Path, number: str):
    recipe, arm = write_recipe(tmp_path), ("--arm", "a: optim.lr=0.1")
    result = ablate(recipe, *arm, "--reach", "60", "--reach", number, "--dry-run", "reward.use=exact")
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == f"--reach is {number}; expected an accuracy in %, above 0 and at most 100"
    own = ablate(recipe, *arm, "--reach", "60", "--reach", number, "--dry-run", "--out", tmp_path / "out")
    assert own.exit_code == 0, own.output
    assert f"warning: --reach {number} has a meaning only as a mean reward: accuracies are above 0" in own.output
    assert "--reach 60" not in own.output


def test_a_signal_at_the_end_of_a_run_leaves_no_checkpoints(tmp_path: Path, monkeypatch):
    plan = plan_of(write_recipe(tmp_path, run={"save_every": 1}), "hot: optim.lr=0.01")
    train = WorkerProcess.train

    def interrupted(worker: Any, task: Any) -> Any:
        return train(worker, task)[0], signal.SIGINT

    monkeypatch.setattr(WorkerProcess, "train", interrupted)
    ended = Session(plan, False, "quiet", on_run=lambda *_: None)
    train_in_turn(ended)
    assert ended.signal == signal.SIGINT
    assert [read_status(run.folder) for run in plan.runs] == [Status.FINISHED, Status.MISSING]
    assert not (plan.runs[0].folder / "checkpoints").exists()


def test_each_run_is_an_ordinary_run_directory(done):
    out, _ = done
    for command in ("metrics", "report"):
        extra = ["--out", out / "x.html"] if command == "report" else []
        shown = CliRunner().invoke(app, [command, str(out / "runs" / "hot-s5"), *map(str, extra)])
        assert shown.exit_code == 0, shown.output
    assert [step["step"] for step in metrics(out / "runs" / "hot-s5")] == [1, 2]
    assert evaluations(out / "runs" / "hot-s5")[0] == evaluations(out / "runs" / "recipe-s5")[0]  # the base is shared
    assert not list(out.glob("runs/*-s5/checkpoints/step_2"))


def test_a_run_of_an_ablation_cannot_be_resumed_alone(done, tmp_path: Path):
    out, _ = done
    folder = out / "runs" / "hot-s5"
    before = contents(folder)
    result = CliRunner().invoke(app, ["resume", str(folder)])
    assert isinstance(result.exception, CheckpointError)
    assert f"belongs to the ablation in {out}, whose result it would change" in str(result.exception)
    assert contents(folder) == before
    shutil.copytree(folder, tmp_path / "copy")
    result = CliRunner().invoke(app, ["resume", str(tmp_path / "copy"), "run.steps=9"])
    assert isinstance(result.exception, CheckpointError)
    assert "has recorded 2 steps, but its checkpoints are missing" in str(result.exception)
    assert [step["step"] for step in metrics(tmp_path / "copy")] == [1, 2]
    result = CliRunner().invoke(app, ["resume", str(out)])
    assert f"it is an ablation, whose runs are in {out / 'runs'}" in str(result.exception)


def test_the_report_is_one_page_that_shows_every_arm_and_curve(done, page: Any):
    pytest.importorskip("nicegui", reason="the charts need dapo[view]")
    out, _ = done
    page.context.set_offline(True)
    page.goto((out / "ablation.html").as_uri())
    page.locator(".chart canvas").first.wait_for()
    assert page.locator(".chart canvas").count() == page.locator(".chart").count() == 5
    text = page.inner_text("body")
    for words in ("held_out: avg@2 in %, 8 questions", "one seed: no verdict", "broken-s5: failed", "optim.lr=0.01",
                  "With one seed there are no verdicts"):  # fmt: skip
        assert words in text, words
    assert page.locator("svg circle").count() == 3  # the interval of `hot` at three places
    ticks = page.evaluate(f"[0, 0.81234, 24.4873, 331.8123, 7863].map({_X_TICK})")
    assert ticks == ["0", "0.8", "24.5", "332", "7.863k"]
    for width in (390, 720):
        page.set_viewport_size({"width": width, "height": 800})
        page.reload()
        page.locator(".chart canvas").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width  # tables scroll in their own boxes


def test_nothing_starts_if_an_arm_cannot_run(tmp_path: Path):
    recipe = write_recipe(tmp_path)
    cases = {
        "arm 'odd': .*missing.py": ["--arm", f"odd: reward.use={tmp_path}/missing.py:f", "--arm", "b: optim.lr=0.1"],
        "arm 'a': .*optim.lr": ["--arm", "a: optim.lr=no"],
        r"^/.*no/eval.jsonl": ["--arm", "a: optim.lr=0.1", f"eval.data={tmp_path}/no/eval.jsonl"],
    }
    for sentence, arguments in cases.items():
        result = ablate(recipe, *arguments, "--out", tmp_path / "out")
        assert isinstance(result.exception, NotReady), result.output
        assert len(result.exception.sentences) == 1
        assert re.search(sentence, result.exception.sentences[0])
    both = ablate(recipe, "--steps", 2, "--seconds", 3, "--out", tmp_path / "out")
    assert isinstance(both.exception, ConfigError) and "give only one" in str(both.exception)
    twice = ablate(recipe, "--steps", 2, "run.steps=3", "--out", tmp_path / "out")
    assert isinstance(twice.exception, ConfigError)
    assert (
        str(twice.exception) == "override 'run.steps=3': the budget of a run is 2 steps already; give only one of them"
    )
    assert not (tmp_path / "out").exists()


def test_an_environment_that_the_rows_do_not_fit_is_found_before_the_first_arm_is_trained(tmp_path: Path):
    """The arm reads the same data as the reference, which has no environment."""
    result = ablate(write_recipe(tmp_path), "--arm", "game: environment.use=guess", "--out", tmp_path / "out")
    assert isinstance(result.exception, NotReady), result.output
    assert all(sentence.startswith("arm 'game': ") for sentence in result.exception.sentences)
    assert "guess needs a whole number from 1 to 16" in result.exception.sentences[0]
    assert not (tmp_path / "out").exists()


def test_a_warning_about_one_arm_names_it(tmp_path: Path):
    arm = "far: model.path=nobody/no-such-model"
    result = ablate(write_recipe(tmp_path), "--arm", arm, "--dry-run", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "warning: arm 'far': model: nobody/no-such-model is not on this machine" in result.output


def test_a_model_that_cannot_be_fetched_is_found_before_the_first_arm_is_trained(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    arms = ("--arm", "far: model.path=nowhere", "--arm", "further: model.path=nowhere optim.lr=0.1")
    result = ablate(write_recipe(tmp_path), *arms, "--out", tmp_path / "out")
    assert isinstance(result.exception, NotReady), result.output
    (sentence,) = result.exception.sentences
    assert sentence.startswith("arms 'far', 'further': nowhere: is not a local directory and could not be fetched from")
    assert not (tmp_path / "out").exists()


def test_models_are_fetched_once_before_the_first_arm_is_trained(tmp_path: Path, monkeypatch):
    recipe, events = write_recipe(tmp_path), []
    monkeypatch.setattr("dapo.model.loading.fetch_from_hub", lambda name: events.append(name))
    monkeypatch.setattr("dapo.commands.ablate._run", lambda *_, **__: events.append("trains"))
    arms = ("--arm", "small: model.path=gpt2", "--arm", "hot: model.path=gpt2 optim.lr=0.1", "--out", tmp_path / "out")
    assert ablate(recipe, *arms, "--dry-run").exit_code == 0
    assert events == []
    result = ablate(recipe, *arms)
    assert result.exit_code == 0, result.output
    assert events == ["gpt2", "trains"]


def test_nothing_starts_if_ray_cannot_place_the_runs(tmp_path: Path):
    recipe, out = write_recipe(tmp_path), tmp_path / "out"
    cases = {
        "^arm 'wide': cluster.learners, .* place parts of a run on Ray, but --ray places whole runs; leave out": [
            "local", "--arm", "wide: cluster.rollout_workers=1"
        ],
        "^model.device is cuda:1, but Ray assigns GPUs": ["local", "--arm", "a: optim.lr=0.1", "model.device=cuda:1"],
        "^--ray is nonsense, expected HOST:PORT of": ["nonsense", "--arm", "a: optim.lr=0.1"],
        "^--ray is ray://head:10001, but a driver must": ["ray://head:10001", "--arm", "a: optim.lr=0.1"],
    }  # fmt: skip
    for sentence, (address, *arguments) in cases.items():
        result = ablate(recipe, *arguments, "--out", out, "--ray", address)
        assert isinstance(result.exception, DapoError) and result.exception.exit_code == 2, result.output
        assert re.search(sentence, str(result.exception)), result.exception
        assert not out.exists()


def test_a_dry_run_shows_the_arms_and_leaves_nothing(tmp_path: Path):
    result = ablate(write_recipe(tmp_path), "--dry-run", "--out", tmp_path / "out", "optim.ppo_mini_batch_size=4")
    assert result.exit_code == 0, result.output
    assert "6 arms x 3 seeds, 6 steps each" in result.output
    assert "full *" in result.output
    assert "warning: +overlong-filter and +clip-higher will train identically" in result.output
    assert "warning: with 3 seeds and 5 comparisons, no arm is called better or worse unless" in result.output
    assert not (tmp_path / "out").exists()


def contents(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def test_a_dry_run_in_the_folder_of_an_ablation_shows_the_arms_and_says_what_training_needs(done):
    out, _ = done
    recipe, arms = out.parent / "recipe.yaml", out.parent / "arms.yaml"
    command = [recipe, "--arms", arms, "--seeds", 1, "--out", out, "--dry-run"]
    before = contents(out.parent)
    for steps, sentence in {
        2: f"warning: {out}: already holds this ablation; continue it with --resume, or choose another --out",
        3: f"warning: {out}: holds another ablation: its budget is 2 steps, not 3 steps; choose another --out",
    }.items():
        result = ablate(*command, "--steps", steps)
        assert result.exit_code == 0, result.output
        assert f"3 arms x 1 seed, {steps} steps each" in result.output
        assert sentence in result.output
    wrong = ablate(*command, "--arm", f"odd: reward.use={out}/missing.py:f")
    assert isinstance(wrong.exception, NotReady) and "missing.py" in str(wrong.exception)  # the arms are checked
    assert contents(out.parent) == before


@pytest.mark.parametrize("out", ["FOLDER/out", "."])
def test_a_dry_run_in_a_folder_with_other_things_shows_the_arms(out: str, tmp_path: Path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    monkeypatch.chdir(tmp_path / "out")
    out = out.replace("FOLDER", str(tmp_path))
    result = ablate(write_recipe(tmp_path), "--arm", "a: optim.lr=0.1", "--dry-run", "--out", out)
    assert result.exit_code == 0, result.output
    assert "2 arms x 3 seeds, 6 steps each" in result.output
    assert f"warning: {out}: holds something else, not an ablation; choose another --out" in result.output


def test_a_result_that_cannot_be_written_yet_stops_no_run(tmp_path: Path, monkeypatch):
    compare, calls = results.compare, []

    def fails_once(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise ValueError("too few points")
        return compare(*arguments)

    monkeypatch.setattr(results, "compare", fails_once)
    out = tmp_path / "out"
    result = ablate(
        write_recipe(tmp_path), "--arm", "hot: optim.lr=0.01", "--seeds", 1, "--steps", 2, "--out", out, "-q"
    )
    assert result.exit_code == 0, result.output
    assert "the result so far could not be written: too few points" in result.output
    assert [run["failure"] for run in json.loads((out / "ablation.json").read_text())["runs"]] == [None, None]


def test_another_recipe_cannot_resume(done):
    out, _ = done
    recipe, arms = out.parent / "recipe.yaml", out.parent / "arms.yaml"
    result = ablate(recipe, "optim.lr=0.5", "--arms", arms, "--seeds", 1, "--steps", 2, "--out", out, "--resume")
    assert isinstance(result.exception, CheckpointError)
    assert "its optim.lr is 0.001, not 0.5" in str(result.exception)


# In the worker's first call of this number, and only once, the reward tells where it is and waits to be killed.
WAITS = REWARD.replace(
    "def reward(completion, answer, **row):",
    "import time\nfrom pathlib import Path\ncalls = 0\n"
    "def reward(completion, answer, **row):\n"
    "    global calls\n    calls += 1\n"
    "    marker = Path('MARKER')\n"
    "    if calls == 60 and not marker.exists():\n"
    "        marker.touch()\n        time.sleep(600)",
)


def start(recipe: Path, out: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "dapo", "ablate", str(recipe), "--arm", "hot: optim.lr=0.01", "--seeds", "2",
               "--steps", "3", "--out", str(out), "-q", "reward.workers=1", "reward.timeout=700", *more]  # fmt: skip
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ)


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    process = start(write_recipe(folder), folder / "out")
    assert process.wait() == 0, process.communicate()[0]
    return folder / "out"


# A filter that is stuck and reacts to no signal, like a kernel that never ends.
STUCK = """
import signal, time
from pathlib import Path

def keep(group):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    Path("MARKER").touch()
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_third_signal_kills_a_run_that_is_stuck(tmp_path: Path):
    recipe, marker = write_recipe(tmp_path), tmp_path / "marker"
    (tmp_path / "stuck.py").write_text(STUCK.replace("MARKER", str(marker)), encoding="utf-8")
    process = start(recipe, tmp_path / "out", f"algorithm.filter_groups.function={tmp_path}/stuck.py:keep")
    wait_for(marker, process)
    (worker,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(1)  # so that the kernel does not merge them
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT, process.communicate()[0]
    assert not Path(f"/proc/{worker}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, "the worker"])
def test_an_interrupted_ablation_resumes_to_the_result_of_an_uninterrupted_one(how, whole: Path, tmp_path: Path):
    recipe = write_recipe(tmp_path, run={"save_every": 1})
    marker, out = tmp_path / "marker", tmp_path / "out"
    (tmp_path / "reward.py").write_text(WAITS.replace("MARKER", str(marker)), encoding="utf-8")
    process = start(recipe, out)
    wait_for(marker, process)
    if how == "the worker":
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        assert process.wait() == 3  # the others were trained
        assert b"died (signal 9" in process.communicate()[0]
    else:
        process.send_signal(how)
        if how == signal.SIGTERM:
            time.sleep(2)
            process.send_signal(how)  # at once, because the step cannot end
        assert process.wait() == (-9 if how == signal.SIGKILL else 128 + how)
    again = start(recipe, out, "--resume")
    assert again.wait() == 0, again.communicate()[0]
    for run in sorted((whole / "runs").iterdir()):
        assert metrics(out / "runs" / run.name) == metrics(run)
        assert evaluations(out / "runs" / run.name) == evaluations(run)
    ours, theirs = (json.loads((folder / "ablation.json").read_text()) for folder in (out, whole))
    ends = [{arm: each["differences"].get("end") for arm, each in found["sets"]["held_out"]["arms"].items()}
            for found in (ours, theirs)]  # fmt: skip
    assert ends[0] == ends[1]
