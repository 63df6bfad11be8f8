"""python -m benchmarks.gpu_step: seconds of a whole training step, and the gap between sampler and trainer.

`step`: the real Trainer on a model with random weights. Dynamic sampling is off, so every step does the same work:
sampling, judging by a Python function in worker processes, one update, and the record in the run database. Stop tokens
are never sampled. The result is the median over the steps after two warm-up steps.
`gap`: mean |sampler - trainer| log-probability on the real SmolLM2-135M-Instruct in bf16 at temperature 1.
`--only NAME` selects one. `--peers` also measures a TRL step, and one with vLLM, if they are installed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from benchmarks.gpu_common import (
    SMOLLM2,
    SMOLLM2_135M,
    Row,
    StepMetrics,
    default_device,
    is_installed,
    print_rows,
    random_prompts,
    save_random,
    step_seconds,
    synchronize,
)
from dapo.algorithm.filtering import GroupRules, form_group
from dapo.config import Config, ModelConfig
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.model.loading import load_model
from dapo.policy.policy import Policy
from dapo.training.trainer import Trainer
from dapo.types import Group, Prompt, Request, SamplingParams, Score

WARM_UP_STEPS = 2
REWARD = "def reward(completion, answer):\n    return float(len(completion) % 2)\n"
QUESTIONS = [
    "What is 17 + 25?", "What is 6 times 7?", "Find the greatest common divisor of 36 and 48.",
    "Write a short poem about the sea and the wind.", "List three animals that live in the forest.",
    "Who are you, and what can you help me with today?", "Why is the sky blue?", "Explain how a bicycle stays upright.",
    "Name the planets of the solar system.", "How do I boil an egg?", "Translate 'good morning' into French.",
    "Tell me about the city of Rome.", "What is a prime number?", "Give me a recipe for pancakes.",
    "Summarize the story of Cinderella in two sentences.", "What does a computer's memory do?",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Workload:
    """The size of one step, and the seconds it must and should take."""

    what: str
    shape: PretrainedConfig
    prompts: int
    n: int
    prompt_tokens: int
    new_tokens: int
    must: float
    aim: float


WORKLOAD = Workload("whole step, 135M, 16 x 16, 128 + 256", SMOLLM2_135M, 16, 16, 128, 256, 0.9, 0.5)


def step_row(
    workload: Workload, device: torch.device, dtype: torch.dtype, steps: int, overrides: tuple[str, ...] = ()
) -> Row:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = _write_recipe(folder, workload, device, dtype, steps)
        metrics = StepMetrics()
        trainer = Trainer(Config.load(recipe, overrides), reporter=metrics)
        try:
            seconds = [step_seconds(trainer, device) for _ in range(WARM_UP_STEPS + steps)]
        finally:
            trainer.close()
    tokens = workload.prompts * workload.n * workload.new_tokens
    assert all(step["tokens/generated"] == tokens for step in metrics.steps), "a response ended early"
    parts = ", ".join(
        f"{part} {statistics.median(step[f'timing_s/{part}'] for step in metrics.steps[WARM_UP_STEPS:]):.3f} s"
        for part in ("generate", "reward", "train")
    )
    measured = seconds[WARM_UP_STEPS:]
    recording = statistics.median(
        wall - step["timing_s/step"] for wall, step in zip(measured, metrics.steps[WARM_UP_STEPS:], strict=True)
    )
    note = (
        f"first step {seconds[0]:.1f} s, second {seconds[1]:.1f} s; medians: {parts}, recording {recording:.3f} s; "
        f"best step {min(measured):.3f} s"
    )
    median = statistics.median(measured)
    return Row(workload.what, median, "s", workload.must, workload.aim, lower_is_better=True, note=note)


def _write_recipe(folder: Path, workload: Workload, device: torch.device, dtype: torch.dtype, steps: int) -> Path:
    save_random(folder / "model", workload.shape, device, dtype)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, _questions(workload))), encoding="utf-8")
    values: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / "runs"), "steps": WARM_UP_STEPS + steps, "save_every": 0},
        "model": {"path": str(folder / "model"), "device": str(device), "dtype": str(dtype).removeprefix("torch.")},
        "data": {
            "train": str(folder / "data.jsonl"), "train_batch_size": workload.prompts,
            "max_prompt_length": workload.prompt_tokens, "max_response_length": workload.new_tokens,
        },
        "rollout": {"n": workload.n, "max_concurrent": workload.prompts * workload.n},
        "reward": {"use": f"{folder / 'reward.py'}:reward"},
        "algorithm": {"filter_groups": {"enable": False}},
    }  # fmt: skip
    path = folder / "step.yaml"
    path.write_text(json.dumps(values), encoding="utf-8")  # JSON is YAML
    return path


def _questions(workload: Workload) -> list[dict[str, Any]]:
    return random_questions(4 * workload.prompts, workload.prompt_tokens, workload.shape.vocab_size)


def random_questions(count: int, length: int, vocab_size: int) -> list[dict[str, Any]]:
    prompts = random_prompts(count, length, vocab_size)
    return [{"prompt": " ".join(f"w{token}" for token in prompt), "answer": 0} for prompt in prompts]


def gap_row(model: str, device: torch.device, dtype: str, n: int, new_tokens: int, questions: list[str]) -> Row:
    """Sample with the engine, then compare with the policy's log-probabilities before its first update."""
    loaded = load_model(ModelConfig(path=model, device=str(device), dtype=dtype))  # pyright: ignore[reportArgumentType]
    prompts = [_encoded(loaded.tokenizer, question) for question in questions]
    length = max(map(len, prompts)) + new_tokens
    engine = EmbeddedEngine(
        loaded.model, loaded.tokenizer, loaded.stop_ids, 0, len(prompts) * n, max_length=length, kv_memory_fraction=0.1
    )
    groups = sampled_groups(engine, prompts, n, new_tokens)
    engine.close()
    limit = {"algorithm": {"max_logprob_gap": 1e9}}  # measure the gap, do not stop at it
    config = Config.parse({"model": {"path": model}, "data": {"train": "none"}, "optim": {"lr": 1e-9}, **limit})
    metrics = Policy(loaded.model, config).update(groups, step=1, version=0).metrics
    tokens = sum(group.tokens for group in groups)
    note = f"over {tokens:,} tokens; largest {metrics['logprob_gap/max']:.3f}"
    gap = metrics["logprob_gap/mean"]
    return Row("mean sampler/trainer gap, real SmolLM2-135M", gap, "nats", 0.01, 0.003, lower_is_better=True, note=note)


