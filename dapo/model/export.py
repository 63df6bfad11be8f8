"""Write a Hugging Face directory that transformers and vLLM load without conversion."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging


def save_dense(model: PreTrainedModel, state: Mapping[str, Tensor], directory: Path) -> None:
    """Save the weights `state` with the class and configuration of `model`, whose own weights are not used."""
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
        shell.save_pretrained(directory)
    for weights in directory.glob("*.safetensors"):  # safetensors makes them readable only by the owner
        shutil.copymode(directory / "config.json", weights)
    # Written without validation: some published models have settings that transformers reads but refuses to save.
    if model.generation_config is not None:
        model.generation_config.to_json_file(directory / "generation_config.json")


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
