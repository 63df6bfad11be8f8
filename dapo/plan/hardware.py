"""GPUs by their data sheets, and the share of their peak rates that was measured on one H200.

Every constant says where it comes from: MEASURED (docs/explanation/performance.md), a data sheet, or ASSUMED.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from dapo.errors import ConfigError
from dapo.model.meter import peak_flops


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its data sheet. Only `network` is ASSUMED."""

    name: str
    memory: float  # bytes
    bandwidth: float  # bytes per second
    link: float  # bytes per second to the other GPUs of its node, one direction
    network: float  # bytes per second to other nodes, one direction: its share of the node's network

    @property
    def flops(self) -> float:
        """Dense bfloat16 FLOPs per second."""
        peak = peak_flops(self.name)
        assert peak is not None, f"the peak rate of {self.name} is missing in dapo/model/meter.py"
        return peak


_GPUS = (
    Gpu("b200", 180e9, 8.0e12, 900e9, 50e9),
    Gpu("h200", 141e9, 4.8e12, 450e9, 50e9),
    Gpu("h100", 80e9, 3.35e12, 450e9, 50e9),
    Gpu("h800", 80e9, 3.35e12, 200e9, 50e9),
    Gpu("h20", 96e9, 4.0e12, 450e9, 50e9),
    Gpu("a100", 80e9, 2.039e12, 300e9, 25e9),
    Gpu("a100-40gb", 40e9, 1.555e12, 300e9, 25e9),
    Gpu("l40s", 48e9, 0.864e12, 32e9, 12.5e9),
    Gpu("a6000", 48e9, 0.768e12, 32e9, 12.5e9),
    Gpu("rtx5090", 32e9, 1.792e12, 64e9, 12.5e9),
    Gpu("l4", 24e9, 0.3e12, 32e9, 12.5e9),
    Gpu("a10", 24e9, 0.6e12, 32e9, 12.5e9),
    Gpu("rtx4090", 24e9, 1.008e12, 32e9, 12.5e9),
    Gpu("rtx3090", 24e9, 0.936e12, 32e9, 12.5e9),
    Gpu("rtx4080", 16e9, 0.717e12, 32e9, 12.5e9),
    Gpu("a4000", 16e9, 0.448e12, 32e9, 12.5e9),
    Gpu("rtx3060", 12e9, 0.36e12, 16e9, 12.5e9),
)

MEASURED_GPU = "h200"  # times on other GPUs are scaled from it by their data sheets
_WITHOUT_BFLOAT16 = ("t4", "v100", "p100", "p40", "rtx2060", "rtx2070", "rtx2080", "rtx2080ti", "gtx1080", "gtx1080ti")

# MEASURED, decoding with the embedded engine: three throughputs (135M with 256 and 1,024 sequences, 1.5B with 256)
# determine three constants: the share of the bandwidth at which memory is read, the share of the peak at which matrix
# products run, and the fixed cost of a layer.
READING = 0.835
DECODE_PRODUCTS = 0.543
LAYER_SECONDS = 28.8e-6
# MEASURED, what a step of vLLM 0.24 took beyond that on the same three workloads, per step and per response; the fit
# is within 20% of each of them.
VLLM_STEP_SECONDS = 4e-3
VLLM_ROW_SECONDS = 17e-6
# MEASURED, updates of 135M (27% MFU) and 1.5B (50% MFU): the share of the peak at which matrix products run, and the
# bytes of other memory traffic for each token, layer and hidden unit.
TRAIN_PRODUCTS = 0.662
TRAIN_TRAFFIC = 513
# MEASURED, the host's time to launch one layer of one micro-batch, forward and backward: with CUDA graphs, and without.
CAPTURED_LAYER_SECONDS = 33e-3 / 30
EAGER_LAYER_SECONDS = 108e-3 / 30
# MEASURED, on two CPU cores: one LaTeX answer judged by `math` in one worker.
JUDGE_SECONDS = 2 / 8139
# MEASURED, on two CPU cores (docs/how-to/cluster.md): groups of 16 per second that one driver dispatches and collects.
CONTROLLER_GROUPS = 20_000 / 60

# ASSUMED.
NODE = 8  # GPUs per machine
FRAGMENTATION = 0.05  # of what tensors take, in pieces that PyTorch's allocator keeps; at most a tenth is left to it
NETWORK_SHARE = 0.8  # share of the wire's rate that collectives reach
HOP_SECONDS = 3e-6  # latency of one hop of a ring, which has as many hops as ranks
ALL_REDUCE_SECONDS = 10e-6  # latency within a node
HOST_LINK = 25e9  # bytes per second between a GPU and its host
HOST_BANDWIDTH = 20e9  # bytes per second of host memory for the optimizer of each rank
OPTIMIZER_BYTES = 28  # read and written per parameter: master, gradient and two moments


def find_gpu(name: str, network: float | None = None) -> Gpu:
    """Return the GPU of this name, as `4090` or `NVIDIA A100-80GB`. `network`: GB/s per GPU between nodes, if known."""
    plain = _plain(name)
    found = next((gpu for gpu in _GPUS if plain in (_plain(gpu.name), f"{gpu.name}{gpu.memory / 1e9:g}gb")), None)
    if found is None:
        known = ", ".join(f"{gpu.name} ({gpu.memory / 1e9:g} GB)" for gpu in _GPUS)
        if plain in map(_plain, _WITHOUT_BFLOAT16):
            raise ConfigError(f"--gpu {name} has no bfloat16 and is not supported; choose from {known}")
        raise ConfigError(f"--gpu {name} is not known; choose one with as much memory: {known}")
    if network is None:
        return found
    return replace(found, network=network * 1e9)


def collective_rate(gpu: Gpu, ranks: int) -> float:
    """Return the bytes per second at which each rank receives in a collective.

    Across nodes all GPUs of a node receive the same bytes, so each benefits from the whole node's network.
    """
    wire = gpu.link if ranks <= NODE else min(gpu.link, NODE * gpu.network)
    return NETWORK_SHARE * wire


def collective_seconds(gpu: Gpu, ranks: int, size: float, messages: int) -> float:
    """Return the seconds to gather or scatter `size` bytes over all ranks by rings, in so many messages."""
    if ranks == 1:
        return 0.0
    return size * (ranks - 1) / ranks / collective_rate(gpu, ranks) + messages * (ranks - 1) * HOP_SECONDS


def is_latency_bound(gpu: Gpu, ranks: int, size: float, messages: int) -> bool:
    """Return whether a collective spends most of its time on hops. More ranks then make it slower."""
    return ranks > 1 and messages * (ranks - 1) * HOP_SECONDS > size / collective_rate(gpu, ranks)


def powers_of_two(most: int) -> list[int]:
    return [2**i for i in range(int(math.log2(most)) + 1)]


def _plain(name: str) -> str:
    return re.sub(r"nvidia|tesla|geforce|rtx|[^a-z0-9]", "", name.lower())
