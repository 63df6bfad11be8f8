"""Load `model.path`: dense weights that can be trained, the tokenizer, and the tokens that end a response."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dapo.config import ModelConfig
from dapo.errors import ModelError, first_line
from dapo.model.attention import ATTENTION_NAME
from dapo.model.export import quiet
from dapo.model.forward import check_limits
from dapo.model.gguf import ensure_converted, ensure_fetched, find_local
from dapo.model.weights import check_folder
from dapo.system.progress import progress

_PYPI = "pypi:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_GREATEST_ID = 2**31 - 1  # token ids are int32 on the GPU
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]


def load_model(config: ModelConfig, attention: str = ATTENTION_NAME) -> LoadedModel:
    """Load the model in evaluation mode, with gradients enabled for all weights.

    Evaluation mode switches dropout off: the sampler and the trainer must compute the same log-probabilities.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    if device.type == "cuda":  # streams, graphs and Triton kernels use the current device
        torch.cuda.set_device(device)
    directory = resolve_path(config.path)
    with progress(f"Loading {config.path}"), quiet():
        _check_config(directory, config.path)
        tokenizer = _load_tokenizer(directory, config.path)
        model = _load_weights(directory, config.path, dtype, attention).to(device)  # pyright: ignore[reportArgumentType]
    rows = len(model.get_input_embeddings().weight)  # pyright: ignore[reportArgumentType]
    _check_tokenizer(rows, tokenizer, config.path)
    return LoadedModel(model, tokenizer, _stop_ids(model.generation_config, tokenizer, config.path))


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer without the model's weights."""
    directory = resolve_path(path)
    if (directory / "config.json").is_file():  # transformers reads it too, and would blame the tokenizer
        with quiet():
            _check_config(directory, path)
    return _load_tokenizer(directory, path)


def load_vocabulary(path: str) -> tuple[PreTrainedTokenizerBase, frozenset[int]]:
    """Load a model's tokenizer and the tokens that end a response, without the model's weights."""
    directory = resolve_path(path)
    with quiet():
        config = _check_config(directory, path)
        tokenizer = _load_tokenizer(directory, path)
        generation = _load_generation_config(directory, path)
    _check_tokenizer(config.get_text_config().vocab_size, tokenizer, path)
    return tokenizer, _stop_ids(generation, tokenizer, path)


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if match is None:
        raise ModelError(f"model.device is '{name}', expected cpu, cuda, cuda:N or auto")
    if name == "cpu":
        return torch.device("cpu")
    count, index = torch.cuda.device_count(), int(match[1] or 0)
    if index >= count:
        raise ModelError(f"model.device is '{name}', but PyTorch finds {count} GPUs here; set model.device=auto")
    return torch.device("cuda", index)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def resolve_path(path: str) -> Path:
    """Return the local Hugging Face directory behind `model.path`, fetching and converting it if needed."""
    if path.startswith(_PYPI):
        return ensure_converted(ensure_fetched(path.removeprefix(_PYPI)))
    local = Path(os.path.expanduser(path))  # unlike pathlib's expanduser, accepts an unknown ~name
    if local.is_dir():
        return local
    _check_path(path)
    return ensure_converted(local) if local.is_file() else fetch_from_hub(path)


def find_path(path: str) -> Path | None:
    """Return the local Hugging Face directory behind `model.path`; None if it has to be fetched or converted first."""
    if not path.startswith(_PYPI):
        _check_path(path)
    folder = find_local(path)
    is_given = Path(os.path.expanduser(path)).is_dir()  # a folder of the cache may hold only some of the files
    return folder if folder is not None and (is_given or any(folder.glob("*.safetensors"))) else None


def _check_path(path: str) -> None:
    """Refuse what can be neither a model on this machine nor the id of one on the hub."""
    local = Path(os.path.expanduser(path))
    if local.is_dir():
        return
    if local.is_file() and local.suffix != ".gguf":
        raise ModelError(f"{path}: is a file, expected a Hugging Face directory or a .gguf file")
    if not local.is_file() and (local.suffix == ".gguf" or not _HUB_ID.fullmatch(path)):
        raise ModelError(
            f"{path}: does not exist; model.path takes a directory, a hub id, a .gguf file or pypi:PACKAGE"
        )


