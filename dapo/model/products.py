"""Products of bf16 matrices: with the same bits for any number of rows, or with a float32 result."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Without split sums, a product of few rows with many terms leaves most of a GPU idle. Padded to _ENOUGH_ROWS rows it is
# faster (docs/explanation/performance.md).
_MANY_TERMS = 4096
_ENOUGH_ROWS = 128
# A sum over many tokens with a small result would leave most of a GPU idle too: it is split into this many parts.
_SUM_PARTS = 16
_LEAST_SUMMED = 64  # tokens of a part
_TILE = 16  # columns that oneDNN's bf16 products compute at once
_FEW_TILES = 8
_REFINED = 16  # likeliest tokens of a row whose logits are not rounded
_BLOCK = 128  # tokens whose maximum is taken first


def same_bits_for_any_rows() -> None:
    """Stop all products on GPUs from splitting their sums (split-K), for the whole process.

    The library would decide to split by the number of rows. The sampler computes a few rows at a time and the trainer
    thousands; if their bits differ, rounding makes a gap of hundredths between their log-probabilities.
    """
    if "Cublaslt" not in str(torch.backends.cuda.preferred_blas_library()):  # torch was imported before dapo
        torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)


def linear(input_Ti: Tensor, weight_oi: Tensor, bias_o: Tensor | None = None) -> Tensor:
    """Return input @ weight.T + bias, with contiguous rows."""
    rows, terms = input_Ti.shape
    if input_Ti.is_cuda and terms >= _MANY_TERMS and rows < _ENOUGH_ROWS:
        return F.linear(F.pad(input_Ti, (0, 0, 0, _ENOUGH_ROWS - rows)), weight_oi, bias_o)[:rows]
    return F.linear(input_Ti, weight_oi, bias_o)


def linear_any_layout(input_Ti: Tensor, weight_oi: Tensor) -> Tensor:
    """Return input @ weight.T, possibly as a transposed view.

    On a CPU, F.linear copies the weight of a bf16 product into another layout on every call. With the weight as the
    left operand only the input is copied. That is faster if its rows fill whole tiles, and if they are few.
    """
    rows = len(input_Ti)
    if input_Ti.dtype == torch.bfloat16 and not input_Ti.is_cuda and rows % _TILE == 0 and rows <= _FEW_TILES * _TILE:
        return torch.mm(weight_oi, input_Ti.t()).t()
    return linear(input_Ti, weight_oi)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32. Logits rounded to bf16 would be off by up to a tenth."""
    if a.dtype != torch.bfloat16:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def sampling_logits(hidden_Bd: Tensor, weight_Vd: Tensor) -> Tensor:
    """Return logits [B, V] to draw from, in float32.

    A CPU multiplies bf16 matrices only into a bf16 result, and in float32 the product takes three times as long. There,
    rounded logits tell the likeliest tokens of each row, and the logits of those are computed again in float32. They
    hold most of the probability, so the distribution is close to that of the trainer.
    """
    if hidden_Bd.dtype != torch.bfloat16 or hidden_Bd.is_cuda:
        return wide_product(hidden_Bd, weight_Vd.t())
    rounded_BV = F.linear(hidden_Bd, weight_Vd)
    tokens_BK = _likeliest(rounded_BV, min(_REFINED, len(weight_Vd)))
    rows_BKd = F.embedding(tokens_BK, weight_Vd).float()
    exact_BK = torch.bmm(rows_BKd, hidden_Bd.float()[:, :, None])[:, :, 0]
    return rounded_BV.float().scatter_(1, tokens_BK, exact_BK)


def _likeliest(logits_BV: Tensor, count: int) -> Tensor:
    """Return the tokens with the largest logits. They are in the blocks with the largest maxima, so few are sorted."""
    batch, vocabulary = logits_BV.shape
    if vocabulary % _BLOCK or vocabulary < count * _BLOCK:
        return logits_BV.topk(count).indices
    blocks_BNk = logits_BV.view(batch, -1, _BLOCK)
    best_BK1 = blocks_BNk.amax(-1).topk(count).indices[:, :, None]
    candidates_BC = blocks_BNk.gather(1, best_BK1.expand(-1, -1, _BLOCK)).flatten(1)
    places_BK = candidates_BC.topk(count).indices
    return best_BK1[:, :, 0].gather(1, places_BK // _BLOCK) * _BLOCK + places_BK % _BLOCK


def add_weight_grad(total_oi: Tensor, grad_out_To: Tensor, input_Ti: Tensor) -> None:
    """Add the gradient of `weight` in `input @ weight.T` to the total, in the total's precision.

    A bf16 sum over micro-batches would lose small terms.
    """
    if total_oi.dtype == input_Ti.dtype:
        total_oi.addmm_(grad_out_To.t(), input_Ti)
    elif input_Ti.is_cuda:
        torch.addmm(total_oi, grad_out_To.t(), input_Ti, out_dtype=total_oi.dtype, out=total_oi)  # pyright: ignore[reportCallIssue]
    else:
        total_oi.addmm_(grad_out_To.t().to(total_oi.dtype), input_Ti.to(total_oi.dtype))


def add_small_grad(total_oi: Tensor, grad_out_To: Tensor, input_Ti: Tensor) -> None:
    """Add as `add_weight_grad` does, faster if the result is small, as the gradient of a LoRA adapter is."""
    tokens = len(input_Ti)
    if not input_Ti.is_cuda or tokens < _SUM_PARTS * _LEAST_SUMMED or input_Ti.dtype != torch.bfloat16:
        add_weight_grad(total_oi, grad_out_To, input_Ti)
        return
    total_oi += sum_in_parts(grad_out_To, input_Ti, _SUM_PARTS)


def sum_in_parts(a_To: Tensor, b_Ti: Tensor, parts: int) -> Tensor:
    """Return a.T @ b in float32, as the sum of `parts` products over equal numbers of tokens and one over the rest."""
    even = len(a_To) - len(a_To) % parts
    a, b = (tensor[:even].unflatten(0, (parts, -1)) for tensor in (a_To, b_Ti))
    total = _wide_batch_product(a.transpose(1, 2), b).sum(0)
    if even < len(a_To):
        total += wide_product(a_To[even:].t(), b_Ti[even:])
    return total


def _wide_batch_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())