def _encoded(tokenizer: Any, question: str) -> tuple[int, ...]:
    messages = [{"role": "user", "content": question}]
    return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def sampled_groups(engine: EmbeddedEngine, prompts: list[tuple[int, ...]], n: int, new_tokens: int) -> list[Group]:
    engine.submit([Request(i, prompt, n, SamplingParams(max_tokens=new_tokens)) for i, prompt in enumerate(prompts)])
    found = []
    while finished := engine.poll():
        found += finished
    groups = []
    for serial, tokens in enumerate(prompts):
        members = sorted((r for r in found if r.serial == serial), key=lambda rollout: rollout.index)
        scores = [Score(float(i % 2)) for i in range(n)]
        groups.append(
            form_group(serial, Prompt(str(serial), (), tokens, None), members, scores, GroupRules(new_tokens))
        )
    return groups


def trl_row(workload: Workload, device: torch.device, steps: int, *, use_vllm: bool) -> Row:
    """Time the same step in TRL's trainer, from the end of one step to the end of the next."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage, reportMissingImports]

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            synchronize(device)
            ends.append(time.perf_counter())

    def reward(completions: list[str], **_: Any) -> list[float | None]:
        return [float(len(completion) % 2) for completion in completions]

    with tempfile.TemporaryDirectory() as folder:
        saved = save_random(Path(folder) / "model", workload.shape, device, torch.bfloat16, has_stop_token=True)
        options = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=workload.prompts * workload.n, num_generations=workload.n,
            max_completion_length=workload.new_tokens, max_steps=WARM_UP_STEPS + steps, learning_rate=1e-6,
            loss_type="dapo", epsilon=0.2, epsilon_high=0.28, beta=0.0, bf16=True, report_to=[], save_strategy="no",
            logging_strategy="no", generation_kwargs={} if use_vllm else {"min_new_tokens": workload.new_tokens},
            use_vllm=use_vllm, vllm_mode="colocate", model_init_kwargs={"dtype": "bfloat16"},
        )  # fmt: skip
        data = Dataset.from_list([{"prompt": question["prompt"]} for question in _questions(workload)])
        GRPOTrainer(str(saved), reward, args=options, train_dataset=data, callbacks=[Clock()]).train()
    seconds = [later - earlier for earlier, later in pairwise(ends)][WARM_UP_STEPS - 1 :]
    return Row(f"  TRL{' with vLLM' if use_vllm else ''}", statistics.median(seconds), "s", lower_is_better=True)


def measure(names: set[str], model: str, device: torch.device, steps: int, micro_batch: int | None) -> Iterator[Row]:
    if "step" in names:
        overrides = (f"optim.max_tokens_per_micro_batch={micro_batch}",) if micro_batch else ()
        yield step_row(WORKLOAD, device, torch.bfloat16, steps, overrides)
        gc.collect()
    if "gap" in names:
        yield gap_row(model, device, "bfloat16", 16, 128, QUESTIONS)
        gc.collect()
    if "trl" in names:
        yield trl_row(WORKLOAD, device, steps, use_vllm=False)
        gc.collect()
    if "trl-vllm" in names:
        yield trl_row(WORKLOAD, device, steps, use_vllm=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["step", "gap"], default=["step", "gap"])
    parser.add_argument("--peers", action="store_true", help="measure TRL's step as well")
    parser.add_argument("--steps", type=int, default=8, help="number of steps to measure")
    parser.add_argument("--model", default=SMOLLM2, help="real weights, as in model.path")
    parser.add_argument("--micro-batch", type=int, help="tokens; default: as the trainer chooses")
    arguments = parser.parse_args()
    names = set(arguments.only)
    if arguments.peers and is_installed("trl"):
        names |= {"trl", "trl-vllm"} if is_installed("vllm") else {"trl"}
    rows = measure(names, arguments.model, default_device(), arguments.steps, arguments.micro_batch)
    print_rows("whole step, and the gap between sampler and trainer, bf16", rows)


if __name__ == "__main__":
    main()
