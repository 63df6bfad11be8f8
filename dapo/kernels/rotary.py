"""Rotary positions for the query and key heads of a joint product, and the heads' own RMS norms where there are any.

A row of `qkv` holds the heads of queries, keys and values one after another. The table holds for each position the
cosines, then the sines, of half a head; the halves of a head turn against each other. Float32 inside, rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """The norms' weights, each shared by all heads of its kind."""

    query_D: Tensor
    key_D: Tensor
    eps: float


def rotate(
    qkv_T: Tensor, positions_T: Tensor, table: Tensor | None, heads: int, kv_heads: int, norms: HeadNorms | None
) -> Tensor:
    """Queries and keys [T, (H + Hkv) * D]: without norms a view of `qkv_T`, turned in place, else a new tensor.

    Without a table nothing turns. What the norms give is rounded to the narrow type before it turns.
    """
    function = rotate_triton if qkv_T.is_cuda else rotate_torch
    return function(qkv_T, positions_T, table, heads, kv_heads, norms)


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
    """Write the query and key columns of `grad_qkv_T`, and add the norms' gradients to `norm_grads` where given.

    `qkv_T` is what `rotate` was given; without norms it is not read. Without norms `grad_qk_T` may be the same memory
    as the columns written.
    """
    function = rotate_backward_triton if grad_qk_T.is_cuda else rotate_backward_torch
    function(grad_qk_T, qkv_T, positions_T, table, heads, kv_heads, norms, norm_grads, grad_qkv_T)


def rotate_torch(
    qkv_T: Tensor, positions_T: Tensor, table: Tensor | None, heads: int, kv_heads: int, norms: HeadNorms | None
) -> Tensor:
    qk_T = query_key_columns(qkv_T, heads, kv_heads)
    if table is None and norms is None:
        return qk_T
    x = _by_head(qk_T, heads, kv_heads)
    if norms is not None:
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + norms.eps)
        x = (x * rstd * _weights(norms, heads, kv_heads)).to(qkv_T.dtype).float()
    if table is not None:
        x = _turn(x, positions_T, table, 1.0)
    out_T = x.flatten(1).to(qkv_T.dtype)
    return qk_T.copy_(out_T) if norms is None else out_T


def rotate_backward_torch(
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
    grad = _by_head(grad_qk_T, heads, kv_heads)
    if table is not None:
        grad = _turn(grad, positions_T, table, -1.0)
    if norms is not None:
        x = _by_head(query_key_columns(qkv_T, heads, kv_heads), heads, kv_heads)
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + norms.eps)
        unit = x * rstd
        if norm_grads is not None:
            norm_grads[0].add_((grad * unit)[:, :heads].sum((0, 1)))
            norm_grads[1].add_((grad * unit)[:, heads:].sum((0, 1)))
        pulled = grad * _weights(norms, heads, kv_heads)
        grad = rstd * (pulled - unit * (pulled * unit).mean(-1, keepdim=True))
    query_key_columns(grad_qkv_T, heads, kv_heads).copy_(grad.flatten(1))


def rotate_triton(
    qkv_T: Tensor, positions_T: Tensor, table: Tensor | None, heads: int, kv_heads: int, norms: HeadNorms | None
) -> Tensor:
    from dapo.kernels._rotary_triton import forward

    qk_T = query_key_columns(qkv_T, heads, kv_heads)
    if table is None and norms is None:
        return qk_T
    out_T = qk_T if norms is None else qk_T.new_empty(qk_T.shape)
    forward(qk_T, out_T, positions_T, table, heads, kv_heads, norms)
    return out_T


def rotate_backward_triton(
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
    from dapo.kernels._rotary_triton import backward

    out_T = query_key_columns(grad_qkv_T, heads, kv_heads)
    if table is None and norms is None:
        out_T.copy_(grad_qk_T)
        return
    qk_T = query_key_columns(qkv_T, heads, kv_heads)
    backward(grad_qk_T, qk_T, positions_T, table, heads, kv_heads, norms, norm_grads, out_T)


def query_key_columns(qkv_T: Tensor, heads: int, kv_heads: int) -> Tensor:
    return qkv_T[:, : qkv_T.shape[1] // (heads + 2 * kv_heads) * (heads + kv_heads)]


def _by_head(qk_T: Tensor, heads: int, kv_heads: int) -> Tensor:
    return qk_T.float().unflatten(1, (heads + kv_heads, -1))


def _weights(norms: HeadNorms, heads: int, kv_heads: int) -> Tensor:
    return torch.stack([norms.query_D] * heads + [norms.key_D] * kv_heads).float()


def _turn(x: Tensor, positions_T: Tensor, table: Tensor, direction: float) -> Tensor:
    """`x` is [T, heads, D]; direction -1 turns back."""
    cosine, sine = table[positions_T, None].chunk(2, dim=-1)
    sine = sine * direction
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
