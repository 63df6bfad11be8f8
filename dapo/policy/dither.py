"""Float32 shards that hold bf16 numbers between updates, rounded with the same dither as in one process.

FSDP casts a shard to bf16 whenever it gathers it, always to the nearest, which would discard small updates
(`kernels/rounding.py`). So between updates the shards hold numbers that need no more rounding, and the 16 bits that
rounding takes from each master are kept next to it. Nothing is lost: an update begins with the exact masters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dapo.kernels.rounding import HASH_1, HASH_2

_LOW = 0xFFFF  # the bits of a float32 number that bf16 does not have
_AT_ONCE = 1 << 24  # numbers rounded at a time, to bound temporary memory


class DitheredShards:
    """Rounds float32 shards in place, to the bits that `kernels/rounding.py` gives for the whole tensor.

    So the result does not depend on the number of ranks. Infinities and NaN need no care: the shards are loaded as bf16
    numbers, which rounding does not change, and an update whose gradient is not finite is skipped.
    """

    def __init__(self, shards: Sequence[Tensor]) -> None:
        self._shards = [tensor for tensor in shards if isinstance(tensor, DTensor)]
        self._cut = [torch.empty_like(local_part(shard), dtype=torch.int16) for shard in self._shards]
        self._round()

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Put the exact masters in place within the block."""
        self._restore()
        try:
            yield
        finally:
            self._round()

    @property
    def nbytes(self) -> int:
        return sum(cut.nbytes for cut in self._cut)

    @torch.no_grad()
    def _round(self) -> None:
        for bits, cut, thresholds in self._parts():
            bits += thresholds
            cut.copy_(bits)  # the low 16 bits
            bits &= ~_LOW

    @torch.no_grad()
    def _restore(self) -> None:
        for bits, cut, thresholds in self._parts():
            bits |= cut.int() & _LOW
            bits -= thresholds

    def _parts(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the shards' bits, the bits that rounding takes from them, and the thresholds, a part at a time."""
        for shard, cut in zip(self._shards, self._cut, strict=True):
            all_bits, first = local_part(shard).view(-1).view(torch.int32), first_index(shard)
            for bits, part in zip(all_bits.split(_AT_ONCE), cut.view(-1).split(_AT_ONCE), strict=True):
                yield bits, part, _thresholds(first, bits)
                first += len(bits)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def first_index(shard: DTensor) -> int:
    """Return where this rank's part of a tensor begins, counted in elements of the whole tensor."""
    mesh = shard.device_mesh
    assert [placement.is_shard(0) for placement in shard.placements] == [True]
    rows = -(-shard.shape[0] // mesh.size())  # per rank, rounded up; the last ranks may have fewer or none
    return min(mesh.get_local_rank() * rows, shard.shape[0]) * shard.shape[1:].numel()


@torch.no_grad()
def to_bf16(shard: DTensor) -> Tensor:
    """Round a float32 shard to bf16."""
    rounded = shard.clone()
    DitheredShards([rounded])  # in place
    return rounded.bfloat16()


def _thresholds(first: int, like: Tensor) -> Tensor:
    """Return the thresholds of `kernels/rounding.py` for the elements of a tensor from index `first`."""
    x = torch.arange(first, first + len(like), device=like.device).int()
    x = (x ^ _shift(x, 16)) * HASH_1
    x = (x ^ _shift(x, 15)) * (HASH_2 - (1 << 32))
    return (x ^ _shift(x, 16)) & _LOW


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right without copying the sign bit, as for unsigned integers."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)
