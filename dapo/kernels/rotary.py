"""Rotary position embedding of query and key heads, and the heads' own RMS norms where the model has them.

A row of `qkv` holds the query heads, then the key heads, then the value heads of one token. The table holds for each
position D/2 cosines, then D/2 sines. Column i of a head's first half and column i of its second half form the pair that
is rotated. The computation is in float32 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dapo.kernels.dispatch import kernel, kernel_where, on_cuda
from dapo.kernels.native import is_native


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """The weights of the head norms: one for all query heads, one for all key heads."""

    query_D: Tensor
    key_D: Tensor
    eps: float


def _is_native(qkv_T: Tensor, *_: object) -> bool:
    return qkv_T.stride(1) == 1 and is_native(qkv_T)


@kernel_where(on_cuda, native=_is_native)
def rotate(
    qkv_T: Tensor, positions_T: Tensor, table: Tensor | None, heads: int, kv_heads: int, norms: HeadNorms | None
) -> Tensor:
    """Return the rotated queries and keys [T, (H + Hkv) * D].

    Without norms they are a view of `qkv_T`, rotated in place; with norms they are a new tensor, and the output of the
    norms is rounded to the dtype of `qkv_T` before the rotation. Without a table nothing is rotated.
    """
    qk_T = query_key_columns(qkv_T, heads, kv_heads)
    if table is None and norms is None:
        return qk_T
    x = _by_head(qk_T, heads, kv_heads)
    if norms is not None:
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + norms.eps)
        x = (x * rstd * _norm_weights(norms, heads, kv_heads)).to(qkv_T.dtype).float()
    if table is not None:
        x = _rotated(x, positions_T, table, 1.0)
    out_T = x.flatten(1).to(qkv_T.dtype)
    return qk_T.copy_(out_T) if norms is None else out_T


@kernel
def rotate_backward(
    grad_qk_T: Tensor,
    qkv_T: Tensor,
    positions_T: Tensor,
    table: Tensor | None,
    heads: int,
    kv_heads: int,
    norms: HeadNorms | None,
    norm_grads: tuple[Tensor, Tensor] | None,
    grad_qkv_T: Tensor,
) -> None:
    """Write the query and key columns of `grad_qkv_T`, and add the norms' weight gradients to `norm_grads` if given.

    `qkv_T` is the input of `rotate`; it is read only with norms. Without norms, `grad_qk_T` may be the same memory as
    the columns that are written.
    """
    grad = _by_head(grad_qk_T, heads, kv_heads)
    if table is not None:
        grad = _rotated(grad, positions_T, table, -1.0)
    if norms is not None:
        x = _by_head(query_key_columns(qkv_T, heads, kv_heads), heads, kv_heads)
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + norms.eps)
        unit = x * rstd
        if norm_grads is not None:
            norm_grads[0].add_((grad * unit)[:, :heads].sum((0, 1)))
            norm_grads[1].add_((grad * unit)[:, heads:].sum((0, 1)))
        grad_unit = grad * _norm_weights(norms, heads, kv_heads)
        grad = rstd * (grad_unit - unit * (grad_unit * unit).mean(-1, keepdim=True))
    query_key_columns(grad_qkv_T, heads, kv_heads).copy_(grad.flatten(1))


def query_key_columns(qkv_T: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Return the view without the value heads."""
    return qkv_T[:, : qkv_T.shape[1] // (heads + 2 * kv_heads) * (heads + kv_heads)]


def _by_head(qk_T: Tensor, heads: int, kv_heads: int) -> Tensor:
    return qk_T.float().unflatten(1, (heads + kv_heads, -1))


def _norm_weights(norms: HeadNorms, heads: int, kv_heads: int) -> Tensor:
    return torch.stack([norms.query_D] * heads + [norms.key_D] * kv_heads).float()


def _rotated(x: Tensor, positions_T: Tensor, table: Tensor, direction: float) -> Tensor:
    """Rotate `x` [T, heads, D] by the angles of its positions; direction -1 rotates back."""
    cosine, sine = table[positions_T, None].chunk(2, dim=-1)
    sine = sine * direction
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
