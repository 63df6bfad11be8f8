"""The layout of variable-length attention. A loop replaces flash attention's backward, which needs a GPU."""

from __future__ import annotations

import pytest
import torch

from dapo.model import varlen
from dapo.model.attention import Family, PackedAttention
from dapo.model.varlen import FixedSegments, FixedSize, Layout, Segments, VarlenAttention

FAMILIES = [
    Family((0, 5), ((5, 4), (9, 7), (16, 0), (16, 1))),
    Family((17, 3), ((20, 6),)),
    Family((26, 9)),
    Family((35, 6), ((41, 2), (43, 0), (43, 3)), shared=4),
    Family((46, 3), ((49, 1),), shared=2),
]
POSITIONS = torch.tensor(
    [*range(5), *range(5, 9), *range(5, 12), 5, *range(9), *range(9), *range(6), 6, 7, *range(6, 9), *range(4)]
)


def flash_backward(grad_out, query, key, value, out, lse, segments, scale):
    """Compute the gradients by autograd through a loop over segments, causal and aligned at the end.

    Also check the output and logsumexp of the forward, which the real backward relies on.
    """
    parts = [part.detach().requires_grad_() for part in (query, key, value)]
    with torch.enable_grad():
        expected, expected_lse = flash(*parts, segments, scale)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, expected_lse)
        return torch.autograd.grad(expected, parts, grad_out)


def flash(query, key, value, segments, scale):
    groups = query.shape[1] // key.shape[1]
    outputs, sums = [], []
    query_bounds, key_bounds = segments.query_bounds.tolist(), segments.key_bounds.tolist()
    for i in range(len(query_bounds) - 1):
        q0, q1, k0, k1 = (bounds[j] for bounds in (query_bounds, key_bounds) for j in (i, i + 1))
        assert q1 - q0 <= segments.longest_query and k1 - k0 <= segments.longest_key
        if q1 == q0:
            continue
        keys = key[k0:k1].repeat_interleave(groups, dim=1)
        values = value[k0:k1].repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1], keys) * scale
        sees = torch.arange(k1 - k0)[None, :] <= torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
        scores = scores.masked_fill(~sees, float("-inf"))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outputs), torch.cat(sums, dim=1)


@pytest.fixture(autouse=True)
def _backward_without_gpu(monkeypatch):
    monkeypatch.setattr(varlen, "_flash_backward", flash_backward)


def attended(plan, tokens, seed=0):
    """Return output and gradients for random queries, keys and values."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(1, heads, tokens, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    upstream = torch.randn(1, tokens, 4, 8, generator=generator, dtype=torch.float64)
    for part in parts:
        part.requires_grad_()
    output = plan.attend(0, *parts, 0.3)
    output.backward(upstream)
    return [output.detach(), *(part.grad for part in parts)]


def expected():
    return attended(PackedAttention(FAMILIES, POSITIONS, 2, torch.float64), len(POSITIONS))


def test_output_and_gradients_match_packed_attention():
    plan = VarlenAttention(Segments(Layout.of(FAMILIES), torch.device("cpu")))
    for found, value in zip(attended(plan, len(POSITIONS)), expected(), strict=True):
        torch.testing.assert_close(found, value)


def test_without_shared_prompts_nothing_is_copied():
    layout = Layout.of([Family((0, 5), ((5, 4),)), Family((9, 6), ((15, 1),))])
    assert layout.query_lengths.tolist() == [9, 7]
    assert Segments(layout, torch.device("cpu")).sources_K is None


@pytest.mark.parametrize("tokens", [50, 51, 114, 256])
def test_padding_up_to_a_fixed_size_changes_nothing(tokens):
    layout = Layout.of(FAMILIES)
    segments = FixedSegments(FixedSize.of(layout, tokens), torch.device("cpu"))
    segments.fill(layout)
    generator = torch.Generator().manual_seed(0)
    used = len(POSITIONS)
    found = attended(VarlenAttention(segments), tokens, seed=1)
    # Padding attends too, and its NaN would spread through products.
    assert all(torch.isfinite(part).all() for part in found)
    real = [torch.randn(1, heads, used, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    upstream = torch.randn(1, used, 4, 8, generator=generator, dtype=torch.float64)
    filled = [torch.randn(1, part.shape[1], tokens, 8, dtype=torch.float64) for part in real]
    for part, values in zip(filled, real, strict=True):
        part[:, :, :used] = values
        part.requires_grad_()
    output = VarlenAttention(segments).attend(0, *filled, 0.3)
    padded = torch.zeros(1, tokens, 4, 8, dtype=torch.float64)
    padded[:, :used] = upstream
    output.backward(padded)
    outcome = [output.detach()[:, :used], *(part.grad[:, :, :used] for part in filled)]
    for value, reference in zip(outcome, expected(), strict=True):
        torch.testing.assert_close(value, reference)


def test_a_fixed_size_can_be_filled_again_with_less():
    layout = Layout.of(FAMILIES)
    segments = FixedSegments(FixedSize.of(layout, 64), torch.device("cpu"))
    small = [Family((0, 4), ((4, 2), (6, 3)))]
    segments.fill(layout)
    segments.fill(Layout.of(small))
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 4, 5, 6])
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(1, heads, 64, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    found = VarlenAttention(segments).attend(0, *parts, 0.3)[:, :9]
    plan = PackedAttention(small, positions, 2, torch.float64)
    torch.testing.assert_close(found, plan.attend(0, *(part[:, :, :9] for part in parts), 0.3))


def test_sizes_are_rounded_up_to_powers_of_two():
    layout = Layout.of(FAMILIES)
    assert FixedSize.of(layout, 512) == FixedSize(512, segments=64, keys=1024, longest_query=64, longest_key=64)


def test_a_few_long_sequences_have_room_for_the_padding_that_a_graph_is_captured_on():
    """6,144 tokens in 3 segments: all padding would be 96 segments."""
    layout = Layout.of([Family((2000 * i, 2000)) for i in range(3)])
    segments = FixedSegments(FixedSize.of(layout, 6144), torch.device("cpu"))
    assert segments.query_bounds.unique().tolist() == list(range(0, 6145, 64))
    segments.fill(layout)
    assert segments.query_bounds.unique().tolist() == [0, 2000, 4000, 6000, 6064, 6128, 6144]
