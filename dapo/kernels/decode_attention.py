"""Decode attention over a paged cache: one new token per response, stored and attended in one go."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dapo.kernels.piece_attention import PAGE


@dataclass(frozen=True, slots=True, eq=False)
class PagedState:
    """Where the batch's responses have their tokens. A *row* is the home of one response; all tensors are int32.

    A row of the table lists the pages of the prompt, then, from a fresh page on, those of the response's own tokens.
    """

    rows_B: Tensor  # the row in each place of the batch
    table: Tensor  # [rows, width] page numbers
    prompt_lengths: Tensor  # [rows] tokens of the prompt, all in the cache
    own_lengths: Tensor  # [rows] own tokens with the newest, which is not in the cache yet


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    state: PagedState,
    scale: float,
    *,
    cos_sin: Tensor | None = None,
    split: bool = False,
) -> Tensor:
    """The output [B, H, D] for query [B, H, D], whose key and value [B, Hkv, D] are also stored in the cache.

    `keys` and `values` are one layer's cache [pages, Hkv, PAGE, D]. With `cos_sin`, float32 [positions, D], query and
    key are first rotated by the angles of their position. `split`: several programs share a response's pages, which
    changes no bit.
    """
    attend = decode_attention_triton if query.is_cuda else decode_attention_torch
    return attend(query, key, value, keys, values, state, scale, cos_sin=cos_sin, split=split)


def decode_attention_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    state: PagedState,
    scale: float,
    *,
    cos_sin: Tensor | None = None,
    split: bool = False,
) -> Tensor:
    from dapo.kernels import _decode_attention_triton as _attention_triton  # Triton is not installed everywhere

    return _attention_triton.launch(query, key, value, keys, values, state, scale, cos_sin, split)


def decode_attention_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    state: PagedState,
    scale: float,
    *,
    cos_sin: Tensor | None = None,
    split: bool = False,
) -> Tensor:
    """The twin of the kernel in plain PyTorch; `split` makes no difference to it."""
    batch, heads, head_dim = query.shape
    rows_B = state.rows_B.long()
    prompt_B, own_B = state.prompt_lengths[rows_B].long(), state.own_lengths[rows_B].long()
    if cos_sin is not None:
        angles_BD = cos_sin[prompt_B + own_B - 1]
        query, key = _rotated(query, angles_BD), _rotated(key, angles_BD)

    newest_B = prompt_B + own_B - 1
    pages_B1, slots_B1 = _places(state.table, rows_B, prompt_B, newest_B[:, None])
    keys[pages_B1[:, 0], :, slots_B1[:, 0]] = key
    values[pages_B1[:, 0], :, slots_B1[:, 0]] = value

    index_T = torch.arange(int(newest_B.max()) + 1, device=query.device)
    seen_BT = index_T <= newest_B[:, None]
    pages_BT, slots_BT = _places(state.table, rows_B, prompt_B, torch.minimum(index_T, newest_B[:, None]))
    keys_BTHD, values_BTHD = keys[pages_BT, :, slots_BT].float(), values[pages_BT, :, slots_BT].float()
    grouped = query.float().view(batch, keys.shape[1], -1, head_dim)
    scores = torch.einsum("bhgd,bthd->bhgt", grouped, keys_BTHD) * scale
    scores = scores.masked_fill(~seen_BT[:, None, None], float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    output = torch.einsum("bhgt,bthd->bhgd", weights.to(values.dtype).float(), values_BTHD)
    return (output / weights.sum(-1, keepdim=True)).view(batch, heads, head_dim).to(query.dtype)


def _places(table: Tensor, rows_B: Tensor, prompt_B: Tensor, index_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Page and slot of tokens, given as places in the prompt and its response together."""
    prompt_B1 = prompt_B[:, None]
    in_prompt = index_BT < prompt_B1
    local_BT = torch.where(in_prompt, index_BT, index_BT - prompt_B1)
    column_BT = local_BT // PAGE + torch.where(in_prompt, 0, (prompt_B1 + PAGE - 1) // PAGE)
    return table[rows_B[:, None], column_BT].long(), local_BT % PAGE


def _rotated(heads_BHD: Tensor, cos_sin_BD: Tensor) -> Tensor:
    cos, sin = cos_sin_BD[:, None].float().chunk(2, dim=-1)
    first, second = heads_BHD.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads_BHD.dtype)
