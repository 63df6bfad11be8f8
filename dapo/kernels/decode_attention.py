"""Decode attention over a paged cache: store one new token per response and attend with it, in one kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dapo.kernels.dispatch import kernel
from dapo.kernels.piece_attention import PAGE


@dataclass(frozen=True, slots=True, eq=False)
class PagedState:
    """The location of each response's tokens in the cache. All tensors are int32.

    A *row* is the slot of one response in the state; the batch names rows in any order. A row of the table lists the
    pages of the prompt, then those of the response's own tokens, which begin a new page. The own tokens begin with the
    last token of the prompt, because computing it is the first decode step of every response.
    """

    rows_B: Tensor  # the row at each place of the batch
    table: Tensor  # [rows, width] page numbers
    prompt_lengths: Tensor  # [rows] prompt tokens without the last; all are in the cache
    own_lengths: Tensor  # [rows] own tokens, counting the newest, which is not in the cache yet


@kernel
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
    """Return the output [B, H, D] for query [B, H, D], and store its key and value [B, Hkv, D] in the cache.

    `keys` and `values` are one layer's cache [pages, Hkv, PAGE, D]. With `cos_sin`, float32 [positions, D], query and
    key are first rotated by the angles of their position. With `split`, several programs share the pages of a response;
    this changes no bit.
    """
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
    """Return page and slot of tokens, given as indices into the prompt followed by the own tokens."""
    prompt_B1 = prompt_B[:, None]
    in_prompt = index_BT < prompt_B1
    local_BT = torch.where(in_prompt, index_BT, index_BT - prompt_B1)
    column_BT = local_BT // PAGE + torch.where(in_prompt, 0, (prompt_B1 + PAGE - 1) // PAGE)
    return table[rows_B[:, None], column_BT].long(), local_BT % PAGE


def _rotated(heads_BHD: Tensor, cos_sin_BD: Tensor) -> Tensor:
    cos, sin = cos_sin_BD[:, None].float().chunk(2, dim=-1)
    first, second = heads_BHD.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads_BHD.dtype)
