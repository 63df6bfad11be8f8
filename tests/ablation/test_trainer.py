"""One run of an ablation: it ends when its budget is spent, is evaluated then, and shares the first evaluation."""

from __future__ import annotations

import gc
import signal
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dapo.ablation.plan import Budget, Plan
from dapo.ablation.records import Status, read_runs, read_status
from dapo.ablation.session import recorded_base
from dapo.ablation.task import Task
from dapo.ablation.trainer import ArmTrainer, BudgetReporter
from dapo.ablation.warnings import warnings
from dapo.errors import RewardError
from dapo.store.database import RunDatabase
from dapo.terminal.console import Reporter
from dapo.types import EventKind
from tests.ablation.recipes import plan_of, write_recipe
from tests.runs import REWARD, Interrupts, eval_sets, metrics
from tests.training.test_faults import Losses


def task(plan: Plan, number: int = 0, **changes) -> Task:
    made = Task(plan.runs[number].config, plan.budget, "recipe", False, None, False, "quiet")
    return replace(made, **changes)


def train(given: Task) -> ArmTrainer:
    trainer = ArmTrainer(given, Reporter())
    trainer.train()
    return trainer


def test_a_budget_of_tokens_ends_the_run_with_the_step_in_which_it_is_spent(tmp_path: Path):
    plan = plan_of(write_recipe(tmp_path, eval={"every": 0}), "a: optim.lr=0.1", budget=Budget("tokens", 400))
    trainer = train(task(plan))
    folder = plan.runs[0].folder
    generated = [step["tokens/generated"] for step in metrics(folder)]
    assert sum(generated[:-1]) < 400 <= sum(generated) == trainer.tokens
    assert read_status(folder) == Status.FINISHED
    record = read_runs(plan, {})[0]
    points = record.evaluations["held_out"]
    assert [(each.step, each.tokens) for each in points] == [(0, 0.0), (len(generated), sum(generated))]
    assert points[-1].seconds == pytest.approx(trainer.seconds)
    assert not list(folder.glob("checkpoints/*"))
    assert record.training.tokens == sum(generated)


def test_without_dynamic_sampling_no_group_is_replaced_or_carried_over(tmp_path: Path):
    """Most responses of this model are cut off, so some groups have nothing to train on."""
    recipe = write_recipe(tmp_path, eval={"every": 0}, data={"max_response_length": 3})
    plan = plan_of(recipe, "+overlong-filter", budget=Budget("steps", 3))
    train(task(plan, [run.arm for run in plan.runs].index("+overlong-filter")))
    (steps,) = [metrics(run.folder) for run in plan.runs if run.arm == "+overlong-filter"]
    assert [step["groups/generated"] for step in steps] == [4, 4, 4]
    assert [step["groups/carried"] for step in steps] == [0, 0, 0]
    assert sum(step.get("groups/dropped/nothing_to_train", 0) for step in steps) > 0


def test_with_an_importance_correction_a_clip_changes_no_weight_even_of_groups_carried_over(tmp_path: Path):
    correct = ["optim.ppo_mini_batch_size=4", "algorithm.importance_correction=token-truncated"]
    plan = plan_of(write_recipe(tmp_path, optim={"lr": 0.05}), "tight: algorithm.clip_ratio_high=0.0001",
                   overrides=correct, budget=Budget("steps", 3))  # fmt: skip
    ours, theirs = (train(task(plan, number)).policy.model.state_dict() for number in (0, 1))
    assert sum(step["groups/carried"] for step in metrics(plan.runs[0].folder)) > 0
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("arm", "options", "is_exact"),
    [
        ("algorithm.max_staleness=3", ["algorithm.filter_groups.enable=false", "data.gen_batch_size=4"], True),
        ("algorithm.max_staleness=0", ["algorithm.filter_groups.enable=false", "data.gen_batch_size=4"], True),
        ("algorithm.filter_groups.max_num_gen_batches=3", ["algorithm.filter_groups.enable=false"], True),
        ("optim.ppo_mini_batch_size=4", ["optim.ppo_mini_batch_size=0"], True),
        ("data.gen_batch_size=4", ["data.gen_batch_size=0", "algorithm.max_staleness=0"], True),
        ("algorithm.importance_correction=token-truncated", ["algorithm.max_staleness=0"], False),
        ("algorithm.importance_correction=sequence-masked", ["algorithm.max_staleness=0"], False),
        ("optim.max_tokens_per_micro_batch=64", [], False),
    ],
)
def test_arms_that_are_said_to_train_identically_do(tmp_path: Path, arm: str, options: list[str], is_exact: bool):
    recipe = write_recipe(tmp_path, optim={"lr": 0.01}, eval={"every": 0})
    plan = plan_of(recipe, f"a: {arm}", overrides=options, budget=Budget("steps", 3))
    said = "\n".join(warnings(plan))
    assert f"a and recipe will train identically{'' if is_exact else ' up to rounding'}: " in said
    ours, theirs = (train(task(plan, number)).policy.model.state_dict() for number in (0, 1))
    # AdamW makes a whole step of a tiny gradient, so single weights may differ by more than rounding.
    most = 0.0 if is_exact else 1e-5
    assert all((values - theirs[name]).abs().mean() <= most for name, values in ours.items())


