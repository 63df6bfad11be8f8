"""LoRA adapters: add them to the model, switch them off for the reference, merge them for export."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dapo.config import LoraConfig
from dapo.errors import CheckpointError, ModelError
from dapo.model.joined import ADAPTER, add_delta, unmerged
from dapo.model.trunk import trunk_of


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> peft.PeftModel:
    """Freeze the weights and add adapters, initialized from torch's global random generator."""
    assert config.rank > 0, "rank 0 means no adapters"
    targets = config.target_modules
    check_targets(model, targets)
    settings = adapter_settings(config, targets if isinstance(targets, str) else list(targets))
    adapted = peft.get_peft_model(model, settings, adapter_name=ADAPTER)
    assert isinstance(adapted, peft.PeftModel)
    return adapted.eval()


def adapter_settings(config: LoraConfig, targets: str | list[str], **more: Any) -> peft.LoraConfig:
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]  # only ever divided by the rank
        lora_dropout=0.0,
        bias="none",
        target_modules=targets,
        **more,
    )


def causal_lm(model: PreTrainedModel | peft.PeftModel) -> PreTrainedModel:
    """Return the model with trunk and head, with or without adapters wrapped around it."""
    inner = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    assert isinstance(inner, PreTrainedModel)
    return inner


@contextmanager
def reference_mode(model: PreTrainedModel | peft.PeftModel) -> Iterator[None]:
    """Switch the adapters off within the block, so that the model is the reference model."""
    assert isinstance(model, peft.PeftModel), "a model without adapters does not contain its reference"
    with model.disable_adapter(), unmerged(trunk_of(causal_lm(model)).adapted):
        yield


@torch.no_grad()
def merged(model: PreTrainedModel | peft.PeftModel) -> dict[str, Tensor]:
    """Return all weights under their plain names with the adapters merged in, without changing the model.

    Weights without adapters are not copied, nor are those that the fused trunk holds merged.
    """
    inner = causal_lm(model)
    held = {layer: value for weight in trunk_of(inner).adapted for layer, value in weight.views()}
    state = {
        name.replace(".base_layer.", "."): tensor for name, tensor in inner.state_dict().items() if ".lora_" not in name
    }
    for name, module in inner.named_modules():
        if isinstance(module, LoraLayer):
            state[f"{name}.weight"] = held[module] if module in held else _merged_weight(module)
    return state


def _merged_weight(layer: Any) -> Tensor:
    base = layer.get_base_layer().weight
    out = torch.empty_like(base)
    add_delta(base, layer.get_delta_weight(ADAPTER), out)
    return out


@torch.no_grad()
def plain_copy(model: PreTrainedModel | peft.PeftModel) -> PreTrainedModel:
    """Return the model as transformers would load it: adapters merged, attention by PyTorch.

    It shares all tensors with `model`, except for weights that have adapters, if they are not merged in training.
    """
    tensors = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    if isinstance(twin, peft.PeftModel):
        weights = merged(model)
        for name, module in causal_lm(twin).named_modules():
            if isinstance(module, LoraLayer):
                module.get_base_layer().weight = nn.Parameter(weights[f"{name}.weight"])
        twin = twin.unload()
    assert isinstance(twin, PreTrainedModel)
    twin.set_attn_implementation("sdpa" if twin._supports_sdpa else "eager")
    return twin.eval()


def adapter_state(model: PreTrainedModel | peft.PeftModel) -> dict[str, Tensor]:
    """Return a copy of the adapters under PEFT's file names; empty for a model without adapters."""
    if not isinstance(model, peft.PeftModel):
        return {}
    return {name: tensor.detach().clone() for name, tensor in _adapter_tensors(model).items()}


@torch.no_grad()
def load_adapter_state(model: peft.PeftModel, state: Mapping[str, Tensor]) -> None:
    own = _adapter_tensors(model)
    expected, found = ({name: tuple(tensor.shape) for name, tensor in part.items()} for part in (own, state))
    if expected != found:
        name = min(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise CheckpointError(
            f"the saved adapters do not fit model.lora: {name} has shape {found.get(name, 'none')}, "
            f"expected {expected.get(name, 'none')}; use the rank and target_modules they were trained with"
        )
    for name, tensor in own.items():
        tensor.copy_(state[name])


def _adapter_tensors(model: peft.PeftModel) -> dict[str, Tensor]:
    # By default PEFT asks the hub whether the embeddings were resized.
    return peft.get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)


def check_targets(model: PreTrainedModel, targets: str | tuple[str, ...]) -> None:
    """Refuse names that match no layer. PEFT ignores them as long as one name matches."""
    if targets == "all-linear":
        return
    head = model.get_output_embeddings()
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D) and part is not head]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            names = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in linear})[:8])
            raise ModelError(f"model.lora.target_modules: the model has no linear layer '{target}'; it has {names}")
