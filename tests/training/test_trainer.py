"""Tests of whole runs: the loop, resuming, interruption, and the files they leave."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from random import random

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo import Config, Trainer
from dapo.algorithm import forecast
from dapo.algorithm.filtering import GroupRules, form_group
from dapo.checkpoint import folder as checkpoint
from dapo.checkpoint.export import export_run
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.errors import CheckpointError, ConfigError, NothingToLearn, RewardError, TrainingStopped
from dapo.kernels import native
from dapo.model import trunk
from dapo.policy.policy import FASTER, Policy
from dapo.store.database import RunDatabase
from dapo.training.run_directory import RunDirectory
from dapo.types import Verdict
from tests import plain, runs
from tests.kernels.ways import native_types, needs_native, needs_native_for
from tests.saved import SavedRun
from tests.tiny import save_tiny

ROOT = Path(__file__).parent.parent.parent


def train(config: Config, **kwargs):
    trainer = Trainer(config, **kwargs)
    try:
        return trainer.train()
    finally:
        trainer.close()


def test_six_steps_at_once_and_three_then_three_more_are_the_same_bit_for_bit(tmp_path):
    # Groups are left to carry over, and the scores of two processes arrive in any order.
    more = ["data.gen_batch_size=9", "reward.workers=2"]
    whole = runs.load(tmp_path, "run.name=whole", *more)
    train(whole)
    train(runs.load(tmp_path, "run.name=parts", "run.steps=3", *more))
    saved = checkpoint.read_state(whole.run_dir.parent / "parts" / "checkpoints" / "step_3")
    assert saved.sampler.carried, "the test needs carried-over groups in the checkpoint"
    parts = runs.load(tmp_path, "run.name=parts", *more)
    train(parts, resume=True)
    runs.assert_same_run(whole.run_dir, parts.run_dir, step=6)
    assert len(runs.metrics(whole.run_dir)) == 6


def test_a_run_that_looks_ahead_skips_prompts_by_their_forecast_and_resumes_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(forecast, "LEAST_GROUPS", 4)
    more = ["algorithm.ledger={enable: true, lookahead: 3, explore: 0.1}", "data.gen_batch_size=9"]
    whole = runs.load(tmp_path, "run.name=whole", *more)
    train(whole)
    train(runs.load(tmp_path, "run.name=parts", "run.steps=3", *more))
    assert checkpoint.read_state(whole.run_dir.parent / "parts" / "checkpoints" / "step_3").sampler.drawer.forecast
    parts = runs.load(tmp_path, "run.name=parts", *more)
    train(parts, resume=True)
    runs.assert_same_run(whole.run_dir, parts.run_dir, step=6)
    assert sum(step["groups/skipped"] for step in runs.metrics(whole.run_dir)) > 10


def test_without_looking_ahead_no_features_are_computed(tmp_path, monkeypatch):
    def refused(policy, prompts):
        raise AssertionError("features were computed")

    monkeypatch.setattr(Policy, "prompt_features", refused)
    assert train(runs.load(tmp_path, "algorithm.ledger={enable: true}", "run.steps=1")).steps == 1
    with pytest.raises(AssertionError, match="features were computed"):
        train(runs.load(tmp_path, "algorithm.ledger={enable: true, lookahead: 2}", "run.steps=1", "run.name=ahead"))


@pytest.mark.parametrize(
    "override",
    [
        "model.dtype=bfloat16",
        "algorithm.kl_loss_coef=0.05",
        "algorithm.max_staleness=0",
        "optim.ppo_epochs=2",
        'rollout.stop=["a", "xy"]',
    ],
)
def test_runs_of_other_kinds_resume_bit_for_bit_too(tmp_path, override):
    more = [override, "algorithm.max_logprob_gap=1.0"]
    whole = runs.load(tmp_path, "run.name=whole", "run.steps=4", *more)
    train(whole)
    train(runs.load(tmp_path, "run.name=parts", "run.steps=2", *more))
    parts = runs.load(tmp_path, "run.name=parts", "run.steps=4", *more)
    train(parts, resume=True)
    runs.assert_same_run(whole.run_dir, parts.run_dir, step=4)


@native_types
def test_with_kernels_a_cpu_samples_the_bits_that_it_trains_and_resumes_bit_for_bit(tmp_path, dtype):
    save_tiny(tmp_path / "model", hidden_size=128, head_dim=32)
    more = [f"model.dtype={str(dtype).removeprefix('torch.')}", "algorithm.max_logprob_gap=0.00001"]
    whole = runs.load(tmp_path, "run.name=whole", "run.steps=4", *more)
    train(whole)
    train(runs.load(tmp_path, "run.name=parts", "run.steps=2", *more))
    parts = runs.load(tmp_path, "run.name=parts", "run.steps=4", *more)
    train(parts, resume=True)
    runs.assert_same_run(whole.run_dir, parts.run_dir, step=4)
    assert max(step["logprob_gap/max"] for step in runs.metrics(whole.run_dir)) < 1e-5


@pytest.mark.parametrize(("dtype", "is_said"), [("float32", True), ("bfloat16", False)])
@needs_native
def test_a_run_says_that_bfloat16_is_faster_here(tmp_path, dtype, is_said):
    save_tiny(tmp_path / "model", hidden_size=128, head_dim=32)
    config = runs.load(tmp_path, "run.steps=1", f"model.dtype={dtype}")
    train(config)
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        said = [event["message"] for event in database.events() if event["kind"] == "plan"]
    assert (FASTER in said) == is_said


@needs_native_for(torch.float32)
def test_a_run_in_float32_says_that_a_compiler_would_make_it_faster(tmp_path, monkeypatch):
    save_tiny(tmp_path / "model", hidden_size=128, head_dim=32)
    monkeypatch.setattr(native, "_loaded", native._loaded.__wrapped__)
    monkeypatch.setenv("CC", "no-such-compiler")
    config = runs.load(tmp_path, "run.steps=1")
    train(config)
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        said = [event["message"] for event in database.events() if event["kind"] == "plan"]
    assert any("about twice as fast" in message and "install one, such as gcc" in message for message in said)


def test_a_run_in_bfloat16_without_the_kernels_says_that_it_is_less_exact(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "_loaded", lambda dtype: "the C compiler cc was not found")
    config = runs.load(tmp_path, "run.steps=1", "model.dtype=bfloat16", "algorithm.max_logprob_gap=1.0")
    train(config)
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        said = [event["message"] for event in database.events() if event["kind"] == "kernels"]
    assert len(said) == 1 and "without the kernels in C: the C compiler cc was not found. " in said[0]


@pytest.mark.parametrize(("shape", "is_said"), [({"head_dim": 8}, True), ({"head_dim": 32}, False)])
@needs_native
def test_a_run_in_bfloat16_says_where_the_kernels_do_not_compute_the_whole_model(tmp_path, shape, is_said):
    save_tiny(tmp_path / "model", **shape)
    config = runs.load(tmp_path, "run.steps=1", "model.dtype=bfloat16", "algorithm.max_logprob_gap=1.0")
    train(config)
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        said = [event["message"] for event in database.events() if event["kind"] == "kernels"]
    assert len(said) == is_said
    assert all("kernels in C: there is none for attention heads of size 8. " in message for message in said)


def test_a_lora_run_resumes_bit_for_bit_too(tmp_path):
    lora = {"rank": 4, "alpha": 8.0}
    whole = runs.load(tmp_path, "run.name=whole", "run.steps=4", model={"lora": lora})
    train(whole)
    train(runs.load(tmp_path, "run.name=parts", "run.steps=2", model={"lora": lora}))
    parts = runs.load(tmp_path, "run.name=parts", "run.steps=4", model={"lora": lora})
    train(parts, resume=True)
    runs.assert_same_run(whole.run_dir, parts.run_dir, step=4)
    base = runs.weights_of(tmp_path / "model")
    merged = runs.weights(whole.run_dir, 4)
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed
    assert all("proj" in name for name in changed)


def test_a_lora_run_on_the_fused_trunk_resumes_bit_for_bit_and_exports_what_it_sampled_from(tmp_path, monkeypatch):
    monkeypatch.setattr(trunk, "_is_fast", lambda model: True)  # as in bf16 on a GPU
    monkeypatch.setattr(trunk, "same_bits_for_any_rows", lambda: None)
    model = {"dtype": "bfloat16", "lora": {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj", "up_proj"]}}
    more = ["algorithm.max_logprob_gap=1.0", "algorithm.kl_loss_coef=0.05"]
    whole = runs.load(tmp_path, "run.name=whole", "run.steps=4", *more, model=model)
    trainer = Trainer(whole)
    trainer.train()
    adapted = trainer.policy.trunk.adapted
    assert adapted and all(weight.is_separate for weight in adapted)
    sampled = {name: tensor.clone() for name, tensor in trainer.policy.weights()}
    trainer.close()
    train(runs.load(tmp_path, "run.name=parts", "run.steps=2", *more, model=model))
    parts = runs.load(tmp_path, "run.name=parts", "run.steps=4", *more, model=model)
    train(parts, resume=True)
    runs.assert_same_run(whole.run_dir, parts.run_dir, step=4)
    base, merged = runs.weights_of(tmp_path / "model"), runs.weights(whole.run_dir, 4)
    assert all(torch.equal(merged[name], tensor) for name, tensor in sampled.items())
    changed = {name.split(".")[-2] for name in base if not torch.equal(base[name].bfloat16(), merged[name])}
    assert changed == {"q_proj", "v_proj", "up_proj"}
    export_run(whole.run_dir, tmp_path / "exported", "4", adapters=True)
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(original, tmp_path / "exported").merge_and_unload().state_dict()
    for name, tensor in merged.items():  # apart from rounding to bf16: of the base, and of the sum
        torch.testing.assert_close(tensor.float(), loaded[name], atol=1e-6, rtol=2**-6)


KILLER = """
import os, signal, sys
where, count = sys.argv[1], int(sys.argv[2])
seen = 0
def watch(event, arguments):
    global seen
    writes = event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir") or (
        event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"))
    if writes and where in str(arguments[0]):
        seen += 1
        if seen == count:
            os.kill(os.getpid(), signal.SIGKILL)
