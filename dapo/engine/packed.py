"""Weights as plain arrays: what a shared store keeps once per node, and what every process on it reads in place."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Packed(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    values: np.ndarray  # uint8: NumPy has no bfloat16


def packed(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Packed]:
    return {name: _pack(tensor.detach().cpu()) for name, tensor in weights}


def unpacked(weights: Mapping[str, Packed]) -> Iterator[tuple[str, Tensor]]:
    """Views of the very memory: only to be read."""
    for name, (dtype, shape, values) in weights.items():
        with warnings.catch_warnings():  # that nothing may be written there is known
            warnings.simplefilter("ignore", UserWarning)
            yield name, torch.from_numpy(values).view(getattr(torch, dtype)).view(shape)


def _pack(tensor: Tensor) -> Packed:
    flat = tensor.contiguous().flatten()
    return Packed(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.view(torch.uint8).numpy())
