"""Packed attention with the kernels in C."""

from __future__ import annotations

import torch

from dapo.model.attention import Family, PackedAttention
from dapo.model.native_attention import NativeAttention
from tests.kernels.ways import needs_native

pytestmark = needs_native
HEADS, KV_HEADS, SIZE = 6, 2, 32
# A prompt with three responses, one longer than the prompt; a prompt alone; a prompt with a response of one token.
FAMILIES = [Family((0, 9), ((9, 5), (14, 20), (34, 1))), Family((35, 4)), Family((39, 17), ((56, 1),))]
TOKENS = 57


def positions():
    spans = []
    for family in FAMILIES:
        spans.append(torch.arange(family.prompt[1]))
        spans += [torch.arange(family.prompt[1], family.prompt[1] + length) for _, length in family.responses]
    return torch.cat(spans)


def attended(plan, dtype):
    """Return output and gradients. Query, key and value are views of one tensor, as a projection gives them."""
    generator = torch.Generator().manual_seed(0)
    columns = (HEADS + 2 * KV_HEADS) * SIZE
    qkv = torch.randn(TOKENS, columns, generator=generator).bfloat16().to(dtype).requires_grad_()
    upstream = torch.randn(1, TOKENS, HEADS, SIZE, generator=generator).bfloat16().to(dtype)
    parts = qkv.view(TOKENS, -1, SIZE).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    output = plan.attend(0, *(part.transpose(0, 1)[None] for part in parts), 0.3)
    output.backward(upstream)
    return output.detach(), qkv.grad


def test_output_and_gradients_match_masked_attention_in_float64():
    exact, exact_grad = attended(PackedAttention(FAMILIES, positions(), 3, torch.float64), torch.float64)
    found, grad = attended(NativeAttention(FAMILIES, positions(), 3, torch.bfloat16), torch.bfloat16)
    assert (found.double() - exact).abs().max() < 2**-8 * exact.abs().max() + 1e-5, "rounded once"
    assert (grad.double() - exact_grad).norm() < 0.01 * exact_grad.norm()


def test_a_token_has_the_same_bits_in_any_pack():
    whole, _ = attended(NativeAttention(FAMILIES, positions(), 3, torch.bfloat16), torch.bfloat16)
    alone = NativeAttention([Family((0, 9), ((9, 20),))], torch.arange(29), 3, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * SIZE, generator=generator).bfloat16()
    rows = torch.cat([qkv[:9], qkv[14:34]])
    parts = rows.view(29, -1, SIZE).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    found = alone.attend(0, *(part.transpose(0, 1)[None] for part in parts), 0.3)
    assert torch.equal(found[0, :9], whole[0, :9]) and torch.equal(found[0, 9:], whole[0, 14:34])
