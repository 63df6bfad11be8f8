"""python -m benchmarks.gpu_lora: LoRA of rank 16 on all linear layers, beside training of all weights.

`rollout`, `update`: workloads of gpu_rollout and gpu_update with and without adapters; the ratio of the times counts.
`merge`: seconds to merge the adapters after an update, with the base weights on the GPU and in CPU memory.
`gap`: largest |sampler - trainer| log-probability with adapters that are not zero.
`7b`: a whole training step of a 7B shape in a process that may take 24 GiB of the GPU, and its peak.
Random bf16 weights. `--only NAME` selects some.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks import gpu_rollout, gpu_step, gpu_update
from benchmarks.gpu_common import (
    QWEN2_7B,
    Row,
    default_device,
    print_rows,
    random_model,
    random_prompts,
    timed,
    word_tokenizer,
)
from dapo.config import LoraConfig
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.model.joined import merge
from dapo.model.lora import add_adapters, causal_lm
from dapo.model.trunk import trunk_of
from dapo.policy.policy import Policy

RANK = 16
LIMIT = 24 * 2**30  # bytes of GPU memory for a 7B shape


def adapted(model: Any) -> Any:
    """Add adapters that are not zero, as after some updates."""
    lora = add_adapters(model, LoraConfig(rank=RANK))
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=1e-3)
    return lora


def unchanged(model: Any) -> Any:
    return model


def rollout_row(workload: gpu_rollout.Workload, device: torch.device, dtype: torch.dtype, repeats: int) -> Row:
    models = (causal_lm(wrap(random_model(workload.shape, device, dtype))) for wrap in (unchanged, adapted))
    seconds = [_rollout_seconds(workload, model, device, repeats) for model in models]
    return _ratio_row(f"rollout, {workload.what}", *seconds, must=1.15, aim=1.02)


def _rollout_seconds(workload: gpu_rollout.Workload, model: Any, device: torch.device, repeats: int) -> float:
    gc.collect()  # the engine before refers to itself
    tokenizer = word_tokenizer(workload.shape.vocab_size)
    engine = EmbeddedEngine(model, tokenizer, frozenset(), 0, workload.slots, max_length=workload.max_length)
    requests = workload.requests()
    best = timed(lambda: gpu_rollout.drain(engine, requests), device, repeats).best
    engine.close()
    return best


def update_row(workload: gpu_update.Workload, device: torch.device, dtype: torch.dtype, repeats: int) -> Row:
    seconds, peaks = [], []
    for wrap in (unchanged, adapted):
        gc.collect()
        _reset_peak(device)
        seconds.append(_update_seconds(workload, wrap(random_model(workload.shape, device, dtype)), device, repeats))
        peaks.append(_peak(device))
    row = _ratio_row(f"update, {workload.what}", *seconds, must=1.0, aim=0.8)
    return replace(row, note=f"{row.note}; peak memory {peaks[0]} and {peaks[1]}")


def _update_seconds(workload: gpu_update.Workload, model: Any, device: torch.device, repeats: int) -> float:
    config, groups = gpu_update.update_config(workload.micro_batch), gpu_update.workload_groups(workload)
    policy = Policy(model, config, share_prompts=workload.share_prompts)
    return timed(lambda: gpu_update.run_update(policy, groups), device, repeats, warm_ups=2).best


def _ratio_row(what: str, full: float, lora: float, must: float, aim: float) -> Row:
    note = f"all weights {full:.4g} s, LoRA {lora:.4g} s"
    return Row(what, lora / full, "x all weights", must, aim, lower_is_better=True, note=note)


def merge_row(
    workload: gpu_update.Workload, device: torch.device, dtype: torch.dtype, repeats: int, *, in_cpu_memory: bool
) -> Row:
    model = add_adapters(random_model(workload.shape, device, dtype), LoraConfig(rank=RANK))
    weights = trunk_of(causal_lm(model)).adapted
    for weight in weights:
        weight.separate(in_cpu_memory=in_cpu_memory)
    best = timed(lambda: merge(weights), device, repeats).best
    size = sum(weight.base_bytes for weight in weights) / 2**30
    where = "CPU memory" if in_cpu_memory else "GPU memory"
    return Row(f"merge, base weights in {where}", best, "s", lower_is_better=True, note=f"{size:.1f} GiB of them")


def gap_row(workload: gpu_update.Workload, device: torch.device, dtype: torch.dtype, new_tokens: int = 128) -> Row:
    """Sample from adapters that are not zero, and compare with the trainer before its next update."""
    policy = Policy(adapted(random_model(workload.shape, device, dtype)), gpu_update.update_config(None))
    prompts = random_prompts(8, 64, workload.shape.vocab_size)
    tokenizer = word_tokenizer(workload.shape.vocab_size)
    engine = EmbeddedEngine(
        policy.causal_lm, tokenizer, frozenset(), 0, 64, max_length=64 + new_tokens, kv_memory_fraction=0.1
    )
    groups = gpu_step.sampled_groups(engine, prompts, 8, new_tokens)
    engine.close()
    metrics = policy.update(groups, step=1, version=0).metrics
    note = f"mean {metrics['logprob_gap/mean']:.2g}"
    largest = metrics["logprob_gap/max"]
    return Row("largest sampler/trainer gap", largest, "nats", 1e-4, 1e-5, lower_is_better=True, note=note)


LARGE = replace(
    gpu_step.WORKLOAD, what="whole step, 7B, 16 x 8, 128 + 256, in 24 GiB", shape=QWEN2_7B, n=8, must=60.0, aim=30.0
)


def step_row(
    workload: gpu_step.Workload, device: torch.device, dtype: torch.dtype, steps: int, overrides: tuple[str, ...] = ()
) -> Row:
    """Train adapters in a process that is limited to 24 GiB of the GPU. Nothing else is measured in it later."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, LIMIT / total), device)
    _reset_peak(device)
    row = gpu_step.step_row(workload, device, dtype, steps, (f"model.lora.rank={RANK}", "optim.lr=1e-5", *overrides))
    return replace(row, note=f"{row.note}; peak memory {_peak(device)}")


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> str:
    if device.type != "cuda":
        return "not measured"
    held, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return f"{held / 2**30:.1f} GiB ({reserved / 2**30:.1f} reserved)"


STAGES = ["rollout", "update", "merge", "gap", "7b"]


def measure(names: list[str], device: torch.device, repeats: int) -> Iterator[Row]:
    rollout = next(workload for workload in gpu_rollout.WORKLOADS if workload.name == "1.5b")
    update = next(workload for workload in gpu_update.WORKLOADS if workload.name == "1.5b")
    dtype = torch.bfloat16
    stages: dict[str, Callable[[], Iterator[Row]]] = {
        "rollout": lambda: iter([rollout_row(rollout, device, dtype, repeats)]),
        "update": lambda: (update_row(workload, device, dtype, repeats) for workload in gpu_update.WORKLOADS),
        "merge": lambda: (merge_row(update, device, dtype, repeats, in_cpu_memory=cpu) for cpu in (False, True)),
        "gap": lambda: iter([gap_row(update, device, dtype)]),
        "7b": lambda: iter([step_row(LARGE, device, dtype, repeats)]),
    }
    for name in names:
        yield from stages[name]()
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES, metavar="NAME", help="%(choices)s")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    rows = measure(arguments.only, default_device(), arguments.repeats)
    print_rows(f"LoRA of rank {RANK}, bf16, random weights", rows)


if __name__ == "__main__":
    main()
