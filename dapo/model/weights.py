"""Checks on a model's folder before it is loaded: only .safetensors weights, and never code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dapo.errors import ModelError

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MAX_JSON_BYTES = 2**26
_CODE_KEYS = ("attn_implementation", "_attn_implementation", "experts_implementation")
# Limits on config.json. Above these, torch's integers overflow, or the model would fit in no memory.
_SIZES = {
    "num_hidden_layers": 10_000,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "vocab_size": 2**28,
    "max_position_embeddings": 2**40,
    "sliding_window": 2**40,
}


def check_folder(directory: Path, path: str) -> dict[str, Any]:
    """Return the folder's config.json; refuse a folder that transformers would unpickle, run code for, or fail on.

    transformers prefers .safetensors files, but it also loads any file that an index names, and adapters that
    config.json names.
    """
    if (directory / "adapter_config.json").is_file():  # transformers would load their base model
        raise ModelError(f"{path}: holds LoRA adapters; merge them into their base model and use the merged folder")
    if not (directory / "config.json").is_file():
        raise ModelError(f"{path}: has no config.json, so it is not a Hugging Face model directory")
    config = read_config(directory, path)
    _check_weights(directory, path, config)
    return config


def read_config(directory: Path, path: str) -> dict[str, Any]:
    """Read config.json and refuse sizes that no model has."""
    config = _read_json(directory / "config.json", path)
    text = config.get("text_config")
    for values in (config, text if isinstance(text, dict) else {}):
        _check_config(values, path)
    return config


def _check_weights(directory: Path, path: str, config: dict[str, Any]) -> None:
    pickles = sorted(file.name for pattern in _PICKLES for file in directory.glob(pattern))
    if not any(directory.glob("*.safetensors")):
        found = f"only {pickles[0]}" if pickles else "none"
        raise ModelError(f"{path}: has no weights in .safetensors files ({found}); {_CONVERT}")
    named = config.get("transformers_weights")
    if named is not None and not (isinstance(named, str) and _is_safe(named.removesuffix(".index.json"))):
        raise ModelError(f"{path}: its config.json names weights in {named!r}; {_CONVERT}")
    for index in directory.glob("*.safetensors.index.json"):
        content = _read_json(index, path)
        members = content.get("weight_map")
        if not isinstance(members, dict) or not members:
            raise ModelError(f"{path}: its {index.name} has no weight_map; fetch or save the model again")
        for member in set(map(str, members.values())):
            if not _is_safe(member):
                raise ModelError(f"{path}: its {index.name} names weights in {member!r}; {_CONVERT}")
            if not (directory / member).is_file():
                raise ModelError(f"{path}: its {index.name} names {member}, which is missing; fetch the model again")


_CONVERT = (
    "only .safetensors files are loaded, because others can run code: if you trust the model, load it with "
    "transformers and save it again with save_pretrained"
)


def _is_safe(name: str) -> bool:
    return name.endswith(".safetensors") and Path(name).name == name


def _check_config(values: dict[str, Any], path: str) -> None:
    for key in _CODE_KEYS:
        if "/" in str(values.get(key)):  # a kernel on the hub, which is code
            raise ModelError(f"{path}: its config.json asks for code from the hub ({key}); remove the key")
    for key, most in _SIZES.items():
        value = values.get(key)
        if value is not None and not (type(value) is int and 1 <= value <= most):
            shown = repr(value)[:100]
            raise ModelError(f"{path}: {key} in its config.json is {shown}, expected an integer from 1 to {most:,}")


def _read_json(file: Path, path: str) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            content = opened.read(_MAX_JSON_BYTES + 1)
        if len(content) > _MAX_JSON_BYTES:
            raise ValueError(f"longer than {_MAX_JSON_BYTES:,} bytes")
        values = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{path}: its {file.name} cannot be read ({reason}); check the file, or fetch it again"
        ) from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: its {file.name} holds a {type(values).__name__}, expected a mapping")
    return values
