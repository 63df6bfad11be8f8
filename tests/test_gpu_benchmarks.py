"""The GPU benchmarks run on a CPU with tiny shapes, count correctly, and know the hardware's limits."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig

from benchmarks import (
    accuracy_curves,
    checkpoint_stall,
    gpu_common,
    gpu_episodes,
    gpu_lora,
    gpu_memory,
    gpu_rollout,
    gpu_step,
    gpu_update,
    time_to_accuracy,
)
from benchmarks.gpu_common import Row
from dapo.config import Config
from dapo.data.dataset import load_eval_sets
from dapo.model.loading import load_model
from dapo.training.trainer import Trainer
from tests.tiny import save_tiny

CPU = torch.device("cpu")
TINY = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


@pytest.mark.parametrize(("shape", "published"), [(gpu_common.SMOLLM2_135M, 619_000), (gpu_common.QWEN2_1_5B, 222_000)])
def test_the_memory_floor_is_the_published_one(shape, published):
    model = gpu_common.random_model(shape, torch.device("meta"), torch.bfloat16)
    assert gpu_common.decode_floor(model, 256, 128, 256) == pytest.approx(published, rel=0.005)


def test_a_verdict_knows_which_way_is_better():
    assert [Row("", x, "tokens/s", 10, 20).verdict for x in (9, 10, 20)] == ["miss", "pass", "aim"]
    assert [Row("", x, "s", 0.3, 0.2, lower_is_better=True).verdict for x in (0.31, 0.3, 0.2)] == [
        "miss",
        "pass",
        "aim",
    ]
    assert (
        Row("", 5, "tokens/s", floor=10).share_of_floor == Row("", 2, "s", floor=1, lower_is_better=True).share_of_floor
    )


def test_a_table_has_every_row_and_names_the_machine(capsys):
    gpu_common.print_rows("title", [Row("fast", 12_345, "tokens/s", 1, 2, 20_000, note="first run 3 s")])
    text = capsys.readouterr().out
    assert all(part in text for part in ("fast", "12,345", "aim", "62%", "first run 3 s", torch.__version__))


def test_rollouts_are_measured_and_compared_with_their_floor():
    workload = gpu_rollout.Workload("tiny", "tiny", TINY, 2, 3, 4, 5, slots=6, must=1.0, aim=1e12)
    model = gpu_common.random_model(TINY, CPU, torch.float32)
    (row,) = gpu_rollout.rollout_rows(workload, model, repeats=1, max_length=workload.max_length)
    assert row.verdict == "pass" and "30 tokens" in row.note
    assert 0 < row.share_of_floor < 1


@pytest.mark.parametrize("spread", [False, True])
def test_episodes_are_compared_with_one_turn_and_the_prefill(spread):
    workload = gpu_episodes.Workload("tiny", TINY, 2, 3, 4, 3, 4, 5, spread=spread, slots=4 * spread)
    model = gpu_common.random_model(TINY, CPU, torch.float32)
    row = gpu_episodes.episode_row(workload, model, repeats=1)
    assert row.measured > 0 and row.unit == "x" and "in one turn" in row.note


def test_log_normal_lengths_have_their_median_and_limit_and_share_prompts():
    (workload,) = [w for w in gpu_rollout.WORKLOADS if w.longest]
    requests = workload.requests()
    lengths = torch.tensor([request.params.max_tokens for request in requests])
    assert len(requests) == 1024 and len({request.prompt for request in requests}) == 64
    assert abs(int(lengths.median()) - 128) <= 8
    assert int(lengths.min()) >= 1 and int(lengths.max()) == 1024
    assert [request.params for request in workload.requests()] == [request.params for request in requests]


def test_slots_are_counted_as_occupied_while_others_wait():
    workload = gpu_rollout.Workload("tiny", "tiny", TINY, 3, 4, 4, 3, slots=4, must=0.5, aim=0.6, longest=9)
    model = gpu_common.random_model(TINY, CPU, torch.float32)
    (row,) = gpu_rollout.rollout_rows(workload, model, repeats=1, max_length=workload.max_length)
    assert row.unit == "of the slots" and 0.5 < row.measured <= 1


def test_transformers_generate_is_measured_on_the_same_workload():
    workload = gpu_rollout.Workload("tiny", "tiny", TINY, 2, 3, 4, 5, slots=6, must=1.0, aim=1e12)
    assert [row.what for row in gpu_rollout.peer_rows(workload, CPU, torch.float32, 1)] == ["  transformers.generate"]


@pytest.mark.parametrize("share", [True, False])
def test_updates_are_measured_with_the_operations_of_what_they_compute(share):
    workload = gpu_update.Workload("tiny", "tiny", TINY, 2, 3, 4, 5, share_prompts=share, must=10.0, aim=5.0)
    assert workload.computed_tokens == (2 * 4 if share else 6 * 4) + 6 * 4
    row = gpu_update.update_row(workload, CPU, torch.float32, repeats=1)
    assert row.unit == ("s" if share else "MFU")
    assert row.share_of_floor == pytest.approx(workload.flops / gpu_update.H200_FLOPS / _seconds(row), rel=1e-3)
    assert gpu_update.padded_row(workload, CPU, torch.float32, repeats=1, rows=4).measured > 0


def _seconds(row: Row) -> float:
    return row.measured if row.lower_is_better else float(row.note.split("then ")[1].split(" s")[0])


def test_a_whole_step_runs_through_the_real_trainer():
    workload = replace(gpu_step.WORKLOAD, shape=TINY, prompts=2, n=4, prompt_tokens=6, new_tokens=5)
    row = gpu_step.step_row(workload, CPU, torch.float32, 1, ("reward.workers=1",))
    assert row.measured > 0 and all(part in row.note for part in ("generate", "reward", "train", "recording"))


def test_the_gap_of_a_float32_model_is_almost_zero(tmp_path):
    save_tiny(tmp_path / "model")
    row = gpu_step.gap_row(str(tmp_path / "model"), CPU, "float32", 4, 6, ["one", "two"])
    assert 0 <= row.measured < 1e-4 and row.verdict == "aim"


def test_lora_is_measured_beside_all_weights():
    rollout = gpu_rollout.Workload("tiny", "tiny", TINY, 2, 3, 4, 5, slots=6, must=1.0, aim=1e12)
    update = gpu_update.Workload("tiny", "tiny", TINY, 2, 3, 4, 5, share_prompts=True, must=10.0, aim=5.0)
    rows = [gpu_lora.rollout_row(rollout, CPU, torch.float32, 1), gpu_lora.update_row(update, CPU, torch.float32, 1)]
    assert all(row.measured > 0 and "LoRA" in row.note for row in rows)
    assert gpu_lora.gap_row(update, CPU, torch.float32, new_tokens=6).measured < 1e-4
    step = replace(gpu_step.WORKLOAD, shape=TINY, prompts=2, n=4, prompt_tokens=6, new_tokens=5)
    assert "peak" in gpu_lora.step_row(step, CPU, torch.float32, 1, ("reward.workers=1",)).note


@pytest.fixture
def arithmetic(tmp_path):
    """The benchmark's configuration with a tiny model and tiny batches."""
    pytest.importorskip("reasoning_gym")
    save_tiny(tmp_path / "model")
    config = time_to_accuracy.training_config(
        tmp_path, str(tmp_path / "model"), "cpu", ledger=True, mode="strict"
    ).model_dump(mode="json")
    config["data"] |= {"train_batch_size": 2, "gen_batch_size": 2, "max_response_length": 3, "max_prompt_length": 256}
    config["rollout"] |= {"n": 2, "max_concurrent": 8}
    config["optim"]["ppo_mini_batch_size"] = 1
    config["reward"]["workers"] = 1
    # A random model is never correct. Without the filter there is still something to train on.
    config["algorithm"]["filter_groups"]["enable"] = False
    for sources in config["eval"]["data"].values():
        sources[0]["size"] = 2
    return Config.parse(config)