@pytest.mark.parametrize("budget", [Budget("seconds", 1000.0), Budget("tokens", 4000), Budget("steps", 2)])
def test_the_progress_bar_shows_what_is_spent_of_the_budget_also_before_the_first_step_of_a_resume(tmp_path, budget):
    recipe = write_recipe(tmp_path, eval={"every": 0}, run={"save_every": 1})
    plan = plan_of(recipe, "a: optim.lr=0.1", budget=budget)

    def bar(trainer: ArmTrainer) -> tuple[str, float | None, float]:
        assert isinstance(trainer.reporter, BudgetReporter)
        with trainer.reporter.training(trainer.config, trainer.step):
            (shown,) = trainer.reporter.progress.tasks
            return shown.description, shown.total, shown.completed

    trainer = ArmTrainer(task(plan), BudgetReporter(budget, "quiet"))
    assert bar(trainer) == (budget.unit, budget.amount, 0)
    for _ in trainer.steps():
        trainer.stop()
    resumed = ArmTrainer(task(plan, resume=True), BudgetReporter(budget, "quiet"))
    spent = {"seconds": round(resumed.seconds, 1), "tokens": resumed.tokens, "steps": 1}[budget.unit]
    assert bar(resumed) == (budget.unit, budget.amount, spent)
    assert resumed.tokens > 0
    resumed.close()


def test_undone_steps_do_not_count_against_the_budget(tmp_path: Path):
    recipe = write_recipe(tmp_path, eval={"every": 0}, run={"save_every": 1})
    plan = plan_of(recipe, "a: optim.lr=0.1", budget=Budget("tokens", 900))
    trainer = ArmTrainer(task(plan), Reporter())
    Losses(trainer).lose("save", 2)  # the checkpoint of step 2: the run returns to step 1
    trainer.train()
    generated = [step["tokens/generated"] for step in metrics(plan.runs[0].folder)]
    assert len(generated) > 2
    assert sum(generated[:-1]) < 900 <= sum(generated) == trainer.tokens


def test_an_interrupted_run_resumes_to_the_same_result_and_budget(tmp_path: Path):
    whole, halted = (
        plan_of(write_recipe(tmp_path, run={"save_every": 1}), "a: optim.lr=0.1", out=tmp_path / name,
                budget=Budget("tokens", 900))
        for name in ("whole", "halted")
    )  # fmt: skip
    train(task(whole))
    stopped = ArmTrainer(task(halted), Reporter())
    for _ in stopped.steps():
        stopped.stop()
    assert read_status(halted.runs[0].folder) == Status.UNFINISHED
    train(task(halted, resume=True))
    assert metrics(halted.runs[0].folder) == metrics(whole.runs[0].folder)
    assert len(metrics(whole.runs[0].folder)) > 1
    assert read_status(halted.runs[0].folder) == Status.FINISHED


