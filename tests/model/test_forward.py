import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
)

from dapo.errors import ModelError
from dapo.model import attention
from dapo.model.attention import ATTENTION_NAME, Family, PackedAttention
from dapo.model.forward import check_model, hidden_states, query_groups
from tests import plain
from tests.tiny import tiny_llama, tiny_qwen2

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def ready(model):
    model.set_attn_implementation(ATTENTION_NAME)
    return model.eval()


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen2])
def test_llama_and_qwen2_pass_the_check(build):
    check_model(ready(build()), 100)


def test_a_model_with_capped_logits_is_refused():
    with pytest.raises(ModelError, match="soft-capped"):
        check_model(ready(Gemma2ForCausalLM(Gemma2Config(**SMALL, sliding_window=512))), 100)


def test_a_model_that_scales_its_logits_is_refused():
    model = CohereForCausalLM(CohereConfig(**{k: v for k, v in SMALL.items() if k != "head_dim"}, logit_scale=0.25))
    with pytest.raises(ModelError, match="does not reproduce"):
        check_model(ready(model), 100)


def test_a_model_with_learned_positions_passes_too():
    config = GPT2Config(vocab_size=64, n_positions=200, n_embd=32, n_layer=2, n_head=4)
    check_model(ready(GPT2LMHeadModel(config)), 100)


def test_a_model_that_does_not_pass_the_plan_on_is_refused(monkeypatch):
    model = ready(tiny_llama())
    forward = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda *args, plan=None, **kwargs: forward(*args, **kwargs))
    with pytest.raises(ModelError, match="does not receive the attention plan"):
        check_model(model, 100)


def test_a_window_or_context_shorter_than_required_is_refused():
    model = ready(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=50)))
    check_model(model, 50)
    with pytest.raises(ModelError, match="window of 50 tokens, fewer than the 51"):
        check_model(model, 51)
    with pytest.raises(ModelError, match=r"context is 512 tokens, but .* is 513"):
        check_model(ready(tiny_llama()), 513)


@pytest.mark.parametrize("tree_tokens", [0, 512])
@pytest.mark.parametrize("query_heads", [2, 4, 8])
def test_packed_families_attend_as_if_each_response_were_alone(query_heads, tree_tokens, monkeypatch):
    monkeypatch.setattr(attention, "TREE_TOKENS", tree_tokens)
    model = tiny_llama(num_attention_heads=query_heads, head_dim=8)
    twin = plain.plain_copy(model, torch.float32)
    ready(model)
    prompt, responses = [5, 6, 7], [[8], [9, 10, 11, 12], [13, 14]]
    flat = [*prompt, *(token for response in responses for token in response), 20, 21]
    families = [Family((0, 3), ((3, 1), (4, 4), (8, 2))), Family((10, 2))]
    positions = torch.tensor([0, 1, 2, 3, 3, 4, 5, 6, 3, 4, 0, 1])
    plan = PackedAttention(families, positions, query_groups(model), torch.float32)
    with torch.no_grad():
        found = hidden_states(model, torch.tensor(flat), positions, plan)
        for (start, length), response in zip(families[0].responses, responses, strict=True):
            alone = twin.model(torch.tensor([[*prompt, *response]])).last_hidden_state[0]
            torch.testing.assert_close(found[start : start + length], alone[3:], atol=1e-5, rtol=0)
        alone = twin.model(torch.tensor([[20, 21]])).last_hidden_state[0]
        torch.testing.assert_close(found[10:], alone, atol=1e-5, rtol=0)


def plan_bytes(families):
    tokens = sum(family.tokens for family in families)
    plan = PackedAttention(families, torch.arange(tokens), 2, torch.float32)
    tensors = [getattr(bucket, name) for bucket in plan.buckets for name in ("queries", "keys", "is_query", "bias")]
    return sum(each.nbytes for each in tensors if each is not None)


@pytest.mark.parametrize("responses", [1, 3])
def test_a_plan_for_long_responses_grows_in_proportion_to_their_length(responses):
    def family(length):
        return Family((0, 100), tuple((100 + i * length, length) for i in range(responses)))

    assert plan_bytes([family(8192)]) < 9 * plan_bytes([family(1024)])
