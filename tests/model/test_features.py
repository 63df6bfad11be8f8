"""Test that prompts' features are the hidden states that transformers computes for each prompt alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dapo.model import features
from dapo.model.attention import ATTENTION_NAME
from dapo.model.features import prompt_features
from dapo.model.trunk import FusedTrunk, PlainTrunk, trunk_of
from tests.model.test_trunk import MODELS, in_float64, packed
from tests.tiny import tiny_gemma3, tiny_llama

PROMPTS = [list(range(5, 5 + length)) for length in (9, 1, 30, 4, 17)]


def full_gemma3(num_hidden_layers):
    return tiny_gemma3(num_hidden_layers=num_hidden_layers, layer_types=["full_attention"] * num_hidden_layers)


@torch.no_grad()
def one_by_one(model, layer):
    model.set_attn_implementation("sdpa")
    states = [model(torch.tensor([p]), output_hidden_states=True).hidden_states[layer][0, -1] for p in PROMPTS]
    model.set_attn_implementation(ATTENTION_NAME)
    return torch.stack(states).float().numpy()


@pytest.mark.parametrize("most", [8192, 12, 1])
@pytest.mark.parametrize("build", [*MODELS, full_gemma3])
def test_features_are_those_of_each_prompt_alone(build, most, monkeypatch):
    monkeypatch.setattr(features, "FEATURE_TOKENS", most)
    model = build(num_hidden_layers=4)
    expected = one_by_one(model, 3)  # 5/7 of four layers, rounded
    np.testing.assert_allclose(prompt_features(model, PROMPTS), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("build", MODELS)
def test_the_fused_trunk_has_the_residual_stream_of_transformers(build, layers):
    stock, fused = in_float64(build), in_float64(build)
    with torch.no_grad():
        expected = PlainTrunk(stock).early(*packed(stock), layers)
        found = FusedTrunk.of(fused).early(*packed(fused), layers)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("build", [tiny_llama, full_gemma3])
def test_no_layer_after_those_of_the_features_is_computed(build):
    model = build(num_hidden_layers=7)
    model.set_attn_implementation(ATTENTION_NAME)
    whole = PlainTrunk(model).hidden(*packed(model, torch.float32))
    computed = []
    for layer in model.base_model.layers:
        layer.register_forward_hook(lambda layer, inputs, output: computed.append(layer.self_attn.layer_idx))
    prompt_features(model, PROMPTS)
    assert computed == [0, 1, 2, 3, 4]
    # A later pass computes all layers again.
    torch.testing.assert_close(PlainTrunk(model).hidden(*packed(model, torch.float32)), whole)
    assert computed == [0, 1, 2, 3, 4, *range(7)]


def test_in_bf16_the_fused_trunk_computes_the_features():
    model = tiny_llama(num_hidden_layers=4)
    expected = prompt_features(model, PROMPTS)
    narrow = tiny_llama(num_hidden_layers=4).to(torch.bfloat16)
    narrow.set_attn_implementation(ATTENTION_NAME)
    found = prompt_features(narrow, PROMPTS)
    assert isinstance(trunk_of(narrow), FusedTrunk)
    assert found.dtype == np.float32
    cosines = (found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.min() > 0.995
