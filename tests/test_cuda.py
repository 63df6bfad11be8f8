"""The engine and the update on a GPU, compared with plain transformers."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from dapo.ablation.records import Status, read_status
from dapo.algorithm.filtering import GroupRules, form_group
from dapo.checkpoint import host
from dapo.config import Config, LoraConfig, ModelConfig
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.model.attention import ATTENTION_NAME
from dapo.model.features import prompt_features
from dapo.model.forward import free_memory
from dapo.model.joined import merge
from dapo.model.loading import load_model
from dapo.model.lora import add_adapters, causal_lm, merged, plain_copy, reference_mode
from dapo.model.memory import Division
from dapo.model.products import linear, same_bits_for_any_rows, wide_product
from dapo.model.trunk import FusedTrunk, PlainTrunk, trunk_of
from dapo.policy import policy as policy_module
from dapo.policy.offload import offloaded_step
from dapo.policy.packing import micro_batches
from dapo.policy.policy import Policy
from dapo.types import Extension, Prompt, Request, SamplingParams, Score
from tests import plain
from tests.ablation.recipes import write_recipe
from tests.policy.test_update import config, packed_gradients, random_groups
from tests.tiny import EOS_ID, tiny_llama, tiny_mistral, tiny_qwen2, tiny_qwen3, tiny_smollm3, tiny_tokenizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def drain(engine, *requests):
    engine.submit(requests)
    found = []
    while finished := engine.poll():
        found += finished
    return found


def engine_for(model, **options):
    model.cuda().set_attn_implementation(ATTENTION_NAME)
    return EmbeddedEngine(model, tiny_tokenizer(), frozenset({EOS_ID}), seed=0, max_length=400, **options)


FUSED = [tiny_llama, tiny_qwen2, tiny_qwen3, tiny_mistral, tiny_smollm3]
PROMPTS = [tuple(range(5, 5 + 3 * i)) for i in range(1, 20, 4)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)])
@pytest.mark.parametrize("build", FUSED)
def test_recorded_log_probabilities_on_the_gpu_match_transformers(build, dtype, tolerance):
    model = build()
    twin = plain.plain_copy(model.to(dtype), torch.float32).cpu()
    engine = engine_for(model, max_concurrent=7)
    assert isinstance(trunk_of(model), FusedTrunk if dtype == torch.bfloat16 else PlainTrunk)
    params = SamplingParams(max_tokens=90)
    for rollout in drain(engine, *(Request(i, p, 4, params) for i, p in enumerate(PROMPTS))):
        with torch.no_grad():
            (expected,) = plain.logprobs(twin, PROMPTS[rollout.serial], [rollout.tokens.tolist()])
        np.testing.assert_allclose(rollout.logprobs, expected.numpy(), atol=tolerance)
    assert engine.metrics()["engine/graph_replays"] > 0


@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_p": 0.8}, {"top_k": 5}])
def test_greedy_and_truncated_sampling_work_on_the_gpu(params):
    model = tiny_llama()
    engine = engine_for(model, max_concurrent=8)
    rollouts = drain(engine, Request(0, PROMPTS[2], 6, SamplingParams(max_tokens=20, **params)))
    assert len(rollouts) == 6
    if params.get("temperature") == 0:
        assert len({tuple(rollout.tokens.tolist()) for rollout in rollouts}) == 1


def test_stop_strings_end_responses_on_the_gpu_at_the_token_that_completes_them():
    engine = engine_for(tiny_llama(), max_concurrent=16)
    decode = tiny_tokenizer().decode

    def sample(**stop):
        params = SamplingParams(max_tokens=90, **stop)
        found = drain(engine, *(Request(i, p, 4, params) for i, p in enumerate(PROMPTS)))
        return {(r.serial, r.index): r for r in found}

    free = sample()
    stop = (decode(free[0, 0].tokens[20:22]), decode(free[1, 1].tokens[41:44]))
    ended = sample(stop=stop)
    for key, rollout in ended.items():
        whole = free[key].tokens.tolist()
        ends = [end for end in range(1, len(whole) + 1) if any(s in decode(whole[:end]) for s in stop)]
        assert rollout.tokens.tolist() == whole[: min([*ends, len(whole)])]
        assert rollout.finish_reason == ("stop" if ends else free[key].finish_reason)


@pytest.mark.parametrize("build", FUSED)
def test_features_of_prompts_on_the_gpu_match_those_on_the_cpu(build):
    model = build(num_hidden_layers=4)
    expected = prompt_features(model, PROMPTS)
    model.cuda().set_attn_implementation(ATTENTION_NAME)
    np.testing.assert_allclose(prompt_features(model, PROMPTS), expected, atol=1e-3, rtol=1e-3)
    narrow = build(num_hidden_layers=4).bfloat16().cuda()
    narrow.set_attn_implementation(ATTENTION_NAME)
    found = prompt_features(narrow, PROMPTS)
    assert isinstance(trunk_of(narrow), FusedTrunk)
    cosines = (found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.min() > 0.99


def test_a_captured_graph_sees_changed_weights():
    model = tiny_llama().to(torch.bfloat16)
    engine = engine_for(model, max_concurrent=8)
    request = Request(0, PROMPTS[3], 2, SamplingParams(temperature=0, max_tokens=12))
    before = drain(engine, request)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-3)
    engine.sync_weights(1)
    after = drain(engine, request)
    fresh = drain(engine_for(model, max_concurrent=8), request)
    assert not np.array_equal(before[0].tokens, after[0].tokens)
    assert np.array_equal(after[0].tokens, fresh[0].tokens)


def test_the_update_on_the_gpu_matches_the_oracle_s_gradient():
    model = plain.in_float64(tiny_llama())
    twin = plain.plain_copy(model)
    model.cuda().set_attn_implementation(ATTENTION_NAME)
    groups = random_groups(3, 5, 4)
    _, grads = packed_gradients(model, groups, config())
    for name, expected in plain.gradients(twin, plain.mini_batch_loss(twin, groups, "token-mean")).items():
        torch.testing.assert_close(grads[name].cpu(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("how", ["captured", "eager", "recompute"])
@pytest.mark.parametrize("build", FUSED)
def test_the_fused_update_in_bf16_matches_the_oracle_s_gradient_up_to_rounding(build, how):
    model = build().to(torch.bfloat16)
    twin = plain.plain_copy(model)
    model.cuda().set_attn_implementation(ATTENTION_NAME)
    groups = random_groups(3, 5, 4)
    policy = Policy(model, config(optim__recompute_activations="always" if how == "recompute" else "auto"))
    assert isinstance(policy.trunk, FusedTrunk) and policy.captured is not None
    if how != "captured":
        policy.captured = None
    for _ in range(2):  # the second time, the graph is replayed on new gradient sums
        policy.optimizer.zero_grad()
        policy.optimizer.zero_grad_buffers()
        for batch in policy._micro_batches(groups, version=0):
            policy._backward(batch)
    assert how != "captured" or policy.captured.captured
    expected = plain.gradients(twin, plain.mini_batch_loss(twin, groups, "token-mean"))
    for name, master in zip(policy.optimizer.names, policy.optimizer.masters, strict=True):
        error = (master.grad.double().cpu() - expected[name]).norm() / expected[name].norm()
        assert error < 0.15, (name, float(error))  # 1e-6 in float64; bf16 alone explains up to 0.09


@pytest.mark.parametrize("how", ["captured", "eager"])
@pytest.mark.parametrize("loss", ["gspo", "gmpo", "cispo", "sapo"])
def test_every_loss_in_bf16_matches_the_oracle_s_gradient_up_to_rounding(loss, how):
    model = tiny_llama().to(torch.bfloat16)
    twin = plain.plain_copy(model)
    model.cuda().set_attn_implementation(ATTENTION_NAME)
    groups = random_groups(3, 5, 4)
    clip = {} if loss == "sapo" else {"algorithm__clip_ratio_low": 0.9, "algorithm__clip_ratio_high": 9.0}
    policy = Policy(model, config(algorithm__loss=loss, **clip))
    if how != "captured":
        policy.captured = None
    for _ in range(2):
        policy.optimizer.zero_grad()
        policy.optimizer.zero_grad_buffers()
        for batch in policy._micro_batches(groups, version=0):
            policy._backward(batch)
    assert how != "captured" or policy.captured.captured
    mode = policy.config.algorithm.loss_agg_mode
    value = plain.mini_batch_loss(twin, groups, mode, low=0.9, high=9.0, c=math.inf, loss=loss)
    expected = plain.gradients(twin, value)
    for name, master in zip(policy.optimizer.names, policy.optimizer.masters, strict=True):
        error = (master.grad.double().cpu() - expected[name]).norm() / expected[name].norm()
        assert error < 0.15, (name, float(error))


def test_a_captured_update_is_not_affected_by_one_of_another_size():
    model = tiny_llama().to(torch.bfloat16).cuda()
    model.set_attn_implementation(ATTENTION_NAME)
    policy = Policy(model, config())
    large, small = random_groups(3, 6, 5), random_groups(2, 3, 4)

    def gradient(groups):
        policy.optimizer.zero_grad()
        policy.optimizer.zero_grad_buffers()
        for batch in policy._micro_batches(groups, version=0):
            policy._backward(batch)
        return [master.grad.clone() for master in policy.optimizer.masters]

    alone = gradient(small)
    gradient(large)
    for first, second in zip(alone, gradient(small), strict=True):
        assert (first - second).norm() < 0.03 * first.norm()  # attention's backward sums with atomics, in any order


def groups_of(prompts, rollouts):
    groups = []
    for serial, tokens in enumerate(prompts):
        members = sorted((r for r in rollouts if r.serial == serial), key=lambda rollout: rollout.index)
        scores = [Score(float(i % 2)) for i in range(len(members))]
        groups.append(form_group(serial, Prompt(str(serial), (), tokens, None), members, scores, GroupRules(400)))
    return groups


def gap(policy, prompts, rollouts):
    """Return the mean and the largest difference between the sampler's and the update's log-probabilities."""
    metrics = policy.update(groups_of(prompts, rollouts), step=1, version=0).metrics
    assert metrics["updates"] == 1
    return metrics["logprob_gap/mean"], metrics["logprob_gap/max"]


@pytest.mark.parametrize("how", ["captured", "eager", "recompute"])
@pytest.mark.parametrize("build", FUSED)
def test_in_bf16_sampler_and_trainer_compute_the_same_bits(build, how):
    model = build().to(torch.bfloat16)
    engine = engine_for(model, max_concurrent=11)  # slots are reused, and batches have many sizes
    rollouts = drain(engine, *(Request(i, p, 5, SamplingParams(max_tokens=150)) for i, p in enumerate(PROMPTS)))
    policy = Policy(model, config(optim__recompute_activations="always" if how == "recompute" else "auto"))
    if how != "captured":
        policy.captured = None
    mean, largest = gap(policy, PROMPTS, rollouts)
    assert mean < 1e-6 and largest < 1e-5  # only float32 sums over the vocabulary differ


def play(engine, requests, turns=3, given=tuple(range(20, 90)), limit=330, *, drops_cache=False):
    """Play episodes: after each turn but the last, some tokens are given, up to more than a page of the cache."""
    engine.submit(requests)
    found = []
    while rollouts := engine.poll():
        if drops_cache:
            engine.decoder.unpark([*engine.decoder.parked])
        extensions = []
        for rollout in rollouts:
            part = given[: 1 + (rollout.serial * 31 + rollout.index * 7 + 40 * len(rollout.given)) % len(given)]
            if len(rollout.given) == turns - 1 or len(rollout) + len(part) + 5 > limit:
                found.append(rollout)
                engine.end([(rollout.serial, rollout.index)])
            else:
                end = min(limit, len(rollout) + len(part) + 60)
                extensions.append(Extension(requests[rollout.serial], rollout, part, end))
        engine.extend(extensions)
    return found


@pytest.mark.parametrize("how", ["captured", "eager"])
@pytest.mark.parametrize("build", FUSED)
def test_in_bf16_episodes_have_the_same_bits_in_sampler_and_trainer(build, how):
    model = build().to(torch.bfloat16)
    engine = engine_for(model, max_concurrent=11)
    if how == "eager":
        engine.decoder.extension.can_capture = False
    params = SamplingParams(max_tokens=60)
    rollouts = play(engine, [Request(i, p, 5, params, turns=True) for i, p in enumerate(PROMPTS)])
    assert len(rollouts) == 5 * len(PROMPTS) and any(len(rollout.given) == 2 for rollout in rollouts)
    assert bool(engine.decoder.extension.captured) == (how == "captured")
    mean, largest = gap(Policy(model, config()), PROMPTS, rollouts)
    assert mean < 1e-6 and largest < 1e-5


def beginning(rollout, length, index):
    """Return the first tokens of an episode as an episode of its own."""
    given = tuple((start, min(end, length)) for start, end in rollout.given if start < length)
    values = {"tokens": rollout.tokens[:length], "logprobs": rollout.logprobs[:length], "given": given}
    return replace(rollout, index=index, **values)


@pytest.mark.parametrize("how", ["captured", "eager"])
@pytest.mark.parametrize("build", FUSED)
def test_in_bf16_turns_that_episodes_share_have_the_same_bits_in_sampler_and_trainer(build, how):
    model = build().to(torch.bfloat16)
    engine = engine_for(model, max_concurrent=11)
    params = SamplingParams(max_tokens=60)
    played = play(engine, [Request(i, p, 5, params, turns=True) for i, p in enumerate(PROMPTS)])
    rollouts = []
    for rollout in played:  # each with two episodes that end earlier, inside of a page and of a turn
        ends = len(rollout), 2 * len(rollout) // 3, len(rollout) // 2
        rollouts += [beginning(rollout, end, 3 * rollout.index + place) for place, end in enumerate(ends)]
    policy = Policy(model, config())
    if how == "eager":
        policy.captured = None
    mean, largest = gap(policy, PROMPTS, rollouts)
    assert mean < 1e-6 and largest < 1e-5
    groups = groups_of(PROMPTS, rollouts)
    shared, alone = (
        sum(len(batch.tokens_T) for batch in micro_batches(groups, "token-mean", 10**6, 0, policy.like, **options))
        for options in ({}, {"share_prompts": False})
    )
    assert shared < 0.6 * alone


def test_episodes_that_give_their_cache_up_on_the_gpu_go_on_with_the_same_tokens():
    requests = [Request(i, p, 5, SamplingParams(max_tokens=60), turns=True) for i, p in enumerate(PROMPTS)]
    found = []
    for drops_cache in (False, True):
        engine = engine_for(tiny_llama().to(torch.bfloat16), max_concurrent=11)
        rollouts = play(engine, requests, drops_cache=drops_cache)
        found.append({(rollout.serial, rollout.index): rollout.tokens.tolist() for rollout in rollouts})
    assert found[0] == found[1]


@pytest.mark.parametrize("rows", [1, 17, 96, 250, 700])
@pytest.mark.parametrize(("terms", "columns"), [(576, 960), (1536, 576), (8960, 1536), (18944, 3584)])
def test_a_row_of_a_product_does_not_depend_on_the_others(rows, terms, columns):
    same_bits_for_any_rows()
    generator = torch.Generator().manual_seed(rows)
    input_Ti, weight = (torch.randn(n, terms, generator=generator).bfloat16().cuda() for n in (3000, columns))
    assert torch.equal(linear(input_Ti[:rows], weight), linear(input_Ti, weight)[:rows])
    few, many = wide_product(input_Ti[:rows], weight.t()), wide_product(input_Ti, weight.t())
    assert torch.equal(few, many[:rows])


def test_in_bf16_sampler_and_trainer_agree_on_the_real_model(smollm2_dir):
    loaded = load_model(ModelConfig(path=str(smollm2_dir), device="cuda"))
    assert loaded.model.dtype == torch.bfloat16
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, loaded.stop_ids, seed=0, max_concurrent=64)
    prompt = tuple(loaded.tokenizer("The capital of France is")["input_ids"])
    rollouts = drain(engine, Request(0, prompt, 32, SamplingParams(max_tokens=64)))
    policy = Policy(loaded.model, Config.parse({"model": {"path": "x"}, "data": {"train": "x"}}))
    mean, largest = gap(policy, [prompt], rollouts)
    assert mean < 1e-6 and largest < 1e-4


def adapted(build, *, std=0.0, targets="all-linear"):
    """Return a bf16 model on the GPU with adapters of rank 8."""
    model = build().to(torch.bfloat16).cuda()
    model.set_attn_implementation(ATTENTION_NAME)
    torch.manual_seed(0)
    lora = add_adapters(model, LoraConfig(rank=8, alpha=16.0, target_modules=targets))
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=std)
    return lora


@pytest.mark.parametrize("how", ["captured", "eager", "recompute"])
@pytest.mark.parametrize("build", FUSED)
def test_with_adapters_sampler_and_trainer_compute_the_same_bits_before_and_after_an_update(build, how):
    recompute = "always" if how == "recompute" else "auto"
    options = {"optim__lr": 1e-2, "optim__warmup_steps": 0, "optim__recompute_activations": recompute}
    policy = Policy(adapted(build), config(**options))
    assert isinstance(policy.trunk, FusedTrunk) and policy.captured is not None
    if how != "captured":
        policy.captured = None
    engine = engine_for(policy.causal_lm, max_concurrent=11)
    start = {name: tensor.clone() for name, tensor in policy.weights()}
    for _ in range(3):
        rollouts = drain(engine, *(Request(i, p, 5, SamplingParams(max_tokens=150)) for i, p in enumerate(PROMPTS)))
        mean, largest = gap(policy, PROMPTS, rollouts)
        assert mean < 1e-6 and largest < 1e-5
    changed = {name.split(".")[-2] for name, tensor in policy.weights() if not torch.equal(tensor, start[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("how", ["captured", "eager"])
def test_the_gradients_of_adapters_are_projections_of_the_gradients_of_the_weights(how):
    lora = adapted(tiny_qwen2, std=0.05)
    adapters = Policy(lora, config())
    full = Policy(plain_copy(lora).to(torch.bfloat16), config())
    full.causal_lm.set_attn_implementation(ATTENTION_NAME)
    groups = random_groups(3, 100, 8)  # enough tokens to split the sums over them
    for policy in (adapters, full):
        if how != "captured":
            policy.captured = None
        policy.optimizer.zero_grad()
        policy.optimizer.zero_grad_buffers()
        for batch in policy._micro_batches(groups, version=0):
            assert len(batch.tokens_T) >= 1024
            policy._backward(batch)
    found, wide = (
        {name: m.grad.double() for name, m in zip(p.optimizer.names, p.optimizer.masters, strict=True)}
        for p in (adapters, full)
    )
    layers = [(name, m) for name, m in causal_lm(lora).named_modules() if hasattr(m, "lora_A")]
    assert len(layers) == 14
    for name, layer in layers:
        down, up = (part["default"].weight.double() for part in (layer.lora_A, layer.lora_B))
        grad = 2.0 * wide[f"{name}.weight"]
        for key, expected in (("A", up.t() @ grad), ("B", grad @ down.t())):
            error = (found[f"base_model.model.{name}.lora_{key}.default.weight"] - expected).norm() / expected.norm()
            assert error < 0.05, (name, key, float(error))


def test_base_weights_in_cpu_memory_give_the_same_merged_weights():
    models = [adapted(tiny_qwen2), adapted(tiny_qwen2)]
    for lora, in_cpu_memory in zip(models, (False, True), strict=True):
        weights = trunk_of(causal_lm(lora)).adapted
        for weight in weights:
            weight.separate(in_cpu_memory=in_cpu_memory)
        with torch.no_grad():
            for index, parameter in enumerate(p for p in lora.parameters() if p.requires_grad):
                parameter.normal_(std=0.1, generator=torch.Generator("cuda").manual_seed(index))
        merge(weights)
    bases = [{n: p for n, p in causal_lm(lora).named_parameters() if "base_layer.weight" in n} for lora in models]
    assert all(p.is_cuda for p in bases[0].values()) and all(p.is_pinned() for p in bases[1].values())
    one, two = (merged(lora) for lora in models)
    assert all(tensor.is_cuda and torch.equal(tensor, one[name]) for name, tensor in two.items())
    with reference_mode(models[1]):
        for name, base in bases[0].items():
            assert torch.equal(merged(models[1])[name.replace(".base_layer", "")], base)
    assert all(torch.equal(tensor, one[name]) for name, tensor in merged(models[1]).items())


def test_moments_in_the_hosts_memory_make_the_same_updates_bit_for_bit():
    def trained(step_of):
        generator = torch.Generator("cuda").manual_seed(0)
        draw = partial(torch.randn, device="cuda", generator=generator)
        masters = [draw(shape, requires_grad=True) for shape in ((5,), (300, 70), (64, 64), (1000, 1000))]
        adam = torch.optim.AdamW(masters, lr=1e-2, fused=True)
        for _ in range(4):
            for master in masters:
                master.grad = draw(master.shape)
            step_of(adam)
        return [*masters, *(adam.state[m][name].cpu() for m in masters for name in ("exp_avg", "exp_avg_sq", "step"))]

    whole = trained(torch.optim.AdamW.step)
    for chunk in (1000, 1 << 25):
        parts = trained(partial(offloaded_step, chunk=chunk))
        assert all(torch.equal(first, second) for first, second in zip(whole, parts, strict=True))


def test_a_limit_on_the_process_counts_as_a_smaller_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(0.25, device)
    try:
        free = free_memory(device)
        assert 0 < free <= 0.9 * 0.25 * total
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert free_memory(device) > free


def test_sampling_and_learning_in_turns_on_the_same_memory_learns_the_same(monkeypatch):
    weights = []
    for division in (Division(), Division(offloads=True, lends=True)):
        monkeypatch.setattr(policy_module, "division", lambda *_, found=division, **__: found)
        model = tiny_llama().to(torch.bfloat16)
        engine = engine_for(model, max_concurrent=8)
        policy = Policy(model, config(optim__lr=1e-3, algorithm__max_logprob_gap=1e9))
        policy.cache_bytes = engine.cache_bytes
        request = Request(0, PROMPTS[2], 6, SamplingParams(max_tokens=20))
        for step in range(1, 4):
            drain(engine, request)
            assert policy.needs_engine_memory == division.lends
            if policy.needs_engine_memory:
                engine.suspend()
            policy.update(random_groups(2, 3, step), step=step, version=step - 1)
            engine.sync_weights(step)
        assert bool(policy.optimizer._sums) != division.lends and (policy.captured is None) == division.lends
        weights.append([parameter.float() for parameter in model.parameters()])
    for first, second in zip(*weights, strict=True):
        assert (first - second).norm() < 0.03 * first.norm()  # attention's backward sums with atomics, in any order


def test_a_copy_in_host_memory_has_every_bit_of_the_gpu_s_tensors(monkeypatch):
    monkeypatch.setattr(host, "_SLOT", 4096)
    shared = torch.randn(70, 30, device="cuda")
    files = {
        "model": {"embed": shared, "head": shared, "norm": torch.randn(7, device="cuda").bfloat16()},
        "optimizer": {f"{n}": torch.randn(n, device="cuda") for n in (1, 1000, 1024, 5000)}
        | {"step": torch.tensor(3.0), "codes": torch.randint(0, 256, (3000,), dtype=torch.uint8, device="cuda")},
    }
    memory = host.HostMemory()
    memory.copy(files)
    for _ in range(2):  # into the same memory
        shared.add_(1)
        copied = memory.copy(files)
        assert copied["model"]["embed"].data_ptr() == copied["model"]["head"].data_ptr()
        before = {name: {key: tensor.cpu() for key, tensor in tensors.items()} for name, tensors in files.items()}
        for name, tensors in before.items():
            for key, tensor in tensors.items():
                assert copied[name][key].device.type == "cpu"
                assert torch.equal(copied[name][key], tensor), key


def test_a_run_that_ray_has_placed_trains_on_its_gpu(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    recipe, out = write_recipe(tmp_path, model={"device": "cuda"}), tmp_path / "out"
    command = [sys.executable, "-m", "dapo", "ablate", str(recipe), "--arm", "hot: optim.lr=0.01", "--seeds", "1",
               "--steps", "2", "--out", str(out), "--ray", "local"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"each with \d+ CPUs? and 1 GPU", done.stdout)
    assert [read_status(out / "runs" / name) for name in ("hot-s5", "recipe-s5")] == [Status.FINISHED] * 2