def test_the_benchmark_trains_with_the_settings_that_the_others_were_measured_with(tmp_path):
    config = time_to_accuracy.training_config(tmp_path, "none", "cpu", ledger=False, mode="strict")
    assert (config.data.train_batch_size, config.rollout.n, config.data.max_response_length) == (32, 16, 64)
    assert config.data.train_batch_size // config.mini_batch_size == 4
    assert (config.optim.lr, config.rollout.temperature, config.algorithm.filter_groups.enable) == (1e-5, 1.0, True)
    assert [source.weight for source in config.data.train] == [2, 1, 1]
    assert sum(size * repeats for _, _, size, repeats, _ in time_to_accuracy.TASKS) == 500


@pytest.mark.parametrize("mode", ["strict", "inflight"])
def test_accuracy_is_measured_before_the_first_step_and_after_the_last(arithmetic, mode):
    config = arithmetic.model_copy(update={"rollout": arithmetic.rollout.model_copy(update={"mode": mode})})
    points = time_to_accuracy.our_points(config, seconds=0.5, every=0.2, device=CPU)
    assert points[0].seconds == 0 and points[0].step == 0
    assert [p.seconds for p in points] == sorted({p.seconds for p in points})
    assert points[-1].step > 0 and points[-1].groups_kept == 2 * points[-1].step
    assert all(0 <= p.accuracy <= 1 and 0 <= p.greedy <= 1 for p in points)


