"""The weights of the fused trunk: parameters of the Hugging Face model joined into one tensor, adapters merged in."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from dapo.kernels.rounding import round_dithered
from dapo.model.memory import BASE_SHARE
from dapo.model.products import add_small_grad, add_weight_grad

ADAPTER = "default"  # PEFT's name of the one adapter that a layer has


@dataclass(eq=False, slots=True)
class Weight:
    """One tensor, of which parameters of the Hugging Face model are views, and its gradient, summed in float32."""

    value: Tensor
    parts: tuple[nn.Parameter, ...]  # consecutive along the first dimension
    grad: Tensor | None = None  # None: no gradient is wanted

    @classmethod
    @torch.no_grad()
    def of(cls, *parameters: nn.Parameter) -> Weight:
        """Join parameters into one tensor and make them views of it, so that no second copy remains."""
        if len(parameters) == 1:
            return cls(parameters[0].data, parameters)
        value = torch.cat([parameter.data for parameter in parameters])
        for parameter, view in zip(parameters, value.split([len(p) for p in parameters]), strict=True):
            parameter.data = view
        return cls(value, parameters)

    def add_grad(self, grad_out_To: Tensor, input_Ti: Tensor) -> None:
        if self.grad is not None:
            add_weight_grad(self.grad, grad_out_To, input_Ti)


@dataclass(frozen=True, slots=True, eq=False)
class _Adapter:
    """One layer's adapter: scale * B @ A is added to its rows of the joined weight."""

    layer: Any  # PEFT's, with the base weight and the parameters A and B
    rows: slice  # of the joined weight
    ranks: slice  # rows of the joined A
    up: Weight  # B, [out, rank]
    scaled_up: Tensor  # scale * B, in the dtype of the products

    @property
    def base(self) -> nn.Parameter:
        return self.layer.get_base_layer().weight

    @property
    def scale(self) -> float:
        return self.layer.scaling[ADAPTER]


@dataclass(eq=False, slots=True)
class AdaptedWeight:
    """A joined weight with LoRA adapters merged in: base + scale * B @ A, rounded once. The base is frozen.

    Products use the merged weight: sampling is as fast as without adapters, and has the same bits as training. The
    gradients of A and B are computed without that of the whole weight, which would be a product of full size.
    """

    joined: Weight
    adapters: tuple[_Adapter, ...]
    down: Weight  # A of all adapters, joined: [ranks, in]
    scaled_down: Tensor  # scale * A, in the dtype of the products
    is_separate: bool = False  # False: the base has not been copied yet, and `value` is still equal to it

    @classmethod
    @torch.no_grad()
    def of(cls, layers: Sequence[Any]) -> AdaptedWeight:
        """Join the base weights of linear layers, some of which have adapters."""
        joined = Weight.of(*(base_layer(layer).weight for layer in layers))
        ends = torch.tensor([len(part) for part in joined.parts]).cumsum(0).tolist()
        adapted: list[tuple[Any, int]] = [
            (layer, end) for layer, end in zip(layers, ends, strict=True) if isinstance(layer, LoraLayer)
        ]
        down = Weight.of(*(layer.lora_A[ADAPTER].weight for layer, _ in adapted))
        adapters, rank = [], 0
        for layer, end in adapted:
            up = Weight.of(layer.lora_B[ADAPTER].weight)
            rows, ranks = slice(end - len(up.value), end), slice(rank, rank + up.value.shape[1])
            rank = ranks.stop
            adapters.append(_Adapter(layer, rows, ranks, up, torch.zeros_like(up.value, dtype=joined.value.dtype)))
        scaled_down = torch.zeros_like(down.value, dtype=joined.value.dtype)
        weight = cls(joined, tuple(adapters), down, scaled_down)
        if any(adapter.up.value.any() for adapter in adapters):
            weight.merge()
        else:
            weight._scale()
        return weight

    @property
    def value(self) -> Tensor:
        return self.joined.value

    @property
    def trained(self) -> tuple[Weight, ...]:
        return self.down, *(adapter.up for adapter in self.adapters)

    @property
    def base_bytes(self) -> int:
        return sum(adapter.base.nbytes for adapter in self.adapters)

    def views(self) -> Iterator[tuple[Any, Tensor]]:
        """Yield each layer that has an adapter, with its merged weight."""
        yield from ((adapter.layer, self.value[adapter.rows]) for adapter in self.adapters)

    def add_grad(self, grad_out_To: Tensor, input_Ti: Tensor) -> None:
        """Add the gradients of A and B: s (dy B)^T x and s dy^T (x A^T), with x the input and dy the gradient."""
        if self.down.grad is None:
            return
        inner_Tr = input_Ti @ self.scaled_down.t()
        grads_inner = []
        for adapter in self.adapters:
            assert adapter.up.grad is not None
            grad_To = grad_out_To[:, adapter.rows]
            add_small_grad(adapter.up.grad, grad_To, inner_Tr[:, adapter.ranks])
            grads_inner.append(grad_To @ adapter.scaled_up)
        add_small_grad(self.down.grad, torch.cat(grads_inner, dim=1), input_Ti)

    @torch.no_grad()
    def separate(self, *, in_cpu_memory: bool = False) -> None:
        """Give the base weights memory of their own, so that merging can always start from them."""
        if self.is_separate:
            return
        for adapter in self.adapters:
            if in_cpu_memory:
                _move_to_pinned_memory(adapter.base)
            else:
                adapter.base.data = adapter.base.data.clone()
        self.is_separate = True

    @torch.no_grad()
    def merge(self) -> None:
        """Merge A and B, which have changed, into the base weights. The base is exact, so errors do not add up."""
        self.separate()
        for adapter in self.adapters:
            delta = adapter.layer.get_delta_weight(ADAPTER)
            add_delta(adapter.base, delta, self.value[adapter.rows])
        self._scale()

    @torch.no_grad()
    def unmerge(self) -> None:
        """Write the base weights in place of the merged ones, until `merge`."""
        for adapter in self.adapters if self.is_separate else ():
            self.value[adapter.rows].copy_(adapter.base, non_blocking=True)

    def _scale(self) -> None:
        for adapter in self.adapters:
            adapter.scaled_up.copy_(adapter.up.value * adapter.scale)
            self.scaled_down[adapter.ranks].copy_(self.down.value[adapter.ranks] * adapter.scale)


