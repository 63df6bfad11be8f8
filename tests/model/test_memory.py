"""The formulas of memory compared with real tensors, and the division of a GPU's memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config

from dapo.config import LoraConfig
from dapo.engine.embedded.pages import PageStore
from dapo.kernels.piece_attention import PAGE
from dapo.model.attention import Family
from dapo.model.forward import free_memory
from dapo.model.lora import add_adapters
from dapo.model.memory import (
    GIB,
    GRADIENT_BYTES,
    MASTER_BYTES,
    MOMENT_BYTES,
    USABLE,
    activation_bytes,
    adapter_parameters,
    cache_room,
    divide,
    kv_bytes,
    micro_batch,
    sampling_bytes,
)
from dapo.model.trunk import FusedTrunk
from dapo.model.varlen import Layout, Segments, VarlenAttention
from tests.tiny import tiny_llama, tiny_qwen2

QWEN2_1_5B = Qwen2Config(
    hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
    vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip
PARAMETERS = 1_543_714_304


def held_bytes(trunk: FusedTrunk, tokens: int, *, recompute: bool) -> int:
    """Return the bytes of all storages that autograd keeps between forward and backward."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    plan = VarlenAttention(Segments(Layout.of([Family((0, tokens))]), torch.device("cpu")))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = trunk.hidden(torch.arange(tokens) % 100, torch.arange(tokens), plan, recompute=recompute)
        assert kept.requires_grad  # `kept` keeps the graph, so that no address is used twice
    return sum(storages.values())


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2])
def test_activations_are_at_most_a_tenth_more_than_autograd_really_keeps(make):
    model = make(hidden_size=64, intermediate_size=192, num_hidden_layers=4).to(torch.bfloat16)
    trunk, config = FusedTrunk.of(model), model.config
    counts = {recompute: activation_bytes(config, 2, recompute=recompute) for recompute in (False, True)}
    few, many = (held_bytes(trunk, tokens, recompute=False) for tokens in (64, 192))
    passing = 2 * (4 * 192 + 2 * 64 + 8 * 64)
    assert 1 <= (counts[False] - passing) / ((many - few) / 128) < 1.1
    few, many = (held_bytes(trunk, tokens, recompute=True) for tokens in (64, 192))
    layers = config.num_hidden_layers * (4 + 2) * config.hidden_size
    assert (many - few) / 128 == pytest.approx(layers, rel=0.3)  # the embedding and the last norm are not counted
    assert counts[True] < counts[False]


def test_adapters_have_as_many_parameters_as_peft_adds():
    adapted = add_adapters(tiny_qwen2(), LoraConfig(rank=3))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert adapter_parameters(tiny_qwen2().config, 3) == trained


def test_a_page_has_the_bytes_of_its_tokens():
    store = PageStore(2, 3, 2, 16, torch.bfloat16, torch.device("cpu"))
    config = tiny_llama(num_hidden_layers=2, num_key_value_heads=2, head_dim=16).config
    assert store.storage.nbytes == 3 * PAGE * kv_bytes(config, 2)


def division(card: float, **options):
    """Divide a card of so many bytes for full training of a 1.5B model in bf16."""
    free = USABLE * card - (2 + MASTER_BYTES) * PARAMETERS
    per_token = activation_bytes(QWEN2_1_5B, 2, recompute=True)
    sizes = GRADIENT_BYTES * PARAMETERS, MOMENT_BYTES * PARAMETERS
    return divide(free, *sizes, per_token, **{"may_lend": True} | options)


def test_moments_leave_the_gpu_only_where_they_do_not_fit():
    offloaded = {card: division(card * 1e9).offloads for card in (24, 32, 48, 80, 141)}
    assert offloaded == {24: True, 32: True, 48: False, 80: False, 141: False}
    assert not divide(1e9, 1e6, 2e6, 1e6, may_lend=True).offloads  # those of adapters are too small to matter


def test_a_large_gpu_keeps_cache_and_gradients_and_a_small_one_uses_the_memory_in_turns():
    lends = {card: division(card * 1e9).lends for card in (24, 48, 80, 141)}
    assert lends == {24: True, 48: False, 80: False, 141: False}
    large, small = division(141e9), division(24e9)
    assert large.reserved > (GRADIENT_BYTES + MOMENT_BYTES) * PARAMETERS  # the cache leaves room for an update
    assert small.reserved == 0


