"""python -m benchmarks.time_to_accuracy_gsm8k: accuracy on held-out GSM8K questions over seconds of training.

Trains `recipes/gsm8k.yaml` in several arms, each a list of changed options, from the same model with the same seed. An
arm may name another recipe: `recipe=gsm8k_python` is the one with a tool that runs programs. The clock stops for
evaluations: 500 questions that are held out of the training file, two samples each at temperature 1, with the same
random numbers every time. Compilation happens before the clock starts, on weights that are thrown away.

    dapo data prepare gsm8k
    python -m benchmarks.time_to_accuracy_gsm8k --model Qwen/Qwen2.5-1.5B-Instruct
    python -m benchmarks.time_to_accuracy_gsm8k --arm 'hot: optim.lr=3e-6' --arm 'strict: rollout.mode=strict'
    python -m benchmarks.time_to_accuracy_gsm8k --arm 'without:' --arm 'with: recipe=gsm8k_python'
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
from rich.console import Console
from rich.table import Table

from benchmarks.accuracy_curves import Point
from benchmarks.gpu_common import StepMetrics, default_device, machine
from benchmarks.time_to_accuracy import Examiner, our_points
from dapo.config import Config

RECIPES = Path(__file__).parent.parent / "recipes"
HELD_OUT, SAMPLES = 500, 2
LEVELS = (0.60, 0.65, 0.70)
ARMS = {
    "recipe": "",
    "strict": "rollout.mode=strict",
    "without revisits": "algorithm.ledger.revisit=0",
    "as published": "rollout.mode=strict algorithm.ledger={enable:false} optim.lr=1e-6",
}


def split(data: Path, folder: Path) -> tuple[Path, Path]:
    """Write the questions to train on and 500 others to evaluate on, chosen with a fixed seed."""
    folder.mkdir(parents=True, exist_ok=True)
    table = parquet.read_table(data)
    order = np.random.default_rng(0).permutation(len(table))
    train, held_out = folder / "train.parquet", folder / "held_out.parquet"
    parquet.write_table(table.take(np.sort(order[HELD_OUT:])), train)
    parquet.write_table(table.take(np.sort(order[:HELD_OUT])), held_out)
    return train, held_out


def arm_config(overrides: Sequence[str], name: str, arguments: argparse.Namespace) -> Config:
    train, held_out = split(arguments.data, arguments.out)
    fixed = [
        f"model.path={arguments.model}", f"data.train={train}", f"eval.data={held_out}", "eval.best_metric=null",
        f"run.dir={arguments.out}", f"run.name={name}", f"run.steps={arguments.steps}", "run.save_every=0",
        f"run.seed={arguments.seed}", "run.store_tokens=none",
    ]  # fmt: skip
    recipes = [text.removeprefix("recipe=") for text in overrides if text.startswith("recipe=")] or ["gsm8k"]
    changes = [text for text in overrides if not text.startswith("recipe=")]
    return Config.load(RECIPES / f"{recipes[-1]}.yaml", [*fixed, *changes])


def first_reaching(points: Sequence[Point], level: float) -> Point | None:
    return next((point for point in points if point.accuracy >= level), None)


def summary(points: Sequence[Point], steps: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the cells of one arm: seconds and tokens to each level, the last accuracy, and how the time was spent."""
    reached = [first_reaching(points, level) for level in LEVELS]
    times = [f"{p.seconds:.0f} s, {p.tokens_generated / 1e6:.1f} M" if p else "–" for p in reached]
    late = [step for number, step in enumerate(steps, start=1) if 30 <= number <= 44]
    dropped = sum(value for step in late for name, value in step.items() if name.startswith("tokens/dropped/"))
    share = f"{100 * dropped / sum(step['tokens/generated'] for step in late):.0f} %" if late else "–"

    def mean(name: str) -> float:
        return float(np.mean([step.get(name, np.nan) for step in steps])) if steps else np.nan

    decoded = [step.get("engine/decode_steps", 1.0) for step in steps]
    occupancy = np.average([step.get("engine/batch_occupancy", np.nan) for step in steps], weights=decoded)
    return [
        *times, f"{100 * points[-1].accuracy:.1f} %", str(points[-1].step), f"{mean('timing_s/step'):.1f}",
        f"{mean('timing_s/generate'):.1f}", f"{mean('timing_s/train'):.1f}", f"{100 * mean('throughput/mfu'):.0f} %",
        f"{occupancy:.2f}", share,
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2.5-1.5B-Instruct", help="as model.path")
    parser.add_argument("--data", type=Path, default=Path("data/gsm8k.parquet"), help="from `dapo data prepare gsm8k`")
    parser.add_argument("--arm", action="append", help="'NAME: key=value key=value'; default: the recipe and others")
    parser.add_argument("--seconds", type=float, default=250.0, help="of training, per arm")
    parser.add_argument("--steps", type=int, default=44, help="per arm, at most")
    parser.add_argument("--every", type=float, default=25.0, help="seconds of training between evaluations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm-up", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, default=Path("time_to_accuracy_gsm8k"), help="folder for runs and results")
    arguments = parser.parse_args()
    named = dict(text.split(":", 1) for text in arguments.arm) if arguments.arm else ARMS
    if len(named) == 1:
        ((name, overrides),) = named.items()
        measure(name, overrides.split(), arguments)
    else:
        # A process of its own for each arm: it has the whole GPU, and compiled kernels are read from the disk.
        for number, (name, overrides) in enumerate(named.items()):
            arm = ["--arm", f"{name}:{overrides}", *(["--no-warm-up"] if number else [])]
            command = [sys.executable, "-m", "benchmarks.time_to_accuracy_gsm8k", *_without_arms(), *arm]
            subprocess.run(command, check=True)
    print_table([json.loads(result_file(arguments.out, name).read_text(encoding="utf-8")) for name in named])


def measure(name: str, overrides: Sequence[str], arguments: argparse.Namespace) -> None:
    """Train one arm, and write its evaluations and the metrics of its steps."""
    config, metrics = arm_config(overrides, result_file(arguments.out, name).stem, arguments), StepMetrics()
    points = our_points(
        config, arguments.seconds, arguments.every, default_device(),
        lambda p: print(f"{name}: {p.seconds:.0f} s, step {p.step}, {p.accuracy:.1%}", flush=True),
        lambda trainer: Examiner(trainer, trainer.data.eval_sets["held_out"], SAMPLES, with_greedy=False),
        metrics,
        warms_up=arguments.warm_up,
    )  # fmt: skip
    record = {
        "arm": name, "options": list(overrides), "seed": arguments.seed, "machine": machine(),
        "points": [asdict(point) for point in points], "steps": metrics.steps,
    }  # fmt: skip
    result_file(arguments.out, name).write_text(json.dumps(record), encoding="utf-8")


def result_file(out: Path, name: str) -> Path:
    return out / f"{name.strip().replace(' ', '-')}.json"


def _without_arms() -> list[str]:
    """Return the arguments of this command without its arms."""
    given = sys.argv[1:]
    return [text for i, text in enumerate(given) if text != "--arm" and (i == 0 or given[i - 1] != "--arm")]


def print_table(records: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title=f"GSM8K, {HELD_OUT} held-out questions x {SAMPLES} samples, seed {records[0]['seed']}")
    headings = (
        *(f"{100 * level:.0f} %" for level in LEVELS), "at the end", "step", "s/step", "sampling", "training", "MFU",
        "occupancy", "dropped, steps 30-44",
    )  # fmt: skip
    for heading in ("arm", *headings):
        table.add_column(heading)
    for record in records:
        table.add_row(record["arm"], *summary([Point(**point) for point in record["points"]], record["steps"]))
    console = Console(width=160)
    console.print(table)
    console.print(records[0]["machine"], markup=False, highlight=False)


if __name__ == "__main__":
    main()