AnyWeight = Weight | AdaptedWeight


def base_layer(layer: Any) -> Any:
    """Return a linear layer without its adapter."""
    return layer.get_base_layer() if isinstance(layer, LoraLayer) else layer


def add_delta(base: Tensor, delta: Tensor, out: Tensor) -> None:
    """Write base + delta to `out`, added on its device in float32 or wider and rounded once."""
    near = base.to(out.device, non_blocking=True)
    if out.dtype == torch.bfloat16:
        round_dithered(delta.float(), out, near)
    else:
        out.copy_(near + delta)


def separate_bases(weights: Sequence[AdaptedWeight], free: int) -> None:
    """Copy the base weights to the same device if they take little of its `free` bytes, else to CPU memory."""
    in_cpu_memory = sum(weight.base_bytes for weight in weights) > BASE_SHARE * free
    for weight in weights:
        weight.separate(in_cpu_memory=in_cpu_memory)


def merge(weights: Iterable[AdaptedWeight]) -> None:
    for weight in weights:
        weight.merge()


@contextmanager
def unmerged(weights: Sequence[AdaptedWeight]) -> Iterator[None]:
    """Compute with the base weights within the block."""
    for weight in weights:
        weight.unmerge()
    try:
        yield
    finally:
        merge(weight for weight in weights if weight.is_separate)


def _move_to_pinned_memory(parameter: nn.Parameter) -> None:
    """Move a parameter to CPU memory that the GPU reads at the full speed of its link.

    torch's own pinned memory is rounded up to a power of two, which would waste up to half of it.
    """
    copy = torch.empty_like(parameter, device="cpu")
    if parameter.is_cuda:
        runtime: Any = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(copy.data_ptr(), copy.nbytes, 0)) == 0:  # otherwise it is only slower
            weakref.finalize(parameter, runtime.cudaHostUnregister, copy.data_ptr()).atexit = False
    parameter.data = copy.copy_(parameter.data)