def test_in_flight_nothing_is_lent_and_an_update_has_room_beside_the_cache():
    found = division(24e9, may_lend=False)
    assert found.offloads and not found.lends and found.reserved > GRADIENT_BYTES * PARAMETERS


@pytest.mark.parametrize("card", [24, 32, 48, 80, 141])
@pytest.mark.parametrize("longest", [1024, 9_216, 17_408, 22_528, 31_024])
def test_an_update_has_room_for_the_longest_response_wherever_that_is_possible(card, longest):
    free = USABLE * card * 1e9 - (2 + MASTER_BYTES) * PARAMETERS
    gradients, moments = GRADIENT_BYTES * PARAMETERS, MOMENT_BYTES * PARAMETERS
    kept, recomputed = (activation_bytes(QWEN2_1_5B, 2, recompute=each) for each in (False, True))

    def fits(offloads, lends, reserved):
        cache = 0 if lends else 0.5 * (free - reserved)
        room = free - gradients - (0 if offloads else moments) - cache
        split = micro_batch(room, kept, recomputed, 0, may_recompute=True, always=False, longest=longest)
        return split.tokens >= longest

    found = division(card * 1e9, longest=longest)
    assert fits(found.offloads, found.lends, found.reserved) or not fits(offloads=True, lends=True, reserved=0)


def test_a_long_response_is_recomputed_where_its_activations_do_not_fit():
    kept, recomputed = (activation_bytes(QWEN2_1_5B, 2, recompute=each) for each in (False, True))
    for given in (0, 4096):
        room = 17_000 * kept + 4 * GIB
        long, longer = (
            micro_batch(room, kept, recomputed, given, may_recompute=True, always=False, longest=longest)
            for longest in (16_384, 22_528)
        )
        assert not long.recompute and longer.recompute


@pytest.mark.parametrize("left", [4e9, 8e9, 12e9, 100e9])
def test_the_cache_leaves_room_for_the_passes_of_sampling(left):
    room, prompts = cache_room(QWEN2_1_5B, 2, left, 0.5, rows=1024, longest=1024)
    assert 0 < room <= left / 2 and prompts >= 1024
    assert room + sampling_bytes(QWEN2_1_5B, 2, 1024, prompts) <= left


def test_a_micro_batch_uses_its_room_and_no_more():
    kept, recomputed = (activation_bytes(QWEN2_1_5B, 2, recompute=each) for each in (False, True))
    for room in (2e9, 5e9, 20e9, 80e9):
        found = micro_batch(room, kept, recomputed, 0, may_recompute=True, always=False)
        used = found.head_bytes + found.tokens * (recomputed if found.recompute else kept)
        assert 0.99 * room < used <= room
        assert found.recompute == (room < 40e9)
    for most, recompute in ((1_000, False), (1_000_000, True)):  # an update that fits as a whole needs no recomputing
        found = micro_batch(20e9, kept, recomputed, 0, may_recompute=True, always=False, most=most)
        assert found.recompute is recompute
    assert micro_batch(0, kept, recomputed, 0, may_recompute=True, always=False).tokens == 0


def on_gpu(monkeypatch, **values) -> int:
    """Ask for the free memory of a GPU whose driver and allocator answer with these values."""
    cuda = {
        "mem_get_info": (values["free"], values["total"]),
        "memory_reserved": values["reserved"],
        "memory_allocated": values["allocated"],
        "get_per_process_memory_fraction": values["fraction"],
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    return free_memory(SimpleNamespace(type="cuda"))


def test_free_memory_honors_a_limit_on_the_process(monkeypatch):
    total = 100 * GIB
    margin = (1 - USABLE) * total
    whole = {"total": total, "free": 90 * GIB, "reserved": 6 * GIB, "allocated": 5 * GIB, "fraction": 1.0}
    assert on_gpu(monkeypatch, **whole) == pytest.approx(91 * GIB - margin)  # reserved memory that is not used counts
    limited = on_gpu(monkeypatch, **whole | {"fraction": 0.24})
    assert limited == pytest.approx(24 * GIB - 5 * GIB - 0.24 * margin)
    crowded = on_gpu(monkeypatch, **whole | {"fraction": 0.24, "free": 10 * GIB})  # others use the rest
    assert crowded == pytest.approx(11 * GIB - 0.24 * margin)
    assert on_gpu(monkeypatch, **whole | {"fraction": 0.05}) == 0
