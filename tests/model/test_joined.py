"""LoRA on the fused trunk: merged weights, and gradients of the adapters without the gradient of the weight."""

from __future__ import annotations

import pytest
import torch

from dapo.config import LoraConfig
from dapo.model.attention import ATTENTION_NAME
from dapo.model.joined import merge, separate_bases
from dapo.model.lora import add_adapters, causal_lm, merged, plain_copy, reference_mode
from dapo.model.products import sum_in_parts
from dapo.model.trunk import _TRUNKS, FusedTrunk, PlainTrunk, can_fuse
from tests import plain
from tests.model.test_trunk import packed
from tests.tiny import tiny_llama, tiny_qwen2, tiny_qwen3, tiny_smollm3

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = ["all-linear", ("q_proj", "v_proj"), ("k_proj",), ("o_proj", "up_proj"), ("gate_proj", "down_proj")]


def adapted(build=tiny_qwen2, targets="all-linear", dtype=torch.float64, *, std=0.1):
    """Return a model with random adapters, as after many updates."""
    model = build()
    model = plain.in_float64(model) if dtype == torch.float64 else model.to(dtype)
    model.set_attn_implementation(ATTENTION_NAME)
    torch.manual_seed(3)
    lora = add_adapters(model, LoraConfig(rank=4, alpha=6.0, target_modules=targets))
    randomize(lora, std)
    return lora


@torch.no_grad()
def randomize(lora, std=0.1):
    for name, parameter in lora.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=std)


def fused(lora):
    assert can_fuse(causal_lm(lora))
    trunk = _TRUNKS[causal_lm(lora)] = FusedTrunk.of(causal_lm(lora))
    return trunk


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen2, tiny_qwen3, tiny_smollm3])
@pytest.mark.parametrize("targets", TARGETS)
def test_hidden_states_and_the_gradients_of_a_and_b_match_autograd(build, targets):
    separate, lora = adapted(build, targets), adapted(build, targets)
    trunk = fused(lora)
    upstream = torch.randn(24, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = PlainTrunk(causal_lm(separate)).hidden(*packed(separate.get_base_model()))
    expected.backward(upstream)
    trained = [weight for weight in trunk.weights if weight.parts[0].requires_grad]
    for weight in trained:
        weight.grad = torch.zeros_like(weight.value)
    for recompute in (False, True):  # gradients add up
        found = trunk.hidden(*packed(causal_lm(lora)), recompute=recompute)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
        found.backward(upstream)
    grads = {
        part: grad
        for weight in trained
        for part, grad in zip(weight.parts, weight.grad.split([len(p) for p in weight.parts]), strict=True)
    }
    twins = dict(separate.named_parameters())
    names = [name for name, parameter in lora.named_parameters() if parameter.requires_grad]
    assert len(names) == len(grads)
    for name, parameter in lora.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(grads[parameter], 2 * twins[name].grad, atol=1e-4, rtol=1e-4)
            assert grads[parameter].abs().max() > 0


def test_frozen_weights_get_no_gradient():
    lora = adapted(dtype=torch.float32)
    trunk = fused(lora)
    for weight in trunk.weights:
        if weight.parts[0].requires_grad:
            weight.grad = torch.zeros_like(weight.value)
    trunk.hidden(*packed(causal_lm(lora), torch.float32)).sum().backward()
    assert all(parameter.grad is None for parameter in lora.parameters())
    assert all(weight.grad is None for weight in trunk.weights if not weight.parts[0].requires_grad)


def base_weights(lora):
    return {name: p.detach().clone() for name, p in causal_lm(lora).named_parameters() if ".lora_" not in name}


@pytest.mark.parametrize("in_cpu_memory", [False, True])
@pytest.mark.parametrize("targets", TARGETS)
def test_merging_starts_from_the_base_however_often_the_adapters_change(targets, in_cpu_memory):
    lora = adapted(targets=targets, dtype=torch.bfloat16, std=0.0)
    trunk, base = fused(lora), base_weights(lora)
    blank = {name: tensor.clone() for name, tensor in merged(lora).items()}
    separate_bases(trunk.adapted, free=0 if in_cpu_memory else 10**9)
    for _ in range(20):
        randomize(lora)
        merge(trunk.adapted)
    last = {name: tensor.clone() for name, tensor in merged(lora).items()}
    changed = {name.split(".")[-2] for name in last if not torch.equal(last[name], blank[name])}
    assert changed == set(ALL if targets == "all-linear" else targets)
    merge(trunk.adapted)
    assert all(torch.equal(merged(lora)[name], tensor) for name, tensor in last.items())
    randomize(lora, std=0.0)
    merge(trunk.adapted)
    for name, tensor in merged(lora).items():
        assert torch.equal(tensor.view(torch.int16), blank[name].view(torch.int16)), name
    assert all(torch.equal(tensor, base[name]) for name, tensor in base_weights(lora).items())


def test_merged_weights_are_those_that_peft_would_merge_and_are_not_copied():
    lora, twin = adapted(dtype=torch.float32), adapted(dtype=torch.float32)
    trunk = fused(lora)
    expected = merged(twin)  # of a model that transformers computes
    found = merged(lora)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-7, rtol=1e-6)
    storages = {weight.value.untyped_storage().data_ptr() for weight in trunk.adapted}
    assert found["model.layers.1.mlp.down_proj.weight"].untyped_storage().data_ptr() in storages
    ids = torch.tensor([[1, 40, 50, 60]])
    with torch.no_grad():
        torch.testing.assert_close(plain_copy(lora)(ids).logits, plain_copy(twin)(ids).logits, atol=1e-5, rtol=1e-5)


def test_the_reference_is_the_base_and_leaves_the_merged_weights_as_they_were():
    lora, blank = adapted(dtype=torch.bfloat16), adapted(dtype=torch.bfloat16, std=0.0)
    trunk, expected = fused(lora), fused(blank).hidden(*packed(causal_lm(blank), torch.bfloat16))
    inputs = packed(causal_lm(lora), torch.bfloat16)
    before = trunk.hidden(*inputs)
    with reference_mode(lora):
        assert torch.equal(trunk.hidden(*inputs), expected)
    assert torch.equal(trunk.hidden(*inputs), before) and not torch.equal(before, expected)
    with reference_mode(blank):  # its base was never copied
        assert torch.equal(_TRUNKS[causal_lm(blank)].hidden(*inputs), expected)
    assert not any(weight.is_separate for weight in _TRUNKS[causal_lm(blank)].adapted)


@pytest.mark.parametrize("tokens", [3, 16, 50, 67])
def test_a_sum_in_parts_is_the_product(tokens):
    a, b = (torch.randn(tokens, width, generator=torch.Generator().manual_seed(width)).bfloat16() for width in (5, 7))
    torch.testing.assert_close(sum_in_parts(a, b, 16).double(), a.double().t() @ b.double(), atol=1e-4, rtol=1e-5)
