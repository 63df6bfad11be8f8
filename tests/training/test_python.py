"""Test training from Python: rows in memory, own loops, the trained model, and what goes wrong."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dapo import Callback, Config, Trainer
from dapo.errors import CheckpointError, ConfigError, DataError, RunExists
from dapo.store.configuration import recorded_config
from dapo.store.database import RunDatabase
from tests import runs
from tests.training.conftest import ROWS, is_unlocked, reward

IDS = torch.tensor([[1, 40, 50, 60, 70, 80]])


def events(run_dir: Path) -> list[str]:
    with RunDatabase.open_readonly(run_dir / "run.db") as database:
        return [f"{event['kind']}: {event['message']}" for event in database.events()]


def test_rows_and_functions_train_and_the_model_generates(make, tmp_path):
    def short(completions, **columns):
        return [float(len(completion) % 2) for completion in completions]

    held_out = ({"prompt": f"held out {i}", "answer": i} for i in range(3))
    trainer = make(reward_funcs=[reward, short], eval_dataset=held_out)
    result = trainer.train()
    assert (result.steps, result.run_dir, result.signal) == (4, tmp_path / "run", None)
    assert [report.name for report in (*result.before, *result.after)] == ["eval_dataset", "eval_dataset"]
    assert {sample.prompt.messages[0]["content"] for sample in result.after[0].samples} == {
        f"held out {i}" for i in range(3)
    }
    with torch.no_grad():
        saved = AutoModelForCausalLM.from_pretrained(result.run_dir / "checkpoints" / "step_4")
        assert torch.equal(trainer.model(IDS).logits, saved(IDS).logits)
        found = trainer.model.generate(IDS, max_new_tokens=4, do_sample=False)
        assert torch.equal(found, saved.generate(IDS, max_new_tokens=4, do_sample=False))
    assert isinstance(trainer.tokenizer.decode(found[0]), str)
    assert not trainer.model.training


def test_rows_train_as_a_file_does(make, tmp_path, whole_run):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    make(train_dataset=file).train()
    runs.assert_same_run(whole_run, tmp_path / "run", step=4)


@pytest.mark.parametrize("rank", [0, 4])
def test_the_model_can_be_used_during_training_and_does_not_change_it(make, tmp_path, whole_run, rank):
    texts = []

    def use(trainer, step):
        model = trainer.model
        assert not any("lora" in name for name, _ in model.named_parameters())
        texts.append(model.generate(IDS, max_new_tokens=4, do_sample=False).tolist())

    used = make({"model.lora.rank": rank}, callbacks=use)
    used.train()
    plain = whole_run if rank == 0 else make({"model.lora.rank": rank, "run.name": "plain"}).train().run_dir
    runs.assert_same_run(tmp_path / "run", plain, step=4)
    assert len(texts) == 4
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step_4")
    with torch.no_grad():
        assert torch.equal(used.model(IDS).logits, saved(IDS).logits)


def test_a_resumed_run_keeps_its_options_and_refuses_other_rows(make, tmp_path, whole_run):
    make({"run.name": "parts", "run.steps": 2}).train()
    place = {"run.dir": tmp_path, "run.name": "parts"}
    with pytest.raises(CheckpointError, match="the questions are not those that the run was trained on so far"):
        Trainer({**place, "run.steps": 4}, reward, train_dataset=ROWS[:5], resume=True, quiet=True)
    with pytest.raises(DataError, match="were given to Trainer as train_dataset; give them again"):
        Trainer({**place, "run.steps": 4}, reward, resume=True, quiet=True)
    resumed = Trainer({**place, "run.steps": 4}, reward, train_dataset=iter(ROWS), resume=True, quiet=True)
    assert resumed.train().steps == 4
    runs.assert_same_run(whole_run, tmp_path / "parts", step=4)
    assert recorded_config(tmp_path / "parts").optim.lr == 1e-3
    assert events(tmp_path / "parts").count("configuration: changed on resume: run.steps 2 -> 4") == 1


def test_the_same_cell_again_starts_the_next_run_unless_the_name_is_given(make, tmp_path):
    first = make({"run.steps": 1})
    second = make({"run.steps": 1})
    assert (first.config.run.name, second.config.run.name) == ("run", "run-2")
    assert first.train().run_dir == tmp_path / "run"
    assert second.train().run_dir == tmp_path / "run-2"
    make({"run.steps": 1}).train()
    for name, held in (("run-2", "a run that is training now"), ("run-3", "another run")):
        assert f"configuration: {tmp_path / 'run'} holds {held}, so this one is {tmp_path / name}" in events(
            tmp_path / name
        )
    with pytest.raises(RunExists, match=r"already holds a run; continue it with --resume \(from Python: resume=True\)"):
        make({"run.name": "run"})
    with pytest.raises(RunExists, match="already holds a run"):
        Trainer(first.config, reward, train_dataset=ROWS, quiet=True)


def test_a_second_train_continues_a_run_that_ended_early_and_says_that_a_finished_one_has_ended(
    make, tmp_path, whole_run
):

    def stop(trainer, step):
        if step.step == 3 and len(runs.metrics(tmp_path / "parts")) <= 3:
            trainer.stop()

    trainer = make({"run.name": "parts"}, callbacks=[stop])
    assert trainer.train().steps == 3
    assert is_unlocked(tmp_path / "parts")
    assert "interrupted: after step 3" in events(tmp_path / "parts")
    trainer.callbacks.members.clear()
    assert trainer.train().steps == 4
    runs.assert_same_run(whole_run, tmp_path / "parts", step=4)
    with pytest.raises(CheckpointError, match=r"has already finished 4 steps; to continue, make a Trainer with resume"):
        trainer.train()
    assert trainer.result.steps == 4


def test_a_loop_over_steps_yields_every_report_and_leaving_it_saves(make, tmp_path, whole_run):
    trainer = make({"run.name": "parts"})
    for step in trainer.steps():
        assert not is_unlocked(tmp_path / "parts")
        assert step.metrics["groups/kept"] == sum(group.kept for group in step.groups)
        assert "groups" not in repr(step).replace("groups/", "")
        if step.step == 3:
            break
    assert (trainer.step, trainer.result.steps) == (3, 3)
    assert is_unlocked(tmp_path / "parts")
    assert [step.step for step in trainer.steps()] == [4]
    runs.assert_same_run(whole_run, tmp_path / "parts", step=4)


def test_an_exception_in_the_loop_body_leaves_the_run_saved_and_unlocked(make, tmp_path):
    def loop() -> None:
        for step in make().steps():
            assert step.step == 0, "mine"

    with pytest.raises(AssertionError, match="mine"):
        loop()
    assert is_unlocked(tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "step_1").is_dir()


def test_closing_inside_the_loop_ends_it_unsaved(make, tmp_path):
    trainer = make()
    for _ in trainer.steps():
        trainer.close()
    assert trainer.result.steps == 1
    assert is_unlocked(tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_program_that_ends_in_the_middle_of_a_loop_ends_quietly_and_saves(tmp_path, tiny_model):
    program = f"""
