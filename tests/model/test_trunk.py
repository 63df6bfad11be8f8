"""The fused trunk matches transformers, forward and backward, on the model's own parameters."""

from __future__ import annotations

import pytest
import torch

from dapo.model.attention import ATTENTION_NAME, Family, PackedAttention
from dapo.model.forward import query_groups
from dapo.model.trunk import FusedTrunk, PlainTrunk, Weight, can_fuse, trunk_of
from tests import plain
from tests.tiny import tiny_llama, tiny_mistral, tiny_qwen2, tiny_qwen3, tiny_smollm3

MODELS = [tiny_llama, tiny_qwen2, tiny_qwen3, tiny_mistral, tiny_smollm3]


def packed(model, dtype=torch.float64):
    """Return tokens, positions and plan of two families: one with three responses, one with none."""
    generator = torch.Generator().manual_seed(1)
    tokens_T = torch.randint(0, 100, (24,), generator=generator)
    positions_T = torch.tensor([*range(5), *range(5, 9), *range(5, 10), 5, *range(9)])
    families = [Family((0, 5), ((5, 4), (9, 5), (14, 1))), Family((15, 9))]
    return tokens_T, positions_T, PackedAttention(families, positions_T, query_groups(model), dtype)


def in_float64(build):
    model = plain.in_float64(build())
    model.set_attn_implementation(ATTENTION_NAME)
    return model


@pytest.mark.parametrize("build", MODELS)
def test_hidden_states_match_transformers(build):
    stock, fused = in_float64(build), in_float64(build)
    assert can_fuse(fused)
    with torch.no_grad():
        expected = PlainTrunk(stock).hidden(*packed(stock))
        found = FusedTrunk.of(fused).hidden(*packed(fused))
        unchanged = PlainTrunk(fused).hidden(*packed(fused))
    # transformers rounds the angles' cosines to float32, and so does the table.
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    # The joined weights are still the parameters of the model.
    torch.testing.assert_close(unchanged, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("build", MODELS)
def test_gradients_match_autograd_through_transformers(build, recompute):
    stock, fused = in_float64(build), in_float64(build)
    trunk = FusedTrunk.of(fused)
    upstream = torch.randn(24, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    PlainTrunk(stock).hidden(*packed(stock)).backward(upstream)
    for weight in trunk.weights:
        weight.grad = torch.zeros_like(weight.value)
    for _ in range(2):  # gradients add up
        trunk.hidden(*packed(fused), recompute=recompute).backward(upstream)
    expected = {name: parameter.grad for name, parameter in stock.named_parameters() if parameter.grad is not None}
    names = {parameter: name for name, parameter in fused.named_parameters()}
    seen = set()
    for weight in trunk.weights:
        for parameter, grad in zip(weight.parts, weight.grad.split([len(p) for p in weight.parts]), strict=True):
            torch.testing.assert_close(grad, 2 * expected[names[parameter]], atol=1e-4, rtol=1e-4)
            assert grad.abs().max() > 0
            seen.add(names[parameter])
    assert seen == expected.keys()


def test_joined_parameters_are_views_of_one_storage_and_see_its_changes():
    model = tiny_llama()
    before = sum(p.numel() for p in model.parameters())
    trunk = FusedTrunk.of(model)
    attention = model.model.layers[1].self_attn
    trunk.layers[1].qkv.value.fill_(3.0)
    assert float(attention.v_proj.weight.detach().min()) == 3.0
    attention.k_proj.weight.data.zero_()
    assert (trunk.layers[1].qkv.value == 0).sum() == attention.k_proj.weight.numel()
    assert sum(p.numel() for p in model.parameters()) == before
    values = {weight.value.untyped_storage().data_ptr() for weight in trunk.weights}
    assert all(p.untyped_storage().data_ptr() in values for p in model.parameters() if p is not model.lm_head.weight)


def test_a_model_with_joined_weights_is_saved_and_loaded_as_before(tmp_path):
    model = tiny_qwen2()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    FusedTrunk.of(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_other_models_are_computed_by_transformers():
    biased = tiny_llama(attention_bias=True)  # also gives the output projection a bias
    assert not can_fuse(biased)
    assert not can_fuse(tiny_llama(hidden_act="gelu"))
    dynamic = tiny_llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    assert not can_fuse(dynamic)
    assert isinstance(trunk_of(tiny_llama()), PlainTrunk)  # in float32
    assert isinstance(trunk_of(tiny_llama().bfloat16()), FusedTrunk)
    model = tiny_llama()
    assert trunk_of(model) is trunk_of(model)


def test_a_weight_that_is_not_trained_gets_no_gradient():
    weight = Weight.of(torch.nn.Parameter(torch.randn(3, 4)))
    weight.add_grad(torch.randn(2, 3), torch.randn(2, 4))
    assert weight.grad is None
