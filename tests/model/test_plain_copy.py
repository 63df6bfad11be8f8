"""Test the plain copy of a model in training: what transformers would load, without a second copy of the weights."""

from __future__ import annotations

import pytest
import torch

from dapo.config import LoraConfig
from dapo.model.attention import ATTENTION_NAME
from dapo.model.lora import add_adapters, merged, plain_copy
from dapo.model.trunk import FusedTrunk, can_fuse
from tests.tiny import tiny_gemma3, tiny_llama, tiny_qwen2, tiny_qwen3, tiny_smollm3

IDS = torch.tensor([[1, 40, 50, 60, 70, 80]])
BUILDS = [tiny_llama, tiny_qwen2, tiny_qwen3, tiny_smollm3, tiny_gemma3]


@torch.no_grad()
def logits(model):
    return model(IDS).logits


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("tied", [False, True])
def test_the_copy_computes_and_generates_as_the_model_and_follows_its_weights(build, tied):
    model, same = build(tie_word_embeddings=tied), build(tie_word_embeddings=tied)
    model.set_attn_implementation(ATTENTION_NAME)
    if can_fuse(model):
        FusedTrunk.of(model)  # as on a GPU: several parameters become views of one tensor
    copy = plain_copy(model)
    assert type(copy) is type(model)
    assert model.config._attn_implementation == ATTENTION_NAME, "the model itself trains on"
    torch.testing.assert_close(logits(copy), logits(same))
    assert copy.generate(IDS, max_new_tokens=3, do_sample=False).shape == (1, 9)
    pairs = zip(copy.parameters(), model.parameters(), strict=True)
    assert all(own.data_ptr() == trained.data_ptr() for own, trained in pairs)
    before = logits(copy)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert not torch.equal(logits(copy), before)


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen2])
def test_adapters_are_merged_into_the_copy_and_stay_in_the_model(build):
    model, same = build(), build()
    model.set_attn_implementation(ATTENTION_NAME)
    adapted = add_adapters(model, LoraConfig(rank=4))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    names = [name for name, _ in adapted.named_parameters()]
    copy = plain_copy(adapted)
    assert [name for name, _ in adapted.named_parameters()] == names
    assert [name for name, _ in copy.named_parameters()] == [name for name, _ in same.named_parameters()]
    same.load_state_dict(merged(adapted))
    assert torch.equal(logits(copy), logits(same))
    assert copy.model.embed_tokens.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
