"""AdamW with fp32 master copies where the weights are bf16, gradient clipping, and warm-up in trainer steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dapo.config import OptimConfig


class Optimiser:
    """At a learning rate of 1e-6 a bf16 weight rounds its update to nothing, so bf16 weights have fp32 masters."""

    def __init__(self, named_parameters: Sequence[tuple[str, nn.Parameter]], config: OptimConfig) -> None:
        self.config = config
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self.masters = [p if p.dtype != torch.bfloat16 else p.detach().float().clone() for p in self.parameters]
        self.adam = torch.optim.AdamW(
            self.masters,
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=all(p.dtype in (torch.float32, torch.float64) for p in self.masters),
        )

    def learning_rate(self, step: int) -> float:
        warmup = self.config.warmup_steps
        return self.config.lr * min(1.0, step / warmup) if warmup else self.config.lr

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self, trainer_step: int) -> float:
        """One update; returns the gradient norm before clipping. A norm that is not finite changes nothing."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads))
        if not math.isfinite(norm):
            return norm
        if norm > self.config.grad_clip:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.grad_clip, torch.tensor(norm))
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
        for group in self.adam.param_groups:
            group["lr"] = self.learning_rate(trainer_step)
        self.adam.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
                    master.grad = None
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        """Flat and named, so that safetensors can hold it."""
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
                master.copy_(state[f"master/{name}"])
            if f"step/{name}" not in state:
                continue
            moments: dict[str, Any] = {
                key: state[f"{key}/{name}"].to(master.device) for key in ("exp_avg", "exp_avg_sq")
            }
            self.adam.state[master] = {"step": state[f"step/{name}"].clone(), **moments}
