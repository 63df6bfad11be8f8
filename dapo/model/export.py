"""Write a Hugging Face directory that transformers and vLLM load without conversion."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import logging as transformers_logging

from dapo.system.tensors import TensorFiles, write_tensors

_MAX_FILE = "50GB"  # as transformers splits weights


def save_dense(model: PreTrainedModel, state: Mapping[str, Tensor], directory: Path) -> None:
    """Save the weights `state` with the class and configuration of `model`, whose own weights are not used."""
    for name, tensors in save_config(model, state, directory).items():
        write_tensors(directory / name, tensors)


def save_config(model: PreTrainedModel, state: Mapping[str, Tensor], directory: Path) -> TensorFiles:
    """Save everything but the weights `state`, and return their tensors by the file that they belong into."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    # A new, empty model carries no quantizer or adapter, which would refuse to save or change what is saved.
    with torch.device("meta"):
        shell = type(model)(config)
    shell.load_state_dict(dict(state), strict=True, assign=True)
    shell.tie_weights()
    shell.generation_config = GenerationConfig()
    with quiet():
        shell.save_pretrained(directory, state_dict={})
    # Written without validation: some published models have settings that transformers reads but refuses to save.
    if model.generation_config is not None:
        model.generation_config.to_json_file(directory / "generation_config.json")
    return _files(shell, directory)


def _files(model: PreTrainedModel, directory: Path) -> TensorFiles:
    """Name and split the weights as `save_pretrained` does, and write the index of several files."""
    ignored = model._keys_to_ignore_on_save or ()
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}
    state = revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))
    split = split_torch_state_dict_into_shards(
        state, filename_pattern="model{suffix}.safetensors", max_shard_size=_MAX_FILE
    )
    if split.is_sharded:
        index = {
            "metadata": {"total_parameters": model.num_parameters(), **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return {file: {name: state[name] for name in names} for file, names in split.filename_to_tensors.items()}


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' own progress bars and warnings; the caller checks what matters in them."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