def test_the_first_evaluation_of_another_arm_is_its_own(tmp_path: Path):
    plan = plan_of(write_recipe(tmp_path), "hot: optim.lr=0.1", budget=Budget("steps", 1))
    own, shared = plan.runs[0].folder, plan.runs[1].folder
    train(task(plan, 0))
    train(task(plan, 1, base=recorded_base(plan.runs[1], plan)))
    alone = plan_of(write_recipe(tmp_path), "hot: optim.lr=0.1", budget=Budget("steps", 1), out=tmp_path / "alone")
    train(task(alone, 1))
    first, taken, made = (RunDatabase.open_readonly(f / "run.db") for f in (own, shared, alone.runs[1].folder))
    with first, taken, made:
        notes = [event["message"] for event in taken.events()]
        assert (
            "the evaluation before the first step is that of recipe-s5: same model, questions and random numbers"
            in notes
        )
        for step in (0, 1):
            (a,), (b,) = taken.eval_reports(step), made.eval_reports(step)
            assert a.metrics == b.metrics
            assert [(s.rollout.text, s.score) for s in a.samples] == [(s.rollout.text, s.score) for s in b.samples]
        query = "SELECT * FROM prompts ORDER BY uid"  # with their messages, which the page shows
        assert list(taken._rows(query)) == list(made._rows(query))


def test_other_questions_are_evaluated_again(tmp_path: Path):
    plan = plan_of(write_recipe(tmp_path), "hot: optim.lr=0.1", budget=Budget("steps", 1))
    train(task(plan, 0))
    file = tmp_path / "eval.jsonl"
    file.write_text(file.read_text().replace("other", "another"), encoding="utf-8")
    base = recorded_base(plan.runs[1], plan)
    assert base is not None
    train(task(plan, 1, base=base))
    with RunDatabase.open_readonly(plan.runs[1].folder / "run.db") as database:
        assert len(database.eval_reports(0)) == 1
        assert not any("that of recipe-s5" in event["message"] for event in database.events())


def test_a_checkpoint_is_kept_if_asked_for(tmp_path: Path):
    plan = plan_of(write_recipe(tmp_path), "hot: optim.lr=0.1", budget=Budget("steps", 1))
    train(task(plan, 0, keeps_checkpoint=True))
    assert [path.name for path in plan.runs[0].folder.glob("checkpoints/step_*")] == ["step_1"]


@pytest.mark.parametrize("keeps_checkpoint", [False, True])
@pytest.mark.parametrize("budget", [Budget("steps", 2), Budget("tokens", 200)])
def test_a_run_whose_last_evaluation_was_interrupted_makes_up_for_it_when_resumed(
    tmp_path: Path, keeps_checkpoint: bool, budget: Budget
):
    """A signal interrupts the second of two sets. The steps are not trained again."""
    options = {"every": 0, "data": eval_sets(tmp_path)}
    recipe = write_recipe(tmp_path, run={"save_every": 0}, eval=options, rollout={"n": 4, "max_concurrent": 4})
    plan = plan_of(recipe, "a: optim.lr=0.1", budget=budget)
    folder = plan.runs[0].folder

    def evaluated() -> dict[str, list[int]]:
        found = read_runs(plan, {})[0].evaluations
        return {name: [each.step for each in evaluations] for name, evaluations in found.items()}

    ArmTrainer(task(plan, keeps_checkpoint=keeps_checkpoint), Interrupts(2, name="hard")).train()
    before = metrics(folder)
    assert len(before) == 2
    assert read_status(folder) == Status.UNFINISHED
    assert evaluated() == {"easy": [0], "hard": [0]}
    train(task(plan, resume=True, keeps_checkpoint=keeps_checkpoint))
    assert str(metrics(folder)) == str(before), "the steps are not trained again"
    assert read_status(folder) == Status.FINISHED
    assert evaluated() == {"easy": [0, 2], "hard": [0, 2]}


