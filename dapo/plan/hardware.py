"""What GPUs can do by their data sheets, and the share of it that was measured on one H200.

Every constant says where it comes from: MEASURED (docs/performance.md), a data sheet, or ASSUMED.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

from dapo.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """By its data sheet, in bytes and operations, per second where that makes sense. Only `network` is ASSUMED."""

    name: str
    memory: float
    bandwidth: float
    flops: float  # dense products of bfloat16
    link: float  # to the other GPUs of its node, one direction
    network: float  # its share of the node's way to other nodes, one direction


_GPUS = (
    Gpu("b200", 180e9, 8.0e12, 2250e12, 900e9, 50e9),
    Gpu("h200", 141e9, 4.8e12, 989e12, 450e9, 50e9),
    Gpu("h100", 80e9, 3.35e12, 989e12, 450e9, 50e9),
    Gpu("h800", 80e9, 3.35e12, 989e12, 200e9, 50e9),
    Gpu("h20", 96e9, 4.0e12, 148e12, 450e9, 50e9),
    Gpu("a100", 80e9, 2.039e12, 312e12, 300e9, 25e9),
    Gpu("a100-40gb", 40e9, 1.555e12, 312e12, 300e9, 25e9),
    Gpu("l40s", 48e9, 0.864e12, 362e12, 32e9, 12.5e9),
    Gpu("l4", 24e9, 0.3e12, 121e12, 32e9, 12.5e9),
    Gpu("rtx4090", 24e9, 1.008e12, 165e12, 32e9, 12.5e9),
)

# MEASURED, decoding with the embedded engine: three throughputs (135M with 256 and 1,024 sequences, 1.5B with 256) give
# three constants. The cache is read at this share of the bandwidth, products run at this share of the peak, and each
# layer costs this much more, whatever it computes.
READING = 0.835
DECODE_PRODUCTS = 0.543
LAYER_SECONDS = 28.8e-6
# MEASURED, what a step of vLLM 0.24 took beyond that, on the same three workloads; within 20 % of each of them.
VLLM_STEP_SECONDS = 4e-3
VLLM_ROW_SECONDS = 17e-6
# MEASURED, updates of 135M (27 % MFU) and 1.5B (50 % MFU): products at this share of the peak, and this many bytes
# moved beside them for each token, layer and hidden unit.
TRAIN_PRODUCTS = 0.662
TRAIN_TRAFFIC = 513
# MEASURED, the host's time for a layer of one micro-batch, there and back: as captured graphs, and without.
CAPTURED_LAYER_SECONDS = 33e-3 / 30
EAGER_LAYER_SECONDS = 108e-3 / 30
# MEASURED, on two CPU cores: one judgement of a LaTeX answer by `math`, in one worker.
JUDGE_SECONDS = 2 / 2602
# MEASURED, on two CPU cores (docs/cluster.md): groups of 16 a second that one driver hands out and takes back.
CONTROLLER_GROUPS = 20_000 / 60

# ASSUMED.
NODE = 8  # GPUs in one machine
USABLE = 0.9  # of a GPU's memory; the rest is for the driver, graphs and fragments
NETWORK_SHARE = 0.8  # of the wire's rate that collectives reach
HOP_SECONDS = 3e-6  # a ring passes on a message; the ring has as many hops as ranks
ALL_REDUCE_SECONDS = 10e-6  # within a node, when there is hardly anything to send
HOST_LINK = 25e9  # bytes per second between a GPU and its host
HOST_BANDWIDTH = 20e9  # bytes per second that an optimizer on the host has for each rank
OPTIMIZER_BYTES = 28  # read and written for a parameter: master, gradient and two moments
JUDGES = 8  # processes, where the recipe does not say
HEAD_BYTES = 4 * GIB  # logits of a chunk and their gradient, at most


def find_gpu(name: str, network: float | None = None) -> Gpu:
    """`network`: gigabytes per second and GPU between nodes, where known."""
    known = {gpu.name: gpu for gpu in _GPUS}
    found = known.get(name.lower().replace(" ", "").removeprefix("nvidia").strip("-_"))
    if found is None:
        close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise ConfigError(f"--gpu {name}: known are {', '.join(known)}{hint}")
    if network is None:
        return found
    return Gpu(found.name, found.memory, found.bandwidth, found.flops, found.link, network * 1e9)


def collective_rate(gpu: Gpu, ranks: int) -> float:
    """Bytes per second at which each rank receives what all ranks hold together. A node's cards share what arrives."""
    wire = gpu.link if ranks <= NODE else min(gpu.link, NODE * gpu.network)
    return NETWORK_SHARE * wire


def collective_seconds(gpu: Gpu, ranks: int, size: float, messages: int) -> float:
    """To gather or scatter `size` bytes over all ranks, cut into so many messages."""
    if ranks == 1:
        return 0.0
    return size * (ranks - 1) / ranks / collective_rate(gpu, ranks) + messages * (ranks - 1) * HOP_SECONDS


def waits_for_hops(gpu: Gpu, ranks: int, size: float, messages: int) -> bool:
    """More ranks then make a collective slower: it passes small messages around a long ring."""
    return ranks > 1 and messages * (ranks - 1) * HOP_SECONDS > size / collective_rate(gpu, ranks)


def powers_of_two(most: int) -> list[int]:
    return [2**i for i in range(int(math.log2(most)) + 1)]
