"""python -m benchmarks.gpu_rollout: tokens per second of the embedded engine, in bf16 with random weights.

Stop tokens are off, so lengths are fixed. Log-probabilities of the sampled tokens are kept. The first run, which
compiles and captures graphs, is printed separately; the best of three more counts. `--only NAME` selects workloads.
`--peers` also measures transformers.generate, and vLLM if it is installed.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from benchmarks.gpu_common import (
    QWEN2_1_5B,
    SMOLLM2_135M,
    Row,
    Timing,
    decode_floor,
    default_device,
    is_installed,
    print_rows,
    random_model,
    random_prompts,
    timed,
    word_tokenizer,
)
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.engine.protocol import Engine
from dapo.engine.vllm.arguments import VllmOptions
from dapo.engine.vllm.engine import VllmEngine
from dapo.types import Request, SamplingParams

SIGMA = 0.8  # of the log-normal lengths: one response in twenty is longer than 3.7 times the median


@dataclass(frozen=True, slots=True)
class Workload:
    """`prompts` x `n` responses of `new_tokens` tokens.

    With `longest`, lengths are log-normal with the median `new_tokens`, and limited to `longest`.
    """

    name: str
    what: str
    shape: PretrainedConfig
    prompts: int
    n: int
    prompt_tokens: int
    new_tokens: int
    slots: int
    must: float
    aim: float
    longest: int | None = None

    @property
    def max_length(self) -> int:
        return self.prompt_tokens + (self.longest or self.new_tokens)

    def requests(self) -> list[Request]:
        prompts = random_prompts(self.prompts, self.prompt_tokens, self.shape.vocab_size)
        if self.longest is None:
            params = SamplingParams(max_tokens=self.new_tokens)
            return [Request(i, prompt, self.n, params) for i, prompt in enumerate(prompts)]
        # A request has one length limit for all its responses, so each response is its own request here.
        rng = np.random.default_rng(0)
        drawn = self.new_tokens * np.exp(SIGMA * rng.standard_normal(self.prompts * self.n))
        lengths = np.clip(drawn.round(), 1, self.longest).astype(int)
        return [
            Request(i, prompts[i // self.n], 1, SamplingParams(max_tokens=int(length)))
            for i, length in enumerate(lengths)
        ]


WORKLOADS = (
    Workload("135m", "135M, 16 x 16, 128 + 256", SMOLLM2_135M, 16, 16, 128, 256, 256, 230_000, 250_000),
    Workload("135m-large", "135M, 64 x 16, 128 + 512", SMOLLM2_135M, 64, 16, 128, 512, 1024, 200_000, 350_000),
    Workload("1.5b", "1.5B, 16 x 16, 128 + 256", QWEN2_1_5B, 16, 16, 128, 256, 256, 120_000, 150_000),
    Workload("1.5b-long", "1.5B, 16 x 16, 128 + 2,048", QWEN2_1_5B, 16, 16, 128, 2048, 256, 75_000, 85_000),
    Workload(
        "1.5b-lengths", "1.5B, 64 x 16, 128 + log-normal (median 128, at most 1024) on 256 slots",
        QWEN2_1_5B, 64, 16, 128, 128, 256, 0.85, 0.95, longest=1024,
    ),
)  # fmt: skip


def rollout_rows(workload: Workload, model: Any, repeats: int, **engine_options: Any) -> list[Row]:
    """Measure one workload: tokens/s, or with `longest` the share of slots that are occupied while requests wait."""
    tokenizer = word_tokenizer(workload.shape.vocab_size)
    engine = EmbeddedEngine(model, tokenizer, frozenset(), 0, workload.slots, **engine_options)
    requests = workload.requests()
    tokens = sum(request.n * request.params.max_tokens for request in requests)
    timing = timed(lambda: drain(engine, requests), model.device, repeats)
    note = f"first run {timing.first:.1f} s, then {timing.best:.3f} s for {tokens:,} tokens"
    if workload.longest is None:
        floor = decode_floor(model, workload.prompts * workload.n, workload.prompt_tokens, workload.new_tokens)
        row = Row(workload.what, tokens / timing.best, "tokens/s", workload.must, workload.aim, floor, note=note)
    else:
        engine.metrics()  # resets the counters after the timed runs
        occupied = occupancy(engine, requests)
        note += f", {tokens / timing.best:,.0f} tokens/s"
        row = Row(workload.what, occupied, "of the slots", workload.must, workload.aim, note=note)
    engine.close()
    return [row]


def drain(engine: Engine, requests: Sequence[Request]) -> None:
    engine.submit(requests)
    while engine.poll():
        pass


def occupancy(engine: EmbeddedEngine, requests: Sequence[Request]) -> float:
    """Return the mean share of occupied slots over the decode steps until the queue is empty."""
    engine.submit(requests)
    while engine.waiting:
        engine.poll()
    occupied = engine.metrics()["engine/batch_occupancy"]
    while engine.poll():
        pass
    return occupied


def peer_rows(workload: Workload, device: torch.device, dtype: torch.dtype, repeats: int) -> list[Row]:
    if workload.longest is not None:
        return []  # neither peer accepts a length per response in one call
    found = {"transformers.generate": transformers_timing(workload, device, dtype, repeats)}
    if is_installed("vllm") and device.type == "cuda":
        found["vLLM"] = vllm_timing(workload, device, repeats)
        found["vLLM as dapo's engine"] = vllm_engine_timing(workload, device, repeats)
    tokens = workload.prompts * workload.n * workload.new_tokens
    return [
        Row(f"  {name}", tokens / timing.best, "tokens/s", note=f"first run {timing.first:.1f} s")
        for name, timing in found.items()
    ]


def transformers_timing(workload: Workload, device: torch.device, dtype: torch.dtype, repeats: int) -> Timing:
    model = random_model(workload.shape, device, dtype, attention="sdpa")
    prompts = torch.tensor([request.prompt for request in workload.requests()], device=device)

    def generate() -> None:
        model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0,
            num_return_sequences=workload.n, max_new_tokens=workload.new_tokens, min_new_tokens=workload.new_tokens,
            pad_token_id=0,
        )  # fmt: skip

    return timed(generate, device, repeats)


def vllm_timing(workload: Workload, device: torch.device, repeats: int) -> Timing:
    import vllm  # pyright: ignore[reportMissingImports]

    params = vllm.SamplingParams(
        n=workload.n, max_tokens=workload.new_tokens, ignore_eos=True, logprobs=0, detokenize=False
    )
    prompts = [{"prompt_token_ids": list(request.prompt)} for request in workload.requests()]
    with tempfile.TemporaryDirectory() as folder:
        workload.shape.save_pretrained(folder)
        llm = vllm.LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
            max_model_len=workload.max_length, max_num_seqs=workload.slots, gpu_memory_utilization=0.4,
        )  # fmt: skip
    timing = timed(lambda: llm.generate(prompts, params, use_tqdm=False), device, repeats)
    llm.llm_engine.engine_core.shutdown()
    return timing


def vllm_engine_timing(workload: Workload, device: torch.device, repeats: int) -> Timing:
    with tempfile.TemporaryDirectory() as folder:
        workload.shape.save_pretrained(folder)
        options = VllmOptions(
            Path(folder), 0, workload.max_length, workload.slots, "bfloat16", memory_fraction=0.4,
            extra={"load_format": "dummy"},
        )  # fmt: skip
        engine = VllmEngine(options, frozenset(), word_tokenizer(workload.shape.vocab_size), lambda: ())
    timing = timed(lambda: drain(engine, workload.requests()), device, repeats)
    engine.close()
    return timing


def measure(
    workloads: Sequence[Workload], device: torch.device, dtype: torch.dtype, repeats: int, *, peers: bool
) -> Iterator[Row]:
    for workload in workloads:
        model = random_model(workload.shape, device, dtype)
        yield from rollout_rows(workload, model, repeats, max_length=workload.max_length)
        del model
        gc.collect()  # engine and model refer to each other
        if peers:
            yield from peer_rows(workload, device, dtype, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[w.name for w in WORKLOADS], metavar="NAME", help="%(choices)s")
    parser.add_argument("--peers", action="store_true", help="measure the alternatives as well")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    workloads = [w for w in WORKLOADS if not arguments.only or w.name in arguments.only]
    rows = measure(workloads, default_device(), torch.bfloat16, arguments.repeats, peers=arguments.peers)
    print_rows("rollout, bf16, random weights", rows)


if __name__ == "__main__":
    main()