def test_a_run_that_ended_early_makes_up_only_an_interrupted_evaluation_when_resumed(tmp_path: Path):
    (tmp_path / "solved.py").write_text("def reward(completion, answer):\n    return 1.0\n", encoding="utf-8")
    once = {"filter_groups": {"max_num_gen_batches": 1}}
    recipe = write_recipe(tmp_path, eval={"every": 0, "k": 4}, algorithm=once, rollout={"n": 4, "max_concurrent": 4})
    plan = plan_of(recipe, f"solved: reward.use={tmp_path / 'solved.py'}:reward", budget=Budget("steps", 9))
    folder = plan.runs[1].folder
    for resume in (False, True):  # interrupted twice
        ArmTrainer(task(plan, 1, resume=resume), Interrupts(0 if resume else 3)).train()
        assert len(metrics(folder)) == 3
        assert read_status(folder) == Status.UNFINISHED
    train(task(plan, 1, resume=True))
    record = read_runs(plan, {})[1]
    assert len(metrics(folder)) == 3
    assert [each.step for each in record.evaluations["held_out"]] == [0, 3]
    assert record.status == read_status(folder) == Status.ENDED_EARLY
    assert record.reason is not None and "all responses had the same score" in record.reason


class Killed(Exception):
    """Stands for the end of a process: nothing is recorded after it."""


class DiesInEvaluation(Reporter):
    """Ends the run in the evaluation after `step`."""

    def __init__(self, step: int) -> None:
        self.at, self.step_now = step, 0

    def step(self, report) -> None:
        self.step_now = report.step

    def phase(self, name: str) -> None:
        if name.startswith("evaluating") and self.step_now == self.at:
            raise Killed


def test_a_run_that_ended_early_and_was_killed_in_its_evaluation_takes_no_further_step(tmp_path: Path):
    (tmp_path / "solved.py").write_text("def reward(completion, answer):\n    return 1.0\n", encoding="utf-8")
    once = {"filter_groups": {"max_num_gen_batches": 1}}
    recipe = write_recipe(tmp_path, eval={"every": 0}, algorithm=once)
    plan = plan_of(recipe, f"solved: reward.use={tmp_path / 'solved.py'}:reward", budget=Budget("steps", 9))
    folder = plan.runs[1].folder
    with pytest.raises(Killed):
        ArmTrainer(task(plan, 1), DiesInEvaluation(3)).train()
    assert read_status(folder) == Status.UNFINISHED
    train(task(plan, 1, resume=True))
    assert len(metrics(folder)) == 3
    assert read_status(folder) == Status.ENDED_EARLY


def test_a_first_evaluation_that_the_judge_missed_is_made_again_and_not_shared(tmp_path: Path):
    recipe, judge = write_recipe(tmp_path, eval={"every": 0}), tmp_path / "reward.py"
    down = "def reward(completion, answer):\n    raise ConnectionError('the judge is down')\n"
    judge.write_text(down, encoding="utf-8")
    plan = plan_of(recipe, "a: optim.lr=0.1", budget=Budget("steps", 1))
    with pytest.raises(RewardError, match="the judge is down"):
        train(task(plan, 0))
    judge.write_text(REWARD, encoding="utf-8")
    base = recorded_base(plan.runs[1], plan)
    assert base is not None
    train(task(plan, 1, base=base))
    train(task(plan, 0, resume=True))
    for record in read_runs(plan, {}):
        assert record.metric == {"held_out": "avg@2"}
        assert [len(each.values) for each in record.evaluations["held_out"]] == [8, 8]


def test_a_run_that_failed_trains_on_when_resumed_also_if_interrupted(tmp_path: Path):
    plan = plan_of(write_recipe(tmp_path, run={"save_every": 1}), "a: optim.lr=0.1", budget=Budget("steps", 2))
    folder = plan.runs[0].folder
    trainer = ArmTrainer(task(plan), Reporter())
    for _ in trainer.steps():
        trainer.recorder.event(EventKind.STOPPED, "the judge failed")
        trainer.close()
        break
    for resume in range(2):
        trainer = ArmTrainer(task(plan, resume=True), Reporter())
        if resume == 0:
            trainer.stopping.signal = signal.SIGINT  # before the first step
        trainer.train()
    assert len(metrics(folder)) == 2
    assert read_status(folder) == Status.FINISHED


def test_nothing_of_a_run_stays_in_memory_for_the_next_one(tmp_path: Path):
    plan = plan_of(write_recipe(tmp_path), "hot: optim.lr=0.1", budget=Budget("steps", 1))
    reference = weakref.ref(train(task(plan, 0)).policy)
    gc.collect()
    assert reference() is None
