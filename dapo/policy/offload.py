"""AdamW with moments in the host's memory, which are copied to the GPU in chunks during an update.

Moments are half of the training state, and an update needs each of them once. They move on two streams, one in each
direction, so that copies and computation overlap. The arithmetic is that of `torch.optim.AdamW`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_CHUNK = 1 << 25  # numbers; two chunks of both moments are on the GPU at a time, 512 MiB
_MOMENTS = ("exp_avg", "exp_avg_sq")


def host_bytes(masters: Iterable[Tensor]) -> int:
    """Return the bytes that moments take in the host's memory. torch rounds each page-locked tensor to a power of two.

    That is nearly twice the moments where most weights are just above one.
    """
    return sum(len(_MOMENTS) * (1 << (master.nbytes - 1).bit_length()) for master in masters)


def to_host(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy in the host's memory, page-locked if it belongs to a GPU."""
    return tensor.cpu().pin_memory() if device.type == "cuda" else tensor.cpu()


@torch.no_grad()
def offloaded_step(adam: torch.optim.AdamW, chunk: int = _CHUNK) -> None:
    """Do what `adam.step()` does, with moments that stay in the host's memory."""
    [group] = adam.param_groups
    masters = [master for master in group["params"] if master.grad is not None]
    if not masters:
        return
    device, dtype = masters[0].device, masters[0].dtype
    settings = {key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    settings |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
    on_gpu = device.type == "cuda"
    arriving, leaving = (torch.cuda.Stream(device) if on_gpu else None for _ in range(2))
    computing = torch.cuda.current_stream(device) if on_gpu else None
    size = min(chunk, max(master.numel() for master in masters))
    slots = [torch.empty(2, size, dtype=dtype, device=device) for _ in range(2)]
    # The event after which each slot can be filled: at first the work queued so far, later the copy back to the host.
    is_free = [computing and computing.record_event()] * 2
    for index, (master, grad, moments, step) in enumerate(_chunks(adam, masters, chunk)):
        slot = slots[index % 2][:, : len(grad)]
        arrived = _copy(slot, moments, arriving, is_free[index % 2])
        if computing is not None:
            computing.wait_event(arrived)
        torch._fused_adamw_([master], [grad], [slot[0]], [slot[1]], [], [step], **settings)  # pyright: ignore
        is_free[index % 2] = _copy(moments, slot, leaving, computing and computing.record_event())
    if leaving is not None:
        leaving.synchronize()  # a checkpoint reads the moments, and the next update moves them again


def _chunks(
    adam: torch.optim.AdamW, masters: Sequence[Tensor], chunk: int
) -> Iterator[tuple[Tensor, Tensor, list[Tensor], Tensor]]:
    """Yield master, gradient, moments and step count, each flat and of at most `chunk` numbers."""
    for master in masters:
        state = adam.state[master]
        if not state:
            state["step"] = torch.zeros((), device=master.device)
            for name in _MOMENTS:
                state[name] = torch.zeros(master.shape, dtype=master.dtype, pin_memory=master.is_cuda)
        state["step"] += 1
        assert master.grad is not None
        flat = [tensor.detach().view(-1).split(chunk) for tensor in (master, master.grad, *map(state.get, _MOMENTS))]
        for part, grad, *moments in zip(*flat, strict=True):
            yield part, grad, moments, state["step"]


def _copy(targets: Any, sources: Any, stream: Any, after: Any) -> Any:
    """Copy on `stream` after the event `after`, and return an event for the end; on a CPU, copy at once."""
    if stream is None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return None
    with torch.cuda.stream(stream):
        stream.wait_event(after)
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        return stream.record_event()
