from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from dapo.config import LoraConfig, ModelConfig
from dapo.errors import CheckpointError, ModelError
from dapo.model.loading import load_model
from dapo.model.lora import adapter_state, add_adapters, causal_lm, load_adapter_state, merged, reference_mode
from tests.saved import save_merged
from tests.tiny import save_tiny, tiny_llama, tiny_qwen2, tiny_tokenizer

TOKENS = torch.tensor([[1, 40, 41, 42, 77, 78, 2]])


def adapted(model: PreTrainedModel | None = None, seed: int = 0, **options: object) -> PeftModel:
    torch.manual_seed(seed)
    return add_adapters(model or tiny_qwen2(), LoraConfig.model_validate({"rank": 4, "alpha": 8} | options))


def trained(model: PeftModel) -> PeftModel:
    """Make all adapters nonzero, as after some updates."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.1)
    return model


@torch.no_grad()
def logits(model: torch.nn.Module) -> Tensor:
    return model(TOKENS).logits


def test_only_adapters_get_gradients() -> None:
    model = adapted()
    model(TOKENS).logits.sum().backward()
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learning == {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(learning) == 2 * 2 * 7  # A and B, two layers, seven linear layers in each
    assert all(".lora_" in name for name in learning)


def test_the_head_gets_no_adapter() -> None:
    assert not any("lm_head" in name for name in adapter_state(adapted()))


def test_fresh_adapters_change_nothing() -> None:
    assert torch.equal(logits(adapted()), logits(tiny_qwen2()))


def test_the_same_seed_gives_the_same_adapters() -> None:
    first, second, third = (adapter_state(adapted(seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], third[name]) for name in first)


def test_adapters_are_scaled_by_alpha_over_rank() -> None:
    model, doubled = trained(adapted()), adapted(alpha=16)
    load_adapter_state(doubled, adapter_state(model))
    name = "model.layers.0.mlp.up_proj.weight"
    base = tiny_qwen2().state_dict()[name]
    assert torch.allclose(merged(doubled)[name] - base, 2 * (merged(model)[name] - base), atol=1e-6)


def test_the_reference_is_the_model_without_its_adapters() -> None:
    model = trained(adapted())
    with reference_mode(model):
        reference = logits(model)
    assert torch.equal(reference, logits(tiny_qwen2()))
    assert not torch.allclose(logits(model), reference)


def test_adapters_still_learn_after_the_reference_was_computed() -> None:
    model = trained(adapted())
    loss = model(TOKENS).logits.square().mean()
    with reference_mode(model), torch.no_grad():
        model(TOKENS)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("tied", [False, True])
def test_a_merged_directory_loads_in_plain_transformers_with_the_same_logits(tied: bool, tmp_path: Path) -> None:
    model = trained(adapted(tiny_llama(tie_word_embeddings=tied)))
    before = logits(model)
    save_merged(model, tiny_tokenizer(), tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not (tmp_path / "adapter_config.json").exists()  # transformers would apply the adapters a second time
    assert torch.allclose(logits(plain), before, atol=1e-5)
    assert torch.equal(logits(model), before), "merging changed the live model"


def test_merging_into_bfloat16_weights_rounds_once() -> None:
    base: Any = tiny_qwen2()
    model = trained(adapted(base.bfloat16()))
    name = "model.layers.1.self_attn.q_proj"
    state, plain = adapter_state(model), tiny_qwen2().state_dict()[f"{name}.weight"].bfloat16().float()
    down, up = (state[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    assert down.dtype == up.dtype == torch.float32, "small updates would be lost in bfloat16"
    exact, found = plain + 2 * up @ down, merged(model)[f"{name}.weight"]
    lower = torch.minimum(exact.abs(), found.abs().float())
    assert ((found - exact).abs() <= lower * 2**-7).all(), "one of the two neighbors in bfloat16"


def test_a_plain_model_is_saved_as_it_is(tmp_path: Path) -> None:
    model = tiny_qwen2()
    assert adapter_state(model) == {}
    save_merged(model, tiny_tokenizer(), tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_a_model_round_trips_through_loading_and_saving(tmp_path: Path) -> None:
    source = ModelConfig.model_validate({"path": str(save_tiny(tmp_path / "a", eos_token_id=[2, 5])), "device": "cpu"})
    first = load_model(source)
    save_merged(first.model, first.tokenizer, tmp_path / "b")
    second = load_model(source.model_copy(update={"path": str(tmp_path / "b")}), attention="sdpa")
    assert second.stop_ids == first.stop_ids == {2, 5}
    assert second.tokenizer.chat_template == first.tokenizer.chat_template
    assert torch.equal(logits(second.model), logits(tiny_llama()))


def test_generation_settings_that_transformers_refuses_to_save_do_not_stop_a_checkpoint(tmp_path: Path) -> None:
    model = tiny_llama()
    assert model.generation_config is not None
    model.generation_config.temperature = 0.6  # without do_sample: published models have it
    with pytest.raises(ValueError, match="temperature"):
        model.save_pretrained(tmp_path / "stock")
    save_merged(model, tiny_tokenizer(), tmp_path / "ours")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert loaded.generation_config is not None
    assert loaded.generation_config.temperature == 0.6


def test_adapters_round_trip_through_their_state() -> None:
    model, other = trained(adapted()), adapted(seed=7)
    saved = adapter_state(model)
    load_adapter_state(other, saved)
    assert torch.equal(logits(other), logits(model))
    trained(model)
    assert torch.equal(logits(other), logits(adapted_from(saved))), "the state is a copy, not a view"


def adapted_from(state: dict[str, Tensor]) -> PeftModel:
    model = adapted()
    load_adapter_state(model, state)
    return model


def test_adapters_of_another_shape_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"lora_A.* has shape \(4, .*expected \(2, "):
        load_adapter_state(adapted(rank=2), adapter_state(adapted()))
    with pytest.raises(CheckpointError, match="expected none"):
        load_adapter_state(adapted(target_modules=("q_proj",)), adapter_state(adapted()))


def test_adapters_are_added_only_to_the_target_modules() -> None:
    names = adapter_state(adapted(target_modules=("q_proj", "layers.1.mlp.up_proj")))
    modules = {name.removeprefix("base_model.model.model.").split(".lora_")[0] for name in names}
    assert modules == {"layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj", "layers.1.mlp.up_proj"}


@pytest.mark.parametrize("unknown", ["query_key_value", "embed_tokens", "proj"])
def test_one_unknown_target_among_known_ones_is_refused_with_the_available_names(unknown: str) -> None:
    with pytest.raises(ModelError, match=f"no linear layer '{unknown}'; it has down_proj, gate_proj, k_proj"):
        adapted(target_modules=("q_proj", unknown))


def test_the_causal_lm_is_found_with_and_without_adapters() -> None:
    model = tiny_llama()
    assert causal_lm(model) is model
    assert causal_lm(adapted(model)) is model
