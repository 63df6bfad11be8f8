"""FSDP2 around a causal LM: the weights of each layer, and those outside of the layers, are sharded over all ranks."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from dapo.errors import ModelError
from dapo.model.loading import resolve_device
from dapo.policy.dither import to_bf16

Result = TypeVar("Result")
Model = TypeVar("Model", bound=nn.Module)


class Root(nn.Module):
    """Runs a function while the weights outside of the layers (embedding, last norm, head) are gathered.

    The model's own forward does not include the head's loss, and a tied head is the embedding. So both belong to the
    root, and the root's forward is any function that needs them.
    """

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(self, run: Callable[[], Result]) -> Result:
        return run()


def backend(on_gpu: bool) -> str:
    """Return the backend of torch.distributed. Objects and shards in CPU memory always travel by gloo."""
    return "cpu:gloo,cuda:nccl" if on_gpu else "gloo"


def rank_device(name: str) -> torch.device:
    """Return the device of this rank: the GPU with its local rank, or the CPU."""
    device = resolve_device(name)
    if device.type == "cpu":
        return device
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= gpus or name.startswith("cuda:"):
        raise ModelError(
            f"model.device is '{name}', but each of the {dist.get_world_size()} learners needs a GPU of its own, and "
            f"there are {gpus} here; set model.device to cuda with enough GPUs, or to cpu"
        )
    return torch.device("cuda", local_rank)


def uninitialized_copy(model: Model, device: torch.device | str) -> Model:
    """Copy a model with uninitialized weights; tied ones stay tied.

    Buffers are copied with their values, also to a copy on the meta device, because some of them, such as rotary
    frequencies, are in no file.
    """
    weights: dict[int, Any] = {
        id(old): nn.Parameter(torch.empty_like(old, device=device), requires_grad=old.requires_grad)
        for old in model.parameters()
    }
    twin = copy.deepcopy(model, weights)
    return twin if torch.device(device).type == "meta" else twin.to(device)


def shard(causal_lm: Any, device: torch.device, compute: torch.dtype, *, recompute: bool, offload: bool) -> Root:
    """Shard the weights of rank 0 over all ranks, in place. The shards are float32: they are the master weights."""
    weights = _move_to_meta(causal_lm)
    in_cpu_memory = offload and device.type == "cuda"
    narrow = compute == torch.bfloat16
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32) if narrow
        else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy() if in_cpu_memory else OffloadPolicy(),
    }  # fmt: skip
    for layer in _layers(causal_lm):
        if recompute:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        fully_shard(layer, **options)
    root = fully_shard(Root(causal_lm), **options)
    assert isinstance(root, Root)
    place = torch.device("cpu") if in_cpu_memory else device
    root._apply(lambda tensor: torch.empty_like(tensor, device=place) if tensor.is_meta else tensor)
    _fill(causal_lm, weights, device)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the token counts of all ranks, so gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


def _layers(causal_lm: Any) -> list[nn.Module]:
    """Return the decoder layers: the modules that transformers says must not be split."""
    kinds = set(causal_lm._no_split_modules or ())
    return [module for module in causal_lm.modules() if type(module).__name__ in kinds]


def _move_to_meta(model: nn.Module) -> dict[str, Tensor]:
    """Replace the weights by meta tensors of at least float32. Returns the old ones, with values on rank 0 only."""
    old = dict(model.named_parameters())
    shapes = {
        weight: nn.Parameter(
            torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32), device="meta"),
            requires_grad=weight.requires_grad,
        )
        for weight in old.values()
    }
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            setattr(module, name, shapes[weight])
    return {name: weight.data if dist.get_rank() == 0 else weight.data.to("meta") for name, weight in old.items()}


@torch.no_grad()
def _fill(model: nn.Module, weights: dict[str, Tensor], device: torch.device) -> None:
    """Broadcast the weights of rank 0 one by one. Each rank keeps its shard and holds at most one whole weight."""
    for name, shards in model.named_parameters():
        weight = weights.pop(name)
        full = torch.empty_like(weight, device=device) if weight.is_meta else weight.to(device).contiguous()
        dist.broadcast(full, 0)
        assert isinstance(shards, DTensor)
        part = distribute_tensor(full, shards.device_mesh, shards.placements, src_data_rank=None)
        shards.to_local().copy_(part.to_local())


def gather_full(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Gather the full tensor on every rank. It is rounded to `dtype` first, so that fewer bytes travel."""
    moved = tensor.to(device)
    if isinstance(moved, DTensor) and moved.dtype == torch.float32 and dtype == torch.bfloat16:
        moved = to_bf16(moved)
    elif moved.is_floating_point():
        moved = moved.to(dtype)
    return moved.full_tensor() if isinstance(moved, DTensor) else moved
