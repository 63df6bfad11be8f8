"""python -m benchmarks.time_to_accuracy: accuracy on held-out arithmetic over seconds of training.

SmolLM2-135M-Instruct learns sums, products and greatest common divisors from reasoning-gym, mixed 2 : 1 : 1. Every ten
seconds the clock stops for an evaluation on 500 held-out questions, at temperature 1 with the same random numbers each
time, and greedily. Compilation and graph capture happen before the clock starts, on weights that are thrown away.
`--trl` also trains with TRL, if it is installed.
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.accuracy_curves import Point, print_curves, write
from benchmarks.gpu_common import SMOLLM2, StepMetrics, default_device, is_installed, step_seconds, synchronize
from dapo.config import Config, RewardConfig
from dapo.data.dataset import load_eval_sets, load_train_stream
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.errors import TrainingStopped
from dapo.evaluation.evaluate import evaluate
from dapo.model.loading import load_model, load_tokenizer
from dapo.rewards.rules import make_rule
from dapo.training.trainer import Trainer
from dapo.types import Prompt, SamplingParams

WARM_UP_STEPS = 2

# Task, weight in training, held-out questions, how often each is asked, parameters of reasoning-gym.
# There are only 100 products of two one-digit numbers: a quarter of them is held out, and each is asked five times.
TASKS = (
    ("chain_sum", 2, 250, 1, {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
    ("products", 1, 25, 5, {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
    ("gcd", 1, 125, 1, {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 60}),
)


def training_config(folder: Path, model: str, device: str, *, ledger: bool, mode: str, seed: int = 0) -> Config:
    """Return the settings that TRL was measured with, plus dynamic sampling with up to 128 prompts per round."""
    values: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder), "name": "run", "steps": 10**6, "save_every": 0, "seed": seed},
        "model": {"path": model, "device": device},
        "data": {
            "train": [{"path": f"gym:{task}", "weight": weight, "params": p} for task, weight, _, _, p in TASKS],
            "train_batch_size": 32, "gen_batch_size": 128, "max_prompt_length": 128, "max_response_length": 64,
        },
        "rollout": {"n": 16, "temperature": 1.0, "max_concurrent": 1024, "mode": mode},
        "reward": {"use": "integer", "extract": ["last_number"]},
        "algorithm": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "ledger": {"enable": ledger}},
        "optim": {"lr": 1e-5, "warmup_steps": 0, "weight_decay": 0.0, "ppo_mini_batch_size": 8},
        "eval": {
            "k": 1,
            "data": {task: {"path": f"gym:{task}", "size": size, "params": p} for task, _, size, _, p in TASKS},
        },
    }  # fmt: skip
    return Config.parse(values)


def held_out(sets: Mapping[str, Sequence[Prompt]]) -> list[Prompt]:
    """Return the questions of all sets. Those of the small set are repeated, so that the mix matches training."""
    times = {task: repeats for task, _, _, repeats, _ in TASKS}
    return [prompt for name, prompts in sets.items() for prompt in [*prompts] * times[name]]


class Examiner:
    """Evaluates on the held-out questions.

    It uses the trainer's engine. In in-flight mode the groups in flight are finished first, on the clock.
    Each question gets one sample at temperature 1, and a greedy answer.
    """

    def __init__(self, trainer: Trainer, questions: Sequence[Prompt]) -> None:
        self.trainer, self.questions = trainer, questions
        self.max_tokens = trainer.config.data.max_response_length

    def accuracy(self, temperature: float) -> float:
        params = SamplingParams(temperature, max_tokens=self.max_tokens)
        # Always step 0, so that every evaluation has the same random numbers.
        report = evaluate(self.trainer.engine, self.trainer.judge, self.questions, 1, params, 0, "held_out")
        return sum(bool(sample.score.acc) for sample in report.samples) / len(report.samples)

    def warm_up(self) -> None:
        """Let the engines capture their graphs before the clock starts."""
        for temperature in (1.0, 0.0):
            params = SamplingParams(temperature, max_tokens=self.max_tokens)
            assert isinstance(self.trainer.engine, EmbeddedEngine)
            self.trainer.engine.prepare(params)
            self.accuracy(temperature)

    def point(self, seconds: float, metrics: StepMetrics) -> Point:
        return Point(
            seconds=seconds,
            step=self.trainer.step,
            accuracy=self.accuracy(1.0),
            greedy=self.accuracy(0.0),
            tokens_generated=metrics.total("tokens/generated"),
            groups_generated=metrics.total("groups/generated"),
            groups_kept=metrics.total("groups/kept"),
        )


def our_points(
    config: Config,
    seconds: float,
    every: float,
    device: torch.device,
    on_point: Callable[[Point], None] = lambda point: None,
) -> list[Point]:
    """Train for `seconds` or to the run's end. Evaluate before each multiple of `every` seconds, and at the end."""
    _warm_up(config)
    metrics = StepMetrics()
    with closing(Trainer(config, reporter=metrics)) as trainer:
        examiner = Examiner(trainer, held_out(trainer.data.eval_sets))
        examiner.warm_up()
        points: list[Point] = []
        clock = last = next_mark = 0.0

        def examine() -> None:
            nonlocal clock
            if trainer.sampler.pending:
                start = time.perf_counter()
                trainer.sampler.drain()
                clock += time.perf_counter() - start
            points.append(examiner.point(clock, metrics))
            on_point(points[-1])

        try:
            while clock + last <= seconds and not trainer.is_finished:
                # Evaluate before the step that would pass the mark: no point may have trained longer than it says.
                if clock + last >= next_mark:
                    examine()
                    next_mark = every * (1 + (clock + last) // every)
                last = step_seconds(trainer, device)
                clock += last
        except TrainingStopped as stopped:
            Console(stderr=True).print(str(stopped), markup=False, soft_wrap=True)
        if points[-1].step < trainer.step:
            examine()
    return points


def _warm_up(config: Config) -> None:
    """Train two steps of a run that is thrown away. Compiled kernels stay in the process."""
    with tempfile.TemporaryDirectory() as folder:
        run = config.run.model_copy(update={"dir": folder})
        trainer = Trainer(config.model_copy(update={"run": run}), quiet=True)
        try:
            for _ in range(WARM_UP_STEPS):
                trainer.train_step()
        finally:
            trainer.close()
    del trainer
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def trl_points(
    config: Config, seconds: float, every: float, device: torch.device, *, use_vllm: bool, questions: int = 20_000
) -> list[Point]:
    """Train with TRL and the same settings, and evaluate while its clock is stopped.

    `steps_per_generation` makes the four updates of a batch.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage, reportMissingImports]

    tokenizer = load_tokenizer(config.model.path)
    asked = held_out(load_eval_sets(config, tokenizer))
    stream = load_train_stream(config, tokenizer, asked)
    rows = [{"prompt": list(prompt.messages), "answer": prompt.answer} for prompt in stream.take(questions)]
    rule = make_rule("integer", RewardConfig(extract=("last_number",)))
    n, batch, updates = config.rollout.n, config.data.train_batch_size * config.rollout.n, 4
    points: list[Point] = []

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float | None]:
        texts = [completion[0]["content"] for completion in completions]
        return [rule(text, gold)["score"] for text, gold in zip(texts, answer, strict=True)]

    class Examination(TrainerCallback):
        """Evaluates during training. Its clock starts after the warm-up steps and stops during evaluations."""

        def __init__(self) -> None:
            self.clock = 0.0
            self.start: float | None = None

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step < WARM_UP_STEPS * updates or state.global_step % updates:
                return
            synchronize(device)
            if self.start is not None:
                self.clock += time.perf_counter() - self.start
            done = state.global_step // updates - WARM_UP_STEPS
            if not points or self.clock >= points[-1].seconds + every or self.clock >= seconds:
                sampled, greedy = (
                    transformers_accuracy(model, tokenizer, asked, temperature, config, rule)
                    for temperature in (1.0, 0.0)
                )
                groups = done * config.data.train_batch_size
                points.append(Point(self.clock, done, sampled, greedy, 0, groups, groups))
            control.should_training_stop = self.clock >= seconds
            self.start = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        loaded = load_model(config.model, attention="sdpa")
        options = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=batch // updates, steps_per_generation=updates,
            num_generations=n, max_completion_length=config.data.max_response_length, max_steps=10**6,
            learning_rate=config.optim.lr, lr_scheduler_type="constant", loss_type="dapo", epsilon=0.2,
            epsilon_high=0.28, beta=0.0, bf16=True, report_to=[], save_strategy="no", logging_strategy="no",
            use_vllm=use_vllm, vllm_mode="colocate", temperature=1.0, seed=config.run.seed,
        )  # fmt: skip
        # TRL trains float32 weights under bf16 autocast.
        GRPOTrainer(
            loaded.model.float(), reward,
            args=options, train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer, callbacks=[Examination()],
        ).train()  # fmt: skip
    return points


@torch.no_grad()
def transformers_accuracy(
    model: Any, tokenizer: Any, questions: Sequence[Prompt], temperature: float, config: Config, rule: Any
) -> float:
    """Evaluate with `generate`, with the same seed each time, and leave the trainer's random state untouched."""
    width = max(len(prompt.tokens) for prompt in questions)
    tokens = torch.zeros(len(questions), width, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(questions):
        tokens[row, width - len(prompt.tokens) :] = torch.tensor(prompt.tokens)
        mask[row, width - len(prompt.tokens) :] = 1
    how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    was_training, state = model.training, random.getstate()
    with torch.random.fork_rng():
        torch.manual_seed(config.run.seed)
        model.eval()
        out = model.generate(
            tokens.to(model.device), attention_mask=mask.to(model.device), pad_token_id=tokenizer.pad_token_id,
            max_new_tokens=config.data.max_response_length, use_cache=True, **(how or {"do_sample": False}),
        )  # fmt: skip
    random.setstate(state)
    model.train(was_training)
    texts = tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
    return sum(rule(text, prompt.answer)["acc"] for text, prompt in zip(texts, questions, strict=True)) / len(texts)


def measure(arguments: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, list[Point]]]:
    def print_point(point: Point) -> None:
        print(f"{point.seconds:7.1f} s  step {point.step:4d}  {100 * point.accuracy:5.1f}%", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        config = training_config(
            Path(folder), arguments.model, str(device), ledger=arguments.ledger, mode=arguments.mode,
            seed=arguments.seed,
        )  # fmt: skip
        yield "ours", our_points(config, arguments.seconds, arguments.every, device, print_point)
        if arguments.trl and is_installed("trl"):
            gc.collect()
            yield "trl", trl_points(config, arguments.seconds, arguments.every, device, use_vllm=False)
            if is_installed("vllm"):
                gc.collect()
                yield "trl-vllm", trl_points(config, arguments.seconds, arguments.every, device, use_vllm=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=198.0, help="of training")
    parser.add_argument("--every", type=float, default=10.0, help="seconds of training between evaluations")
    parser.add_argument("--mode", choices=["strict", "inflight"], default="strict", help="as rollout.mode")
    parser.add_argument("--ledger", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--model", default=SMOLLM2, help="as model.path")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trl", action="store_true", help="also train with TRL, if it is installed")
    parser.add_argument("--out", type=Path, default=Path("time_to_accuracy"), help="folder for accuracy.csv and plot")
    arguments = parser.parse_args()
    curves: dict[str, list[Point]] = {}
    for system, points in measure(arguments, default_device()):
        curves[system] = points
        write(arguments.out, curves)
    print_curves(Console(width=120), curves)


if __name__ == "__main__":
    main()