from dapo.cli import main
sys.addaudithook(watch)
sys.argv = ["dapo", *sys.argv[3:]]
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kill_at", [3, 9, 15, 22, 32])
def test_a_run_killed_at_any_write_resumes_to_the_same_weights_and_metrics(tmp_path, kill_at):
    whole = runs.load(tmp_path, "run.name=whole", "run.steps=4", "run.save_every=1")
    train(whole)
    recipe = tmp_path / "recipe.yaml"
    arguments = ["train", str(recipe), "run.name=killed", "run.steps=4", "run.save_every=1"]
    command = [sys.executable, "-c", KILLER, "killed", str(kill_at), *arguments]
    dead = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    again = subprocess.run(
        [sys.executable, "-m", "dapo", *arguments, "--resume"], cwd=ROOT, capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    runs.assert_same_run(whole.run_dir, whole.run_dir.parent / "killed", step=4)


def test_a_run_killed_while_sampling_resumes_from_the_checkpoint(tmp_path):
    """The reward kills the trainer from its worker process in step 5, but not again after the resume."""
    deadly = runs.deadly_reward(tmp_path / "killed")
    whole = runs.load(tmp_path, "run.name=whole")
    train(whole)
    recipe = runs.recipe(tmp_path, reward=deadly)
    command = [sys.executable, "-m", "dapo", "train", str(recipe), "run.name=killed", "reward.workers=1"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == -signal.SIGKILL
    again = subprocess.run([*command, "--resume"], cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    killed = whole.run_dir.parent / "killed"
    runs.assert_same_run(whole.run_dir, killed, step=6)
    with RunDatabase.open_readonly(killed / "run.db") as database:
        assert [event["kind"] for event in database.events() if event["kind"] == "resumed"] == ["resumed"]


def test_ctrl_c_finishes_the_step_saves_and_exits_130(tmp_path):
    interrupting = runs.REWARD.replace(
        "def reward(completion, answer, **row):",
        "import os, signal\ncalls = 0\n"
        "def reward(completion, answer, **row):\n    global calls\n    calls += 1\n"
        "    if calls == 30:\n        os.kill(os.getppid(), signal.SIGINT)",
    )
    recipe = runs.recipe(tmp_path, reward=interrupting)
    command = [sys.executable, "-m", "dapo", "train", str(recipe), "run.name=stopped", "run.save_every=0"]
    command.append("reward.workers=1")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    run_dir = tmp_path / "runs" / "stopped"
    steps = len(runs.metrics(run_dir))
    assert 1 <= steps < 6
    assert (run_dir / "checkpoints" / f"step_{steps}").is_dir()
    again = subprocess.run([*command, "--resume", "run.steps=5"], cwd=ROOT, capture_output=True, text=True)
    assert again.returncode in (0, 130), again.stderr
    assert len(runs.metrics(run_dir)) > steps


def test_one_whole_step_agrees_with_a_plain_padded_float64_oracle(tmp_path):
    """Compare kept groups, advantages, loss, gradient norm and new weights; sampling is not part of the oracle."""
    config = runs.load(tmp_path, "run.steps=1", "optim.ppo_mini_batch_size=4", "optim.warmup_steps=0", "optim.lr=1e-3")
    oracle = plain.in_float64(AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="sdpa"))
    train(config)
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        stored = [(group, list(database.rollouts(group["serial"]))) for group in database.groups()]
        (metrics,) = database.steps()
    mixed = [group["serial"] for group, rollouts in stored if len({r["acc"] for r in rollouts}) > 1]
    kept = [group["serial"] for group, _ in stored if group["verdict"] == "kept"]
    assert kept == mixed[:4]
    assert [g["serial"] for g, _ in stored if g["verdict"] == Verdict.CARRIED] == mixed[4:]
    batch = [rebuild(group, rollouts) for group, rollouts in stored if group["serial"] in kept]
    for group, (_, rollouts) in zip(batch, [pair for pair in stored if pair[0]["serial"] in kept], strict=True):
        expected = plain.advantages([r["score"] for r in rollouts])
        np.testing.assert_allclose([r["advantage"] for r in rollouts], expected, atol=1e-12)
        assert group.kept
    loss = plain.mini_batch_loss(oracle, batch, "token-mean")
    grads = plain.gradients(oracle, loss)
    expected = plain.adamw(dict(oracle.named_parameters()), grads, lr=1e-3, weight_decay=0.1, clip=1.0)
    norm = float(torch.stack([grad.norm() for grad in grads.values()]).norm())
    assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    found = AutoModelForCausalLM.from_pretrained(config.run_dir / "checkpoints" / "step_1")
    for name, value in found.named_parameters():
        # Adam's first step is the sign of the gradient, which rounding decides if the gradient is almost zero.
        steady = grads[name].abs() > 1e-5
        torch.testing.assert_close(value.double()[steady], expected[name].detach()[steady], atol=2e-5, rtol=0)


def rebuild(group, rollouts):
    """Build a Group from its rows in the database."""
    from tests import make

    prompt = make.prompt(group["prompt_tokens"].tolist(), group["answer"])
    records = [
        make.rollout(r["tokens"].tolist(), r["sampler_logprobs"].tolist(), serial=group["serial"], index=i)
        for i, r in enumerate(rollouts)
    ]
    from dapo.types import Score

    scores = [Score(r["score"], acc=bool(r["acc"])) for r in rollouts]
    return form_group(group["serial"], prompt, records, scores, GroupRules(8))


def test_a_checkpoint_loads_in_plain_transformers_and_only_two_are_kept(tmp_path):
    config = runs.load(tmp_path, "run.steps=4", "run.save_every=1")
    train(config)
    folder = config.run_dir / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_3", "step_4"]
    model = AutoModelForCausalLM.from_pretrained(folder / "step_4")
    tokenizer = AutoTokenizer.from_pretrained(folder / "step_4")
    out = model.generate(**tokenizer("hello", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert out.shape[1] == 8
    assert not list(folder.rglob("*.bin")) + list(folder.rglob("*.pt")) + list(folder.rglob("*.pkl"))


def test_the_tokens_of_every_step_add_up_in_the_database(tmp_path):
    config = runs.load(tmp_path)
    train(config)
    steps = runs.metrics(config.run_dir)
    for before, after in pairwise(steps):
        assert before["tokens/carried_out"] == after["tokens/carried_in"]
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        lengths = {
            group["serial"]: sum(rollout["length"] for rollout in database.rollouts(group["serial"]))
            for group in database.groups()
        }
    for step in steps:
        generated = [serial for serial, _, made, _ in runs.verdicts(config.run_dir) if made == step["step"]]
        assert step["tokens/generated"] == sum(lengths[serial] for serial in generated)


def test_staleness_is_averaged_over_the_tokens_trained_on(tmp_path):
    config = runs.load(tmp_path)
    train(config)
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        for step in runs.metrics(config.run_dir):
            trained = [
                (step["step"] - 1 - rollout["weight_version"], rollout["length"])  # every step made an update
                for group in database.groups(verdict="kept")
                for rollout in database.rollouts(group["serial"])
                if group["decided_step"] == step["step"] and rollout["trains"]
            ]
            mean = sum(age * length for age, length in trained) / sum(length for _, length in trained)
            assert step["staleness/mean"] == pytest.approx(mean)
            assert step["staleness/max"] == max(age for age, _ in trained)
            assert (mean > 0) == (step["tokens/carried_in"] > step["tokens/stale"])


def test_a_python_function_is_a_reward_and_the_policy_learns_from_it(tmp_path):
    config = runs.load(
        tmp_path, "run.steps=25", "optim.lr=3e-3", "eval.k=32", "optim.warmup_steps=0", "run.save_every=0"
    )
    result = train(config, reward_funcs=lambda completion, answer: completion.count("e") / 8)
    (before,), (after,) = result.before, result.after
    assert before.metrics["reward/mean"] < 0.1
    assert after.metrics["reward/mean"] > before.metrics["reward/mean"] + 0.2


@pytest.mark.parametrize("coefficient", ["kl_loss_coef", "kl_reward_coef"])
@pytest.mark.parametrize("rank", [0, 4])
def test_the_reference_does_not_change_and_its_kl_starts_at_zero(tmp_path, coefficient, rank):
    model = {"lora": {"rank": rank}}
    config = runs.load(
        tmp_path,
        f"algorithm.{coefficient}=0.1",
        "run.steps=3",
        "optim.lr=3e-2",
        "optim.ppo_mini_batch_size=4",
        model=model,
    )
    trainer = Trainer(config)
    sampled = trainer.sampler.fill(1, 0)
    for group in sampled.batch:
        assert group.ref_logprobs is not None
        for rollout, reference in zip(group.rollouts, group.ref_logprobs, strict=True):
            np.testing.assert_allclose(reference, rollout.logprobs, atol=1e-5)
    trainer.policy.update(sampled.batch, 1, 0)
    again = trainer.policy.reference_logprobs(sampled.batch)
    for group, refs in zip(sampled.batch, again, strict=True):
        for old, new in zip(group.ref_logprobs, refs, strict=True):
            np.testing.assert_allclose(new, old, atol=1e-5)
    trainer.close()


def test_padded_groups_get_reference_log_probabilities_too(tmp_path):
    options = ("algorithm.kl_loss_coef=0.1", "algorithm.filter_groups.on_exhausted=pad", "run.steps=2")
    config = runs.load(tmp_path, *options, "algorithm.filter_groups.max_num_gen_batches=1")
    result = train(config, reward_funcs=lambda completion, answer: float(answer == 3 and "a" in completion))
    assert result.steps == 2
    assert "padded" in {verdict for _, verdict, _, _ in runs.verdicts(config.run_dir)}
    assert all("kl" in step for step in runs.metrics(config.run_dir))


def test_without_kl_no_reference_is_loaded(tmp_path):
    trainer = Trainer(runs.load(tmp_path))
    assert trainer.policy.reference is None
    assert trainer.sampler.reference is None
    trainer.close()


def test_three_steps_without_anything_to_learn_are_saved_and_stop_the_run(tmp_path):
    config = runs.load(tmp_path, "algorithm.filter_groups.max_num_gen_batches=1")
    with pytest.raises(TrainingStopped, match="3 steps in a row"):
        train(config, reward_funcs=lambda completion, answer: 1.0)
    assert len(runs.metrics(config.run_dir)) == 3
    assert checkpoint.read_state(config.run_dir / "checkpoints" / "step_3").step == 3
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        assert [event["kind"] for event in database.events()][-1] == "stopped"


def test_steps_that_only_carry_what_an_earlier_one_found_count_as_empty(tmp_path):
    rule = "{on_exhausted: skip, min_batch_ratio: 1, max_num_gen_batches: 1}"
    config = runs.load(tmp_path, f"algorithm.filter_groups={rule}", "run.steps=12")
    calls = count()  # 24 responses per step: one group of the first step, and one of the third, teach something
    with pytest.raises(NothingToLearn, match=r"3 steps in a row.*in each of them all responses were wrong"):
        train(config, reward_funcs=lambda completion, answer: {"score": 0.0, "acc": next(calls) in (0, 48)})
    assert [step["groups/carried"] for step in runs.metrics(config.run_dir)] == [1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (lambda: {"score": 1.0, "acc": True}, "in each of them all responses were right"),
        (lambda: {"score": 0.0, "acc": False}, "in each of them all responses were wrong"),
        (lambda: random(), "overlong filtering left no response to train on: all were cut off at data.max_response_le"),
        (partial(next, iter([1.0]), None), "in each of them fewer than two responses could be judged"),
    ],
)
def test_a_run_without_anything_to_learn_says_why(tmp_path, score, reason):
    options = ("algorithm.filter_groups.max_num_gen_batches=1", "data.max_response_length=1")
    config = runs.load(tmp_path, *options, "algorithm.overlong_filter=true")
    with pytest.raises(TrainingStopped, match="3 steps in a row found no group to learn from: ") as stopped:
        train(config, reward_funcs=lambda completion, answer: score())
    assert reason in str(stopped.value)
    assert isinstance(stopped.value, NothingToLearn) == ("judged" not in reason)


def test_resuming_a_finished_run_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    config = runs.load(tmp_path, "run.steps=1")
    train(config)
    monkeypatch.setattr("dapo.training.trainer.assemble", lambda *_: pytest.fail("nothing needs to be loaded"))
    with pytest.raises(CheckpointError, match=r"has already finished 1 step; raise run.steps"):
        train(config, resume=True)


def test_a_directory_that_holds_a_run_is_not_overwritten(tmp_path):
    config = runs.load(tmp_path, "run.steps=1")
    train(config)
    with pytest.raises(CheckpointError, match="already holds a run; continue it with --resume"):
        Trainer(config)
    other = runs.load(tmp_path, "run.steps=2", "run.seed=1")
    with pytest.raises(CheckpointError, match=r"run.seed cannot change in a run: it is 5, not 1"):
        Trainer(other, resume=True)


def test_a_dataset_that_changed_since_the_checkpoint_is_refused(tmp_path):
    train(runs.load(tmp_path, "run.steps=1"))
    config = runs.load(tmp_path, "run.steps=2")
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write('\n{"prompt": "one more", "answer": 1}')
    with pytest.raises(CheckpointError, match=r"the questions are not those that .* was trained on so far"):
        Trainer(config, resume=True)


def test_on_exhausted_raise_records_and_saves_the_step_and_then_stops(tmp_path):
    options = ("algorithm.filter_groups.on_exhausted=raise", "algorithm.filter_groups.max_num_gen_batches=1")
    config = runs.load(tmp_path, *options)
    with pytest.raises(TrainingStopped, match=r"step 1: 1 round gave 0 of 4 groups"):
        train(config, reward_funcs=lambda completion, answer: 1.0)
    assert checkpoint.read_state(config.run_dir / "checkpoints" / "step_1").step == 1


def test_a_run_whose_sampler_disagrees_stops_without_a_correction_and_trains_on_with_one(tmp_path, monkeypatch):
    poll = EmbeddedEngine.poll

    def inexact(self):
        """Record log-probabilities as another program would: each one a little off."""
        return [
            replace(r, logprobs=r.logprobs + 0.3 * np.sin(31 * np.arange(len(r)) + r.serial).astype(np.float32))
            for r in poll(self)
        ]

    monkeypatch.setattr(EmbeddedEngine, "poll", inexact)
    with pytest.raises(TrainingStopped, match=r"max_logprob_gap.*algorithm.importance_correction can correct for it"):
        train(runs.load(tmp_path, "run.name=stopped"))
    corrected = runs.load(tmp_path, "run.name=corrected", "algorithm.importance_correction=token-truncated")
    assert train(corrected).steps == 6
    for step in runs.metrics(corrected.run_dir):
        assert 0 <= step["correction/truncated"] < 0.5
        assert step["correction/weight"] == pytest.approx(1, abs=0.2)


def test_a_trainer_releases_its_run_when_it_has_finished(tmp_path):
    Trainer(runs.load(tmp_path, "run.steps=1")).train()
    assert Trainer(runs.load(tmp_path, "run.steps=2"), resume=True).train().steps == 2


def test_a_changed_option_on_resume_is_recorded(tmp_path):
    train(runs.load(tmp_path, "run.steps=1"))
    config = runs.load(tmp_path, "run.steps=2", "optim.lr=1e-4")
    train(config, resume=True)
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        messages = [event["message"] for event in database.events() if event["kind"] == "configuration"]
    assert len(messages) == 1
    assert "optim.lr 0.001 -> 0.0001" in messages[0]
    assert Config.load(config.run_dir / "config.yaml").optim.lr == 1e-4


def test_a_second_trainer_of_a_run_is_refused_before_it_loads_a_model(tmp_path, monkeypatch):
    config = runs.load(tmp_path)
    trainer = Trainer(config)
    monkeypatch.setattr("dapo.training.trainer.assemble", lambda *_: pytest.fail("nothing needs to be loaded"))
    for resume in (True, False):
        with pytest.raises(CheckpointError, match="another Trainer of this program has this run open"):
            Trainer(config, resume=resume)
    trainer.close()


DAMAGED = r"step_1: the checkpoint is damaged .* there is no other checkpoint"
FILES = [
    "model.safetensors", "config.json", "tokenizer.json", "trainer/optimizer.safetensors", "trainer/state.json",
    "trainer/SHA256SUMS",
]  # fmt: skip


def test_a_checkpoint_with_one_bit_changed_anywhere_is_refused_in_one_sentence(tmp_path):
    train(runs.load(tmp_path, "run.steps=1"))
    config = runs.load(tmp_path, "run.steps=2")
    for file in FILES:
        victim = config.run_dir / "checkpoints" / "step_1" / file
        content = victim.read_bytes()
        for place in range(0, len(content), max(1, len(content) // 5)):
            victim.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(
                CheckpointError, match=r"step_1: the checkpoint is damaged .* there is no other checkpoint"
            ):
                RunDirectory(config, resume=True)
        victim.write_bytes(content[: len(content) // 2])
        with pytest.raises(CheckpointError, match=DAMAGED):
            RunDirectory(config, resume=True)
        victim.unlink()
        with pytest.raises(CheckpointError, match=DAMAGED):
            RunDirectory(config, resume=True)
        victim.write_bytes(content)
    saved = config.run_dir / "checkpoints" / "step_1"
    sums = subprocess.run(["sha256sum", "--check", "trainer/SHA256SUMS"], cwd=saved, capture_output=True)
    assert sums.returncode == 0, sums.stderr
    assert sums.stdout.count(b": OK") >= len(FILES) - 1
    assert train(config, resume=True).steps == 2


@pytest.mark.parametrize("found", [2, None])
def test_a_checkpoint_of_an_older_format_is_refused_in_one_sentence(tmp_path, found):
    saved = SavedRun(tmp_path)
    saved.save(1)
    file = saved.folder / "step_1" / "trainer" / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": found}))
    (saved.folder / "step_1" / "trainer" / "SHA256SUMS").unlink()  # format 2 had none
    with pytest.raises(CheckpointError, match=rf"step_1: written in format {found}, .* use the version that wrote it$"):
        checkpoint.read_state(saved.folder / "step_1")


@pytest.mark.parametrize(
    ("key", "value"),
    [("step", "1"), ("step", 1.0), ("recent", [1]), ("ledger", []), ("carried", [{}]), ("best", {}), ("more", 1)],
)
def test_a_state_with_wrong_types_is_refused_in_one_sentence(tmp_path, key, value):
    saved = SavedRun(tmp_path)
    saved.save(1)
    file = saved.folder / "step_1" / "trainer" / "state.json"
    sums, before = file.with_name("SHA256SUMS"), hashlib.sha256(file.read_bytes()).hexdigest()
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    sums.write_text(sums.read_text().replace(before, hashlib.sha256(file.read_bytes()).hexdigest()))
    with pytest.raises(
        CheckpointError, match=rf"the checkpoint is damaged \(ValueError: {key}.* in trainer/state.json"
    ):
        checkpoint.read_state(saved.folder / "step_1")


def test_the_database_has_the_advantages_that_were_trained_on_also_of_carried_groups(tmp_path):
    ledger = "algorithm.ledger={enable: true, correct: true, explore: 0.1}"
    config = runs.load(tmp_path, ledger, "data.gen_batch_size=9", "run.steps=9")
    trainer, trained = Trainer(config), {}
    update = trainer.policy.update

    def recording(groups, step, version):
        trained.update({group.serial: group for group in groups})
        return update(groups, step, version)

    trainer.policy.update = recording
    trainer.train()
    carried = 0
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        for row in [row for row in database.groups() if row["serial"] in trained]:
            group = trained[row["serial"]]
            assert [member["advantage"] for member in database.rollouts(row["serial"])] == group.advantages.tolist()
            plain_group = form_group(group.serial, group.prompt, group.rollouts, group.scores, trainer.sampler.rules)
            is_weighted = not np.array_equal(group.advantages, plain_group.advantages)
            carried += row["generated_step"] < row["decided_step"] and is_weighted
    assert carried, "this test needs carried groups that the ledger's correction weights"


def test_without_carry_over_a_run_is_the_published_algorithm(tmp_path):
    """Whole rounds are sampled, and the surplus is dropped in submission order."""
    config = runs.load(tmp_path, "algorithm.max_staleness=0", "run.steps=3")
    train(config)
    for step in runs.metrics(config.run_dir):
        assert step["groups/generated"] % 6 == 0
        assert step["tokens/carried_in"] == step["tokens/carried_out"] == 0
        assert step["staleness/mean"] == step["staleness/max"] == step["groups/in_flight"] == 0


def test_evaluations_run_before_during_and_after_training(tmp_path):
    config = runs.load(tmp_path, "run.steps=2", "eval.k=3", "eval.every=1", "eval.temperature=0", "run.save_every=0")
    result = train(config)
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        evals = list(database.evals())
    assert result.after[0].step == 2
    assert [(e["step"], e["name"]) for e in evals] == [(0, "data"), (1, "data"), (2, "data")]
    assert all(0 <= e["metrics"]["avg@3"] <= 1 for e in evals)


def test_nothing_depends_on_the_clock_or_on_hash_randomization(tmp_path):
    recipe = runs.recipe(tmp_path)
    for name, seed in (("one", "1"), ("two", "2")):
        command = [sys.executable, "-m", "dapo", "train", str(recipe), f"run.name={name}", "run.steps=3"]
        command.append("reward.workers=2")  # their scores arrive in any order
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    runs.assert_same_run(tmp_path / "runs" / "one", tmp_path / "runs" / "two", step=3)


def test_every_set_is_evaluated_and_its_questions_are_never_trained_on(tmp_path):
    config = runs.load(tmp_path, "run.steps=3", eval={"k": 2, "every": 2, "data": runs.eval_sets(tmp_path)})
    result = train(config)
    assert [report.name for report in result.before] == [report.name for report in result.after] == ["easy", "hard"]
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        done = [(row["step"], row["name"]) for row in database.evals()]
        asked = {group["messages"][0]["content"] for group in database.groups()}
        notes = [event["message"] for event in database.events() if event["kind"] == "data"]
    assert done == [(step, name) for step in (0, 2, 3) for name in ("easy", "hard")]
    assert asked == {f"question {'x' * i}" for i in (0, 3, 4, 5)}
    assert any("2 questions held out for evaluation left out" in note for note in notes)


def test_the_best_checkpoint_by_best_metric_is_kept_besides_the_newest_two(tmp_path):
    options = {"k": 4, "every": 1, "data": runs.eval_sets(tmp_path), "best_metric": "hard/reward/mean"}
    config = runs.load(tmp_path, "run.steps=7", "run.save_every=1", "optim.lr=1e-9", eval=options)
    train(config)
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        rewards = {e["step"]: e["metrics"]["reward/mean"] for e in database.evals() if e["name"] == "hard"}
    best = max((value, -step) for step, value in rewards.items() if step > 0)
    kept = {int(path.name.removeprefix("step_")) for path in (config.run_dir / "checkpoints").glob("step_*")}
    assert kept == {-best[1], 6, 7}
    assert -best[1] < 6, "the test needs a best step that is not among the newest two"
    marked = checkpoint.best(config.run_dir / "checkpoints")
    assert (marked.step, marked.value) == (-best[1], best[0])


def test_an_unknown_best_metric_stops_the_run_before_its_first_step_and_lists_the_metrics(tmp_path):
    config = runs.load(tmp_path, eval={"k": 2, "data": runs.eval_sets(tmp_path), "best_metric": "hard/avg@3"})
    with pytest.raises(ConfigError, match=r"there is no 'hard/avg@3'; the metrics are: .*hard/avg@2"):
        train(config)


def test_with_the_ledger_a_resumed_run_draws_the_same_prompts(tmp_path):
    ledger = {"ledger": {"enable": True, "explore": 0.3}}
    whole = runs.load(tmp_path, "run.name=whole", "run.steps=8", algorithm=ledger)
    train(whole)
    train(runs.load(tmp_path, "run.name=parts", "run.steps=4", algorithm=ledger))
    parts = runs.load(tmp_path, "run.name=parts", "run.steps=8", algorithm=ledger)
    train(parts, resume=True)
    runs.assert_same_run(whole.run_dir, parts.run_dir, 8)
    assert sum(step["groups/skipped"] for step in runs.metrics(whole.run_dir)[4:]) > 0


def test_a_reward_given_as_a_function_is_recorded_and_needed_again_on_resume(tmp_path):
    def by_length(completion):
        return len(completion) % 3

    config = runs.load(tmp_path, "run.steps=1")
    Trainer(config, by_length).train()
    assert Config.load(config.run_dir / "config.yaml").reward.use == "python:by_length"
    with pytest.raises(RewardError, match="was a Python function; pass it to Trainer again"):
        Trainer(Config.load(config.run_dir / "config.yaml", ["run.steps=2"]), resume=True)


def test_functions_with_weights_are_added_and_each_one_is_a_metric(tmp_path):
    def share(completion, answer):
        return {"score": 1.0, "acc": sum(character.isalpha() for character in completion) / max(len(completion), 1)}

    def length(completion_ids, log_metric, **kwargs):
        log_metric("tokens", sum(map(len, completion_ids)))
        return [len(ids) for ids in completion_ids]

    config = runs.load(tmp_path, "run.steps=2", "run.save_every=1")
    train(config, reward_funcs={share: 1.0, length: 0.5})
    for step in runs.metrics(config.run_dir):
        assert step["score/share/mean"] == 1.0
        assert step["score/length/mean"] == step["response_length/mean"]
        assert step["score/mean"] == pytest.approx(1.0 + 0.5 * step["response_length/mean"])
        assert step["metric/tokens"] == pytest.approx(4 * step["response_length/mean"])
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        accs = [rollout["acc"] for group in database.groups() for rollout in database.rollouts(group["serial"])]
    assert any(0 < acc < 1 for acc in accs)
    assert "python:share: 1.0" in (config.run_dir / "config.yaml").read_text()
    train(runs.load(tmp_path, "run.steps=3"), reward_funcs={share: 1.0, length: 0.5}, resume=True)
    with pytest.raises(RewardError, match="the reward of this run was a Python function"):
        Trainer(Config.load(config.run_dir / "config.yaml", ["run.steps=4"]), resume=True)


def test_a_reward_that_takes_a_column_that_the_data_does_not_have_is_refused_before_the_model_is_loaded(tmp_path):
    config = runs.load(tmp_path)
    (tmp_path / "reward.py").write_text("def reward(completion, lvl): return 1.0")
    save_file({}, tmp_path / "model" / "model.safetensors")  # the weights cannot be loaded
    with pytest.raises(RewardError, match=r"reward.py:reward takes 'lvl', which is not a column of the data"):
        Trainer(config)
    assert not config.run_dir.exists()


@pytest.mark.parametrize(
    "options", [["model.dtype=float32"], ["model.dtype=bfloat16"], ["model.dtype=bfloat16", "model.lora.rank=4"]]
)
def test_a_run_that_has_ended_leaves_no_tensor_in_memory(tmp_path, options):
    """Otherwise the second run of a notebook or an ablation has less of a GPU than the first."""

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(held), torch.Tensor) for held in gc.get_objects())

    path = runs.recipe(tmp_path, run={"steps": 2})
    counts = []
    for name in "abc":
        Trainer(Config.load(path, [f"run.name={name}", *options]), quiet=True).train()
        counts.append(tensors())
    assert counts[2] <= counts[0]
