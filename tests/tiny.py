"""Tiny real models with seeded random weights and a tiny real tokenizer, small enough to build in every test."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

Model = TypeVar("Model", bound=PreTrainedModel)

PAD, IM_START, IM_END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"
SPECIALS = (PAD, IM_START, IM_END, UNKNOWN)
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
VOCAB_SIZE = len(SPECIALS) + 128

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per ASCII character, so that all ASCII text round-trips."""
    # ByteLevel writes the 128 ASCII bytes as printable characters; its own encoding of them gives the alphabet.
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = [splitter.pre_tokenize_str(chr(byte))[0][0] for byte in range(128)]
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *alphabet])}
    core = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    core.pre_tokenizer = splitter  # pyright: ignore[reportAttributeAccessIssue]
    core.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, bos_token=IM_START, eos_token=IM_END, unk_token=UNKNOWN
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_llama(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    return _seeded(LlamaForCausalLM, LlamaConfig(**_shape(overrides)), seed)


def tiny_qwen2(seed: int = 0, **overrides: Any) -> Qwen2ForCausalLM:
    model = _seeded(Qwen2ForCausalLM, Qwen2Config(**_shape(overrides)), seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):  # initialized to zero, which would hide a forgotten bias
            parameter.data.normal_(std=0.2, generator=generator)
    return model


def tiny_qwen3(seed: int = 0, **overrides: Any) -> Qwen3ForCausalLM:
    model = _seeded(Qwen3ForCausalLM, Qwen3Config(**_shape({"head_dim": 16} | overrides)), seed)
    _randomize_norms(model)
    return model


def tiny_mistral(seed: int = 0, **overrides: Any) -> MistralForCausalLM:
    return _seeded(MistralForCausalLM, MistralConfig(**_shape({"sliding_window": None} | overrides)), seed)


def tiny_smollm3(seed: int = 0, **overrides: Any) -> SmolLM3ForCausalLM:
    """Return a model in which every other layer has no rotary positions."""
    layers = {"num_hidden_layers": 4, "no_rope_layer_interval": 2}
    model = _seeded(SmolLM3ForCausalLM, SmolLM3Config(**_shape(layers | overrides)), seed)
    assert {layer.self_attn.use_rope for layer in model.model.layers} == {0, 1}
    return model


def tiny_gemma3(seed: int = 0, **overrides: Any) -> Gemma3ForCausalLM:
    """Return a model with a local and a global layer, which rotate differently. No test exceeds the window."""
    shape = {"head_dim": 16, "sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}
    model = _seeded(Gemma3ForCausalLM, Gemma3TextConfig(**_shape(shape | overrides)), seed)
    _randomize_norms(model)
    return model


def _randomize_norms(model: PreTrainedModel) -> None:
    """Randomize norm weights, whose initial one or zero would hide a forgotten weight."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data += 0.5 * torch.rand(parameter.shape, generator=generator) - 0.25


def save_tiny(directory: Path, kind: str = "llama", **overrides: Any) -> Path:
    """Write a Hugging Face directory with model, tokenizer and chat template, and return it."""
    build = {"llama": tiny_llama, "qwen2": tiny_qwen2}[kind]
    build(**overrides).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def _shape(overrides: dict[str, Any]) -> dict[str, Any]:
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        # Ten times the usual scale, so that attention and logits differ visibly between inputs.
        "initializer_range": 0.2,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }
    return shape | overrides


def _seeded(build: type[Model], config: PreTrainedConfig, seed: int) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build(config).eval()
