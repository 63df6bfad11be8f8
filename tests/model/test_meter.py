"""Operation counts, compared with what torch counts while a tiny model runs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, Qwen2Config

from dapo.model.attention import Family
from dapo.model.memory import kv_bytes
from dapo.model.meter import causal_pairs, matmul_parameters, peak_flops, training_flops
from tests.tiny import tiny_llama, tiny_qwen2


def counted(model, batch: int, length: int) -> int:
    """Return torch's count for forward and backward through all logits, minus the rotary angles that it counts too."""
    model.set_attn_implementation("eager")
    tokens = torch.arange(batch * length).view(batch, length) % model.config.vocab_size
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    rotary = [sum(c.values()) for name, c in counter.get_flop_counts().items() if name.endswith("rotary_emb")]
    return counter.get_total_flops() - sum(rotary)


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen2])
@pytest.mark.parametrize("tied", [False, True])
def test_sequences_of_one_token_cost_what_torch_counts(build, tied):
    model = build(tie_word_embeddings=tied)
    assert training_flops(model.config, 5, causal_pairs([1] * 5)) == counted(model, 5, 1)


def test_a_long_sequence_costs_what_torch_counts_minus_the_masked_pairs():
    model, length = tiny_llama(head_dim=16), 7  # the heads together are wider than the hidden state
    config = model.config
    masked = length * (length - 1) // 2
    wasted = 12 * config.num_hidden_layers * config.num_attention_heads * 16 * masked
    assert training_flops(config, 2 * length, causal_pairs([length] * 2)) == counted(model, 2, length) - 2 * wasted


def test_frozen_weights_cost_what_torch_counts_where_only_their_input_needs_a_gradient():
    model = tiny_llama().requires_grad_(False)
    inputs = model.get_input_embeddings()(torch.arange(5)[:, None]).requires_grad_()
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=inputs, use_cache=False).logits.sum().backward()
    rotary = [sum(c.values()) for name, c in counter.get_flop_counts().items() if name.endswith("rotary_emb")]
    assert training_flops(model.config, 5, causal_pairs([1] * 5), frozen=True) == counter.get_total_flops() - sum(
        rotary
    )


def test_attention_counts_each_query_with_the_keys_up_to_its_own():
    config = tiny_llama().config
    head_dim = config.hidden_size // config.num_attention_heads
    query, key, value = (torch.randn(4, head_dim, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        for t in range(1, 5):
            (query[t - 1 : t] @ key[:t].t() @ value[:t]).sum().backward()
    one_head = counter.get_total_flops()
    without = training_flops(config, 4, 0)
    heads = config.num_hidden_layers * config.num_attention_heads
    assert training_flops(config, 4, causal_pairs([4])) - without == heads * one_head


def test_tokens_that_do_not_reach_the_head_are_not_counted_there():
    config = tiny_llama().config
    full, part = (training_flops(config, 10, 55, head_tokens=count) for count in (None, 4))
    assert full - part == 6 * 6 * config.vocab_size * config.hidden_size


def test_a_shared_prompt_counts_once():
    # Pairs of a prompt of 3 with responses of 2 and 4, counted one by one.
    pairs = sum(q + 1 for q in range(3)) + sum(3 + q + 1 for q in range(2)) + sum(3 + q + 1 for q in range(4))
    assert Family((0, 3), ((3, 2), (5, 4))).pairs == pairs == causal_pairs([5, 7]) - causal_pairs([3])


def test_matmul_parameters_are_the_model_s_matrices_with_the_head_once():
    for model in (tiny_llama(), tiny_qwen2(tie_word_embeddings=True)):
        linear = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)]
        assert matmul_parameters(model.config) == sum(linear)


def test_kv_bytes_match_a_real_cache():
    model = tiny_llama()
    cache = model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert 3 * kv_bytes(model.config, 4) == held


def test_real_models_have_the_sizes_in_their_names():
    small = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152,
    )  # fmt: skip
    large = Qwen2Config(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        vocab_size=151936,
    )  # fmt: skip
    assert matmul_parameters(small) == pytest.approx(134.5e6, rel=1e-3)
    assert matmul_parameters(large) == pytest.approx(1.5436e9, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA H800", 989e12),
        ("NVIDIA H20", 148e12),
        ("Radeon of tomorrow", None),
    ],
)
def test_the_peak_is_the_dense_rate_of_a_known_device_and_none_otherwise(name, rate):
    assert peak_flops(name) == rate


def test_the_peak_in_float32_is_unknown():
    assert peak_flops("NVIDIA H200", width=4) is None