def check_architecture(folder: Path, max_length: int) -> PreTrainedModel:
    """Refuse a model whose class, context or head dapo does not support. No weights are read.

    Return the model without its weights, on the meta device.
    """
    with quiet():
        config = _check_config(folder, str(folder))
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        except Exception as error:
            raise ModelError(
                f"{folder}: is not a causal language model that transformers knows ({first_line(error)})"
            ) from error
    check_limits(model, max_length)
    return model


def fetch_from_hub(repo: str) -> Path:
    try:
        # huggingface_hub shows its own progress, with sizes.
        return Path(snapshot_download(repo, allow_patterns=_HUB_FILES, ignore_patterns=["*/*", "consolidated*"]))
    except Exception as error:
        raise ModelError(
            f"{repo}: is not a local directory and could not be fetched from the Hugging Face hub "
            f"({first_line(error)}); check the name and the network, or give a local directory"
        ) from error


def _check_config(directory: Path, path: str) -> Any:
    """Return the configuration. Refuse a model for what its config.json says, before the weights are read."""
    check_folder(directory, path)
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            f"{path}: transformers cannot use its config.json ({first_line(error)}); "
            "check the file, or upgrade transformers if the model is newer"
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{path}: its weights are quantized and cannot be trained; use the unquantized model")
    return config


def _load_tokenizer(directory: Path, path: str) -> PreTrainedTokenizerBase:
    # Without these files, some tokenizer classes are created with an almost empty vocabulary.
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(f"{path}: has no tokenizer (such as tokenizer.json); save the model's tokenizer beside it")
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            f"{path}: its tokenizer cannot be loaded ({first_line(error)}); save the model's tokenizer there again"
        ) from error


def _load_generation_config(directory: Path, path: str) -> GenerationConfig:
    """Load it as transformers does beside the weights: from config.json if it has no readable file of its own."""
    try:
        try:
            return GenerationConfig.from_pretrained(directory)
        except OSError:
            return GenerationConfig.from_pretrained(directory, "config.json")
    except Exception as error:
        reason = first_line(error)
        raise ModelError(f"{path}: its generation_config.json cannot be used ({reason}); correct it") from error


def _load_weights(directory: Path, path: str, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        raise ModelError(
            f"{path}: its weights cannot be loaded ({first_line(error)}); "
            "the files may be incomplete, or may not be a causal language model"
        ) from error
    model, info = loaded
    # transformers would only warn, and fill the missing weights with random numbers.
    if missing := info["missing_keys"]:
        raise ModelError(
            f"{path}: its files lack {len(missing)} weights that config.json asks for, such as {min(missing)}; "
            "fetch or save the model again"
        )
    return model


def _check_tokenizer(rows: int, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Refuse a tokenizer whose highest token has no row in the embedding. More rows than tokens are common."""
    token, number = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))
    if number >= rows:
        raise ModelError(
            f"{path}: its tokenizer has the token {number} ({token[:40]!r}), but its embedding has only {rows} rows; "
            "save the tokenizer that the model was trained with beside it"
        )


def _stop_ids(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase, path: str) -> frozenset[int]:
    ends: Any = generation.eos_token_id if generation is not None else None
    candidates: list[Any] = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id]
    invalid = [end for end in candidates if end is not None and not (type(end) is int and 0 <= end <= _GREATEST_ID)]
    if invalid:
        raise ModelError(
            f"{path}: eos_token_id in its generation_config.json is {invalid[0]!r}, expected the number of a token"
        )
    ids = frozenset(end for end in candidates if end is not None)
    if not ids:
        raise ModelError(
            f"{path}: neither its generation_config.json nor its tokenizer names a token that ends a response; "
            "set eos_token_id there"
        )
    return ids
