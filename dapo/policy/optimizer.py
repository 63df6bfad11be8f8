"""AdamW with fp32 master copies where the weights are bf16, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dapo.config import OptimConfig
from dapo.kernels.rounding import round_dithered
from dapo.model.trunk import Weight
from dapo.policy.dither import DitheredShards, local_part
from dapo.policy.offload import offloaded_step, to_host


class Optimizer:
    """AdamW over fp32 master weights. At a learning rate of 1e-6 an update of a bf16 weight would round to nothing.

    After each update the masters are rounded to bf16 with a fixed dither (`kernels/rounding.py`). They begin as bf16
    numbers, so to the nearest most of them would round back to where they began for many updates.

    Gradients of bf16 weights are summed in fp32 too: a hook adds each one to the master's gradient as soon as autograd
    has computed it. The gradients of `joined` weights do not pass through autograd: the code that computes
    them adds them to the buffers that `zero_grad_buffers` provides.

    Float32 shards that are computed with in bf16 are their own masters. `dithered` has them rounded between updates.

    `offloads` says that the moments are in the host's memory. It changes neither the updates nor what is saved.
    """

    offloads = False
    dithered: DitheredShards | None = None

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        config: OptimConfig,
        joined: Sequence[Weight] = (),
    ) -> None:
        self.config = config
        self.joined = joined
        self._sums: list[Tensor] = []
        self._views: list[tuple[Tensor, Tensor]] = []  # master, its slice of a joined gradient
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self.masters = [p if p.dtype != torch.bfloat16 else p.detach().float() for p in self.parameters]
        self._master_of = dict(zip(self.parameters, self.masters, strict=True))
        # Weak: the garbage collector cannot see the reference from a parameter to its hook. A strong one would make a
        # cycle that keeps weights and optimizer in memory after the run.
        move_grad = WeakMethod(self._move_grad)
        for parameter, master in self._master_of.items():
            if master is not parameter:
                parameter.register_post_accumulate_grad_hook(partial(_call, move_grad))
        self.adam = torch.optim.AdamW(
            self.masters,
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=all(p.dtype in (torch.float32, torch.float64) for p in self.masters),
        )

    def grad_of(self, parameter: Tensor) -> Tensor | None:
        """Return the tensor that sums this parameter's gradient, or None if it is not trained."""
        master = self._master_of.get(parameter)  # pyright: ignore[reportArgumentType]
        if master is not None and master.grad is None:
            master.grad = torch.zeros_like(master)
        return None if master is None else master.grad

    def zero_grad_buffers(self) -> None:
        """Zero the gradient buffers of the joined weights. The masters' gradients are views of them.

        The buffers keep their addresses between updates, as CUDA graphs require.
        """
        if not self.joined:
            return
        if not self._sums:
            for weight in self.joined:
                total = torch.empty_like(weight.value, dtype=self._master_of[weight.parts[0]].dtype)
                self._sums.append(total)
                views = total.split([len(parameter) for parameter in weight.parts])
                self._views += zip((self._master_of[parameter] for parameter in weight.parts), views, strict=True)
        torch._foreach_zero_(self._sums)  # pyright: ignore[reportPrivateImportUsage]
        for weight, total in zip(self.joined, self._sums, strict=True):
            weight.grad = total
        for master, view in self._views:
            master.grad = view

    def release_grad_buffers(self) -> None:
        """Free the memory of the gradients until the next update, which allocates it anew, at other addresses."""
        self.zero_grad()
        self._sums, self._views = [], []

    def _move_grad(self, parameter: Tensor) -> None:
        total = self.grad_of(parameter)
        assert total is not None and parameter.grad is not None
        total.add_(parameter.grad)
        parameter.grad = None

    def zero_grad(self) -> None:
        for holder in (*self.masters, *self.joined):
            holder.grad = None

    def step(self, learning_rate: float) -> float:
        """Make one update and return the gradient norm before clipping. If it is not finite, change nothing."""
        grads = [master.grad for master in self.masters if master.grad is not None]
        total = torch.nn.utils.get_total_norm(grads)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)  # over all shards
        if not math.isfinite(norm):
            return norm
        if norm > self.config.grad_clip:
            torch.nn.utils.clip_grads_with_norm_(self.masters, self.config.grad_clip, torch.tensor(norm))
        for group in self.adam.param_groups:
            group["lr"] = learning_rate
        with self.exact_masters():
            if self.offloads:
                offloaded_step(self.adam)
            else:
                self.adam.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                round_dithered(master.detach(), parameter.data)
        return norm

    def exact_masters(self) -> AbstractContextManager[None]:
        """Have the masters unrounded within the block."""
        return nullcontext() if self.dithered is None else self.dithered.exact()

    @property
    def pending_bytes(self) -> int:
        """Bytes that the next update will allocate: gradients, and before the first update also the moments."""
        return self.gradient_bytes + self.pending_moment_bytes

    @property
    def gradient_bytes(self) -> int:
        return sum(map(held_bytes, self.masters))

    @property
    def pending_moment_bytes(self) -> int:
        """Bytes of moments that the first update will allocate on the device."""
        return 0 if self.adam.state or self.offloads else 2 * self.gradient_bytes

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as a flat dictionary of named tensors, as safetensors requires."""
        state: dict[str, Tensor] = {}
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            for key, value in self.adam.state.get(master, {}).items():
                state[f"{key}/{name}"] = torch.as_tensor(value).detach().contiguous()
            if master is not parameter:
                state[f"master/{name}"] = master
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            if master is not parameter:
                master.copy_(_fitting(state, f"master/{name}", master))
            if f"step/{name}" not in state:
                continue
            place = to_host if self.offloads else Tensor.to
            moments: dict[str, Any] = {
                key: place(_fitting(state, f"{key}/{name}", master), master.device) for key in ("exp_avg", "exp_avg_sq")
            }
            self.adam.state[master] = {"step": state[f"step/{name}"].to(master.device, copy=True), **moments}


def _call(method: WeakMethod[Callable[[Tensor], None]], parameter: Tensor) -> None:
    found = method()
    assert found is not None, "a gradient after the optimizer is gone"
    found(parameter)


def _fitting(state: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    """Return a saved tensor, after checking its shape."""
    if state[name].shape != like.shape:
        raise ValueError(f"{name} has shape {tuple(state[name].shape)}, expected {tuple(like.shape)}")
    return state[name]


def held_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor on this rank."""
    return local_part(tensor).nbytes