from pathlib import Path
from tests.training.conftest import make_trainer
trainer = make_trainer(Path({str(tmp_path)!r}), Path({str(tiny_model)!r}), quiet=False)
loop = trainer.steps()
next(loop)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    assert "interrupted: after step 1" in ended.stdout
    assert (tmp_path / "run" / "checkpoints" / "step_1").is_dir()


def test_a_trainer_that_is_training_refuses_to_train_twice_at_once(make):
    trainer = make()
    loop = trainer.steps()
    next(loop)
    with pytest.raises(RunExists, match="this Trainer is training already"):
        trainer.train()
    loop.close()


@pytest.mark.parametrize("has_trained", [False, True])
def test_a_deleted_trainer_leaves_no_lock_and_no_process(make, tmp_path, has_trained):
    trainer = make({"run.steps": 1}, reward_funcs={"math": 1.0, reward: 1.0})
    pool = trainer.judge.terms[0].judge.pool
    workers = [worker.process.pid for worker in pool.workers]
    assert workers
    assert not is_unlocked(tmp_path / "run")
    if has_trained:
        trainer.train()
    alive, _ = weakref.ref(trainer), gc.disable()
    try:
        del trainer
        assert alive() is None, "its memory is free at once, without waiting for the garbage collector"
    finally:
        gc.enable()
    assert is_unlocked(tmp_path / "run")
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    if not has_trained:
        assert make({"run.steps": 1}).config.run.name == "run", "a run without a step does not block its name"


def test_training_works_inside_a_running_event_loop_and_in_another_thread(make, tmp_path, whole_run):
    async def judged(completion, answer):
        await asyncio.sleep(0)
        return reward(completion, answer)

    async def main() -> None:
        make({"run.name": "loop"}, reward_funcs=judged).train()

    asyncio.run(main())
    runs.assert_same_run(tmp_path / "loop", whole_run, step=4)
    thread = threading.Thread(target=lambda: make({"run.name": "thread"}).train())
    thread.start()
    thread.join()
    runs.assert_same_run(tmp_path / "thread", whole_run, step=4)


def test_progress_is_printed_unless_it_is_switched_off(make, capsys):
    make({"run.steps": 1}, quiet=False).train()
    printed = capsys.readouterr().out
    assert "train_dataset: 6 rows, 6 distinct" in printed
    assert "finished: after step 1" in printed
    make({"run.steps": 1}, quiet=True).train()
    assert capsys.readouterr().out == ""


def test_mistakes_are_reported_before_anything_is_written(make, tmp_path):
    with pytest.raises(DataError, match="train_dataset, row 7: column 'answer' is missing"):
        make(train_dataset=[*ROWS, {"question": "no answer"}])
    with pytest.raises(ConfigError, match=r"callbacks: Callback is a class; give an object of it: Callback\(\.\.\.\)"):
        make(callbacks=[Callback])
    with pytest.raises(ConfigError, match="callbacks: int is neither a function"):
        make(callbacks=[3])
    with pytest.raises(ConfigError, match="a reward that is given as a Python function runs in the trainer's process"):
        make({"cluster.reward_workers": 1})
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_from_python_is_the_run_of_the_command_line(tmp_path):
    recipe = runs.recipe(tmp_path)
    of_config = Trainer(Config.load(recipe, ["run.steps=2"]), reward, quiet=True).train()
    trainer = Trainer(recipe, reward, run={"steps": 2}, quiet=True)
    assert trainer.train().run_dir.name == "recipe-2"
    runs.assert_same_run(of_config.run_dir, trainer.config.run_dir, step=2)
    with RunDatabase.open_readonly(trainer.config.run_dir / "run.db") as database:
        assert database.meta()["recipe"] == "recipe"
