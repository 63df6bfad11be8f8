"""The optimizer state of several ranks: safetensors shards through torch.distributed.checkpoint, one file per rank."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

SHARDS = "trainer/optimizer"


def write(state: dict[str, Tensor], folder: Path) -> None:
    """Write the shards; called by all ranks together."""
    save(dict(state), storage_writer=HuggingFaceStorageWriter(str(folder / SHARDS), save_distributed=True))


def names(folder: Path) -> set[str]:
    """Return the names of the stored tensors, whether one process or several wrote them."""
    return set(HuggingFaceStorageReader(_place(folder)).read_metadata().state_dict_metadata)


def read_into(state: dict[str, Tensor], folder: Path) -> None:
    """Fill each rank's shards in place, whatever number of ranks wrote them; called by all ranks together."""
    load(state, storage_reader=HuggingFaceStorageReader(_place(folder)))


def read_whole(folder: Path, device: str) -> dict[str, Tensor]:
    """Read the state that several ranks have written into one process."""
    reader = HuggingFaceStorageReader(_place(folder))
    state: dict[str, Tensor] = {}
    for name, found in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(found, TensorStorageMetadata)
        state[name] = torch.empty(found.size, dtype=found.properties.dtype, device=device)
    with warnings.catch_warnings(category=UserWarning, action="ignore"):  # "assuming a single process"
        load(state, storage_reader=reader, no_dist=True)
    return state


def _place(folder: Path) -> str:
    shards = folder / SHARDS
    return str(shards if shards.is_dir() else shards.parent)
