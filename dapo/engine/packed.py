"""Weights as plain byte arrays, which a shared object store keeps once per node and all its processes read in place."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Packed(NamedTuple):
    """One tensor as bytes."""

    dtype: str
    shape: tuple[int, ...]
    values: np.ndarray  # uint8: NumPy has no bfloat16


def packed(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Packed]:
    """Return named tensors as byte arrays in main memory."""
    return {name: _pack(tensor.detach().cpu()) for name, tensor in weights}


def unpacked(weights: Mapping[str, Packed]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors as views of the arrays. They are read-only: other processes share the memory."""
    for name, (dtype, shape, values) in weights.items():
        with warnings.catch_warnings():  # torch warns that the array is not writable
            warnings.simplefilter("ignore", UserWarning)
            yield name, torch.from_numpy(values).view(getattr(torch, dtype)).view(shape)


def _pack(tensor: Tensor) -> Packed:
    flat = tensor.contiguous().flatten()
    return Packed(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.view(torch.uint8).numpy())