def test_an_evaluation_draws_the_same_numbers_each_time(arithmetic):
    trainer = Trainer(arithmetic)
    examiner = time_to_accuracy.Examiner(trainer, time_to_accuracy.held_out(trainer.data.eval_sets))
    assert len(examiner.questions) == 2 + 5 * 2 + 2
    seen = []
    submit = examiner.trainer.judge.submit

    def remember(prompt, rollouts):
        seen.append((prompt.uid, rollouts[0].tokens.tolist()))
        return submit(prompt, rollouts)

    examiner.trainer.judge.submit = remember
    examiner.accuracy(1.0)
    first, seen = sorted(seen), []
    examiner.accuracy(1.0)
    trainer.close()
    assert first == sorted(seen)


def test_held_out_questions_are_judged_by_transformers_generate_as_well(arithmetic):
    loaded = load_model(arithmetic.model, attention="sdpa")
    asked = time_to_accuracy.held_out(load_eval_sets(arithmetic, loaded.tokenizer))
    always = {"acc": True}
    for temperature in (1.0, 0.0):
        found = time_to_accuracy.transformers_accuracy(
            loaded.model, loaded.tokenizer, asked, temperature, arithmetic, lambda text, answer: always
        )
        assert found == 1.0


POINTS = [
    accuracy_curves.Point(0.0, 0, 0.1, 0.2, 0, 0, 0),
    accuracy_curves.Point(39.0, 40, 0.61, 0.7, 5000, 60, 40),
    accuracy_curves.Point(197.0, 200, 0.79, 0.8, 9000, 300, 200),
]


def test_a_goal_is_met_only_within_its_seconds():
    met = {(g.kind, g.accuracy): g.is_met(POINTS) for g in accuracy_curves.GOALS}
    assert met == {("must", 0.6): True, ("must", 0.8): False, ("aim", 0.6): False, ("aim", 0.9): False}


def test_the_curve_is_written_as_a_table_and_a_plot(tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy_curves, "is_installed", lambda package: False)
    accuracy_curves.write(tmp_path, {"ours": POINTS})
    lines = (tmp_path / "accuracy.csv").read_text().splitlines()
    assert lines[0].startswith("system,seconds,step,accuracy,greedy") and lines[2].startswith("ours,39.0,40,0.61,0.7")
    root = ElementTree.fromstring((tmp_path / "accuracy.svg").read_text())
    (line,) = [node for node in root if node.tag.endswith("polyline")]
    assert len(line.attrib["points"].split()) == len(POINTS)
    console = Console(width=120, record=True)
    accuracy_curves.print_curves(console, {"ours": POINTS})
    text = console.export_text()
    assert "61.0%" in text and "60% within 40 s: reached" in text and "80% within 198 s: missed" in text


def test_training_within_a_limit_on_memory_is_measured_and_compared_with_the_plan():
    arm = gpu_memory.Arm("tiny in 24 GB", TINY, 2, 24e9)
    found = gpu_memory.measure(arm, gpu_memory.Sizes(2, 2, 4, 8, steps=1), None, CPU)
    assert len(found.seconds) == 1 and any(note.startswith("timing_s/train ") for note in found.notes)
    assert 2**29 < found.predicted < 24e9
    peak, *_, error, seconds = gpu_memory.rows("lora-1.5b", found, is_limited=True)
    assert peak.must == pytest.approx(12e9 / 2**30) and error.verdict == "miss" and seconds.measured > 0


def test_the_arms_on_small_gpus_have_the_models_they_say():
    shapes = {name: arm.shape for name, arm in gpu_memory.ARMS.items()}
    sizes = {
        name: gpu_common.random_model(shape, torch.device("meta"), torch.bfloat16) for name, shape in shapes.items()
    }
    assert [round(model.num_parameters() / 1e9, 2) for model in sizes.values()] == [1.54, 1.54, 7.62]


def test_the_stall_of_a_checkpoint_is_measured_and_its_files_are_compared(tmp_path):
    rows = {row.what: row for row in checkpoint_stall.measure(TINY, CPU, tmp_path, repeats=2)}
    assert rows["stall before / until an update now"].measured > 0
    assert "all files compared" in rows["until the next step can sample"].note
    assert (tmp_path / "checkpoints" / "step_3").is_dir()
