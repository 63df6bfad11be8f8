"""Products of bf16 matrices on a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dapo.model.products import _REFINED, _TILE, linear_any_layout, sampling_logits


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("vocabulary", [7, 500, 4096])  # fewer tokens than are refined, no whole blocks, and blocks
def test_the_logits_of_the_likeliest_tokens_are_not_rounded_to_bfloat16(vocabulary):
    hidden, weight = 4 * values(5, 48), values(vocabulary, 48, seed=1)
    exact = hidden.double() @ weight.double().t()
    found = sampling_logits(hidden, weight)
    assert found.dtype == torch.float32
    likeliest = F.linear(hidden, weight).topk(min(_REFINED, vocabulary)).indices
    torch.testing.assert_close(found.gather(1, likeliest).double(), exact.gather(1, likeliest), atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(found.double(), exact, atol=1e-3, rtol=2**-7)
    rounded = F.linear(hidden, weight).double()
    assert (rounded - exact).gather(1, likeliest).abs().max() > 0.05, "the test needs logits that rounding changes"


def test_float32_logits_are_one_plain_product():
    hidden, weight = values(5, 48).float(), values(500, 48, seed=1).float()
    assert torch.equal(sampling_logits(hidden, weight), hidden @ weight.t())


@pytest.mark.parametrize("rows", [1, _TILE - 1, _TILE, 4 * _TILE, 50 * _TILE])
def test_a_product_is_the_same_in_any_layout(rows):
    for inputs in (values(rows, 48), values(48, rows).t()):
        weight = values(96, 48, seed=1)
        found = linear_any_layout(inputs, weight)
        assert found.shape == (rows, 96) and found.dtype == torch.bfloat16
        exact = inputs.double() @ weight.double().t()
        torch.testing.assert_close(found.double(), exact, atol=1e-3, rtol=2**-7)
