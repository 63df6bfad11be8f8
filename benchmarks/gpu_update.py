"""python -m benchmarks.gpu_update: seconds of one update, optimizer included, and its MFU.

Random bf16 weights, random responses, one optimizer step over all sequences. Two warm-ups, then the best of five.
`--only NAME` selects workloads. `--peers` also measures the same update, padded, in plain transformers.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from benchmarks.gpu_common import (
    QWEN2_1_5B,
    SMOLLM2_135M,
    Row,
    default_device,
    peak_memory,
    print_rows,
    random_groups,
    random_model,
    timed,
)
from dapo.algorithm.loss import LossConfig, policy_loss
from dapo.config import Config
from dapo.model.meter import causal_pairs, peak_flops, training_flops
from dapo.policy.policy import Policy
from dapo.types import Group

H200_FLOPS = 989e12


@dataclass(frozen=True, slots=True)
class Workload:
    """`groups` x `n` sequences of prompt and response; rated by seconds, or by MFU if prompts are not shared."""

    name: str
    what: str
    shape: PretrainedConfig
    groups: int
    n: int
    prompt_tokens: int
    response_tokens: int
    share_prompts: bool
    must: float
    aim: float
    micro_batch: int | None = None  # tokens; None: the policy chooses

    @property
    def computed_tokens(self) -> int:
        """Count tokens in the forward pass: no last token, which predicts nothing, and each shared prompt once."""
        prompts = self.groups * (1 if self.share_prompts else self.n)
        return prompts * self.prompt_tokens + self.groups * self.n * (self.response_tokens - 1)

    @property
    def flops(self) -> float:
        sequences = self.groups * self.n
        pairs = causal_pairs([self.prompt_tokens + self.response_tokens - 1] * sequences)
        if self.share_prompts:
            pairs -= causal_pairs([self.prompt_tokens] * self.groups * (self.n - 1))
        head_tokens = sequences * self.response_tokens
        return training_flops(self.shape, self.computed_tokens, pairs, head_tokens=head_tokens)


WORKLOADS = (
    Workload("135m", "135M, 256 sequences of 128 + 256", SMOLLM2_135M, 16, 16, 128, 256, True, 0.18, 0.15),
    Workload(
        "1.5b", "1.5B, 16k tokens packed, nothing shared", QWEN2_1_5B, 4, 4, 128, 897, False, 0.56, 0.62,
        micro_batch=16384,
    ),
)  # fmt: skip


def update_config(micro_batch: int | None) -> Config:
    """Return a configuration with a learning rate so small that every run starts from the same weights."""
    optim: dict[str, Any] = {"lr": 1e-9, "warmup_steps": 0}
    if micro_batch is not None:
        optim["max_tokens_per_micro_batch"] = micro_batch
    return Config.parse({"model": {"path": "none"}, "data": {"train": "none"}, "optim": optim})


def update_row(
    workload: Workload, device: torch.device, dtype: torch.dtype, repeats: int, peak: float = H200_FLOPS
) -> Row:
    model = random_model(workload.shape, device, dtype)
    policy = Policy(model, update_config(workload.micro_batch), share_prompts=workload.share_prompts)
    groups = workload_groups(workload)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    timing = timed(lambda: run_update(policy, groups), device, repeats, warm_ups=2)
    mfu, floor = workload.flops / timing.best / peak, workload.flops / peak
    note = (
        f"first update {timing.first:.1f} s, then {timing.best:.4g} s for {workload.computed_tokens:,} tokens "
        f"({workload.flops:.3g} operations, MFU {100 * mfu:.1f}%), peak memory {peak_memory(device)}"
    )
    if workload.share_prompts:
        return Row(workload.what, timing.best, "s", workload.must, workload.aim, floor, lower_is_better=True, note=note)
    return Row(workload.what, mfu, "MFU", workload.must, workload.aim, 1.0, note=note)


def run_update(policy: Policy, groups: Sequence[Group]) -> None:
    result = policy.update(groups, step=1, version=0)
    assert result.stop is None and result.metrics["updates"] == 1, "the update was skipped, so nothing was measured"


def workload_groups(workload: Workload) -> list[Group]:
    lengths = workload.prompt_tokens, workload.response_tokens
    return random_groups(workload.groups, workload.n, *lengths, workload.shape.vocab_size)


def padded_row(workload: Workload, device: torch.device, dtype: torch.dtype, repeats: int, rows: int = 32) -> Row:
    """Update with transformers' own attention, full logits and torch's AdamW, `rows` whole sequences at a time."""
    model = random_model(workload.shape, device, dtype, attention="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=device.type == "cuda")
    members = [
        ([*group.prompt.tokens, *rollout.tokens.tolist()], advantage)
        for group in workload_groups(workload)
        for rollout, advantage in zip(group.rollouts, group.advantages, strict=True)
    ]
    tokens_BT = torch.tensor([tokens for tokens, _ in members], device=device)
    advantages_B = torch.tensor([advantage for _, advantage in members], dtype=torch.float32, device=device)
    first = workload.prompt_tokens - 1

    def update() -> None:
        for tokens, advantages in zip(tokens_BT.split(rows), advantages_B.split(rows), strict=True):
            hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, first:-1]
            logits = model.get_output_embeddings()(hidden).float()
            logprobs = logits.log_softmax(-1).gather(2, tokens[:, first + 1 :, None])[..., 0]
            spread = advantages[:, None].expand_as(logprobs)
            loss, _ = policy_loss(logprobs, logprobs.detach(), spread, None, LossConfig())
            (loss.sum() / len(members)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    timing = timed(update, device, repeats, warm_ups=2)
    return Row("  the same padded, plain transformers", timing.best, "s", lower_is_better=True)


def measure(
    workloads: Sequence[Workload], device: torch.device, dtype: torch.dtype, repeats: int, *, peers: bool
) -> Iterator[Row]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = peak_flops(name, dtype.itemsize) or H200_FLOPS
    for workload in workloads:
        yield update_row(workload, device, dtype, repeats, peak)
        gc.collect()
        if peers:
            yield padded_row(workload, device, dtype, repeats)
            gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[w.name for w in WORKLOADS], metavar="NAME", help="%(choices)s")
    parser.add_argument("--peers", action="store_true", help="measure plain transformers as well")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    workloads = [w for w in WORKLOADS if not arguments.only or w.name in arguments.only]
    rows = measure(workloads, default_device(), torch.bfloat16, arguments.repeats, peers=arguments.peers)
    print_rows("update, bf16, random weights, optimizer included", rows)


if __name__ == "__main__":
    main()
