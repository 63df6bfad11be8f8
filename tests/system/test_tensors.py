"""Test the writer of tensor files against the safetensors library, which reads them."""

from __future__ import annotations

import hashlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dapo.system import tensors as files
from dapo.system.tensors import write_tensors

DTYPES = [dtype for dtype in files._DTYPES if dtype != torch.complex64]


def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(0, 2, shape).to(dtype)


def test_safetensors_reads_every_dtype_and_shape_that_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_PIECE", 7)  # many pieces, also inside of elements
    monkeypatch.setattr(files, "_SYNC_AFTER", 10)
    tensors = {f"{dtype}": of(dtype, 3, 5) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), 'quoted "name" é': torch.arange(3)}
    tensors["strided"] = torch.arange(12.0).view(3, 4).T
    digest = write_tensors(tmp_path / "x.safetensors", tensors)
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float()), name
    assert digest == hashlib.sha256((tmp_path / "x.safetensors").read_bytes()).hexdigest()
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}, "transformers asks for it"


def test_a_caller_can_end_a_write_between_two_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_PIECE", 1000)
    count = 0

    def stop() -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        write_tensors(tmp_path / "x.safetensors", {"a": torch.zeros(10_000)}, stop)
    assert 2000 < (tmp_path / "x.safetensors").stat().st_size < 3000
