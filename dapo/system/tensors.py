"""Tensor files in the safetensors format, written piece by piece.

Each piece is hashed on the way, so that no file is read again for its checksum, and a write can end between two pieces.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

TensorFiles = dict[str, dict[str, Tensor]]  # by the name of the file, then by that of the tensor

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip
_PIECE = 2**24  # bytes
_SYNC_AFTER = 2**29  # bytes; with more of them in the page cache, a sync of the run's database would wait for them all


def write_tensors(path: Path, tensors: Mapping[str, Tensor], before_piece: Callable[[], None] | None = None) -> str:
    """Write a file that safetensors loads, and return its SHA-256. `before_piece` may raise to end it early."""
    # Wider dtypes first, as the safetensors library orders them: every tensor is then aligned to its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    digest, unsynced = hashlib.sha256(), 0
    with path.open("wb") as file:
        header = _header(ordered)
        digest.update(header)
        file.write(header)
        for _, tensor in ordered:
            content = as_bytes(tensor)
            for start in range(0, len(content), _PIECE):
                if before_piece is not None:
                    before_piece()
                piece = content[start : start + _PIECE].cpu().numpy().data
                digest.update(piece)
                file.write(piece)
                unsynced += len(piece)
                if unsynced >= _SYNC_AFTER:
                    file.flush()
                    os.fsync(file.fileno())
                    unsynced = 0
    return digest.hexdigest()


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes as a flat tensor, without a copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _header(ordered: list[tuple[str, Tensor]]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
