"""Products of bf16 matrices on a CPU, with the kernels in C where there are any, and without."""

from __future__ import annotations

import pytest
import torch

from dapo.kernels import native
from dapo.model.products import add_weight_grad, linear, wide_product


@pytest.fixture(params=["native", "torch"], autouse=True)
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda dtype: None)


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_logits_are_not_rounded_to_bfloat16():
    hidden, weight = 4 * values(5, 48), values(500, 48, seed=1)
    exact = hidden.double() @ weight.double().t()
    found = wide_product(hidden, weight.t())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, atol=1e-3, rtol=1e-5)
    assert (exact.bfloat16().double() - exact).abs().max() > 0.05, "the test needs logits that rounding changes"


def test_float32_logits_are_one_plain_product():
    hidden, weight = values(5, 48).float(), values(500, 48, seed=1).float()
    assert torch.equal(wide_product(hidden, weight.t()), hidden @ weight.t())


@pytest.mark.parametrize("rows", [0, 1, 15, 64, 800])
def test_a_product_takes_inputs_of_any_layout(rows):
    for inputs in (values(rows, 48), values(48, rows).t()):
        weight = values(96, 48, seed=1)
        found = linear(inputs, weight)
        assert found.shape == (rows, 96) and found.dtype == torch.bfloat16
        exact = inputs.double() @ weight.double().t()
        torch.testing.assert_close(found.double(), exact, atol=1e-3, rtol=2**-7)


@pytest.mark.parametrize("tokens", [0, 1, 301])
def test_the_gradient_of_a_weight_is_added_in_float32(tokens):
    grad, inputs = values(tokens, 40), values(48, tokens, seed=1).t()
    total = torch.full((40, 48), 1000.0)
    add_weight_grad(total, grad, inputs)
    torch.testing.assert_close(total.double() - 1000, grad.double().t() @ inputs.double(), atol=5e-3, rtol=1e-5)
