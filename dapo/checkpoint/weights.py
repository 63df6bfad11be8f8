"""The weight and optimizer files of a checkpoint, written and read by one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from dapo.checkpoint import shards as shardfiles
from dapo.model.export import save_config
from dapo.model.lora import adapter_state, causal_lm, load_adapter_state, merged
from dapo.system.tensors import TensorFiles

ADAPTERS, OPTIMIZER = "trainer/adapters.safetensors", "trainer/optimizer.safetensors"


def begin(model: PreTrainedModel | PeftModel, optimizer: Mapping[str, Tensor], folder: Path) -> TensorFiles:
    """Write the small files of a Hugging Face directory, and return the content of the large ones.

    The large ones are the weights with adapters merged, the optimizer's state, and the adapters alone.
    """
    files = save_config(causal_lm(model), merged(model), folder)
    files[OPTIMIZER] = dict(optimizer)
    if isinstance(model, PeftModel):
        files[ADAPTERS] = adapter_state(model)
    return files


def read(model: PreTrainedModel | PeftModel, folder: Path, device: str) -> dict[str, Tensor]:
    """Load the adapters into the model, and return the optimizer's state, whether one process or several wrote it."""
    if isinstance(model, PeftModel):
        load_adapter_state(model, load_file(folder / ADAPTERS, device=device))
    if (folder / OPTIMIZER).exists():
        return load_file(folder / OPTIMIZER, device=device)
    return shardfiles.read_whole(folder, device)


def without_tied(model: PreTrainedModel, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `state`, tied weights only once, under the name that `model` lists first."""
    every, once = (model.named_parameters(remove_duplicate=each) for each in (False, True))
    tied = {name for name, _ in every} - {name for name, _ in once}
    yield from ((name, tensor) for name, tensor in state.items() if name not in tied)
