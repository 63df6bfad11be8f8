"""Transfer of the trained weights to vLLM's processes, by the means that vLLM itself offers.

- `memory`: one safetensors file in shared memory, which every worker reads with its own loader.
- `nccl`: vLLM's weight transfer from the learner's GPU to other GPUs.
- `ipc`: vLLM's weight transfer by CUDA IPC handles, on the learner's own GPU.
- `broadcast`: as `memory`, in an engine that also accepts NCCL transfers from learners in other processes.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.cuda import nccl

from dapo.errors import EngineError

Weights = Callable[[], Iterable[tuple[str, Tensor]]]
Transport = Literal["memory", "nccl", "ipc", "broadcast"]
_SHARED_MEMORY = Path("/dev/shm")


class Channel(Protocol):
    """The engine as a transfer sees it: it runs vLLM's coroutines within the deadline of the sync."""

    llm: Any

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any: ...

    def seconds_left(self) -> float: ...


class MemoryTransfer:
    """Sends weights as a safetensors file."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def send(self, channel: Channel) -> None:
        tensors = _distinct(self.weights())
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        with tempfile.TemporaryDirectory(prefix="dapo-weights-", dir=_folder_for(size)) as folder:
            save_file(tensors, Path(folder) / "model.safetensors")
            channel.run(channel.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder}))
        channel.run(channel.llm.collective_rpc("renew_shared_weights"))


class GpuTransfer:
    """Sends weights from GPU to GPU. The first sync iterates over `weights` once more, for names and shapes."""

    def __init__(self, weights: Weights, backend: Literal["nccl", "ipc"], tensor_parallel: int) -> None:
        self.weights, self.backend, self.tensor_parallel = weights, backend, tensor_parallel
        self.sender: Any = None

    def send(self, channel: Channel) -> None:
        def go() -> None:
            if self.sender is None:
                self.sender = self._connect(channel)
            self.sender.send_weights()

        _run_with_timeout(channel.seconds_left(), go)

    def _connect(self, channel: Channel) -> Sender:
        if self.backend == "nccl":
            return nccl_sender(self.weights, Client(channel), "127.0.0.1", _free_port(), self.tensor_parallel + 1)
        from vllm.distributed.weight_transfer.ipc_engine import (  # pyright: ignore[reportMissingImports]
            IPCTrainerInitInfo,
        )

        return Sender(IPCTrainerInitInfo(rank=0, packed=True), Client(channel), self.weights)


class Sender:
    """The trainer's side of vLLM's weight transfer. Iterating `weights` is collective, so every rank has a Sender."""

    def __init__(self, info: Any, client: Any, weights: Weights) -> None:
        from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
            WeightTransferTrainerFactory,
        )

        self.sender = WeightTransferTrainerFactory.trainer_init(info, client=client, source=_Source(weights))

    def send_weights(self) -> None:
        torch.cuda.synchronize()  # vLLM reads the weights on its own streams, which do not wait for the optimizer
        self.sender.send_weights()


def nccl_sender(weights: Weights, client: Any, host: str, port: int, processes: int, rank: int = 0) -> Sender:
    """Connect to `processes` - 1 of vLLM's processes, which `client` reaches. Only rank 0 of the trainer sends."""
    from vllm.distributed.weight_transfer.nccl_engine import (  # pyright: ignore[reportMissingImports]
        NCCLTrainerInitInfo,
    )

    sender = Sender(NCCLTrainerInitInfo(host, port, processes, rank=rank), client, weights)
    group = sender.sender.model_update_group
    if group is not None and group.disabled:  # nothing would be sent, and vLLM would use uninitialized memory
        raise EngineError(
            f"vLLM cannot use the installed NCCL {'.'.join(map(str, nccl.version()))}; install the NCCL of the torch "
            "that vLLM was built for"
        )
    return sender


class Client:
    """The four calls that the trainer's side of vLLM's weight transfer makes to the inference side."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
            WeightTransferInitRequest,
        )

        self.channel.run(self.channel.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info)))

    def start_weight_update(self) -> None:
        self.channel.run(self.channel.llm.start_weight_update())

    def update_weights(self, update_info: Any) -> None:
        from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
            WeightTransferUpdateRequest,
        )

        self.channel.run(self.channel.llm.update_weights(WeightTransferUpdateRequest(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.channel.run(self.channel.llm.finish_weight_update(weight_version))


class _Source:
    """The weights in the form that vLLM's weight transfer reads them."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.known: list[Any] = []

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta  # pyright: ignore[reportMissingImports]

        if not self.known:
            self.known = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights()]
        return self.known

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.weights())


def transfer(transport: Transport, weights: Weights, tensor_parallel: int) -> MemoryTransfer | GpuTransfer:
    if transport == "ipc" or transport == "nccl":
        return GpuTransfer(weights, transport, tensor_parallel)
    return MemoryTransfer(weights)


def _distinct(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copy weights to main memory. Tied weights appear once, under their first name."""
    tensors: dict[str, Tensor] = {}
    places: set[tuple[int, torch.Size]] = set()
    for name, tensor in weights:
        tensor = tensor.detach().cpu().contiguous()
        place = tensor.data_ptr(), tensor.shape
        if place not in places:
            places.add(place)
            tensors[name] = tensor
    return tensors


def _folder_for(size: int) -> str | None:
    """Return shared memory if it is large enough (in containers it often is not), else None: the temporary folder."""
    if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > 1.1 * size:
        return str(_SHARED_MEMORY)
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run_with_timeout(seconds: float, function: Callable[[], None]) -> None:
    """Run a function in a thread that can be abandoned: a broadcast to a hung process never returns."""
    device, faults = torch.cuda.current_device(), []

    def run() -> None:
        try:
            torch.cuda.set_device(device)
            function()
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=run, name="dapo-vllm-weights", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError
    if faults:
        raise faults[0]
