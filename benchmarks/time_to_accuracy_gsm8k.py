"""python -m benchmarks.time_to_accuracy_gsm8k: accuracy on held-out GSM8K questions over seconds of training.

Trains `recipes/gsm8k.yaml` in several arms, each a list of changed options, from the same model with the same seed. The
clock stops for evaluations: 500 questions that are held out of the training file, two samples each at temperature 1,
with the same random numbers every time. Compilation happens before the clock starts, on weights that are thrown away.

    dapo data prepare gsm8k
    python -m benchmarks.time_to_accuracy_gsm8k --model Qwen/Qwen2.5-1.5B-Instruct
    python -m benchmarks.time_to_accuracy_gsm8k --arm 'hot: optim.lr=3e-6' --arm 'strict: rollout.mode=strict'
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.accuracy_curves import Point
from benchmarks.gpu_common import StepMetrics, default_device, machine
from benchmarks.time_to_accuracy import Examiner, our_points
from dapo.config import Config

RECIPE = Path(__file__).parent.parent / "recipes" / "gsm8k.yaml"
HELD_OUT, SAMPLES = 500, 2
LEVELS = (0.60, 0.65, 0.70)
STRICT = "rollout.mode=strict"
ARMS = {
    "recipe": "",
    "strict": f"{STRICT} algorithm.filter_groups.probe=0 algorithm.ledger.revisit=0",
    "without probe": "algorithm.filter_groups.probe=0",
    "without revisits": "algorithm.ledger.revisit=0",
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
    return Config.load(RECIPE, [*fixed, *overrides])


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
    parser.add_argument("--out", type=Path, default=Path("time_to_accuracy_gsm8k"), help="folder for runs and results")
    arguments = parser.parse_args()
    named = dict(text.split(":", 1) for text in arguments.arm) if arguments.arm else ARMS
    table = Table(title=f"GSM8K, {HELD_OUT} held-out questions x {SAMPLES} samples, seed {arguments.seed}")
    headings = (
        *(f"{100 * level:.0f} %" for level in LEVELS), "at the end", "step", "s/step", "sampling", "training", "MFU",
        "occupancy", "dropped, steps 30-44",
    )  # fmt: skip
    for heading in ("arm", *headings):
        table.add_column(heading)
    for name, overrides in named.items():
        config, metrics = arm_config(overrides.split(), name.replace(" ", "-"), arguments), StepMetrics()
        points = our_points(
            config, arguments.seconds, arguments.every, default_device(),
            lambda p, name=name: print(f"{name}: {p.seconds:.0f} s, step {p.step}, {p.accuracy:.1%}", flush=True),
            lambda trainer: Examiner(trainer, trainer.data.eval_sets["held_out"], SAMPLES, with_greedy=False),
            metrics,
        )  # fmt: skip
        table.add_row(name, *summary(points, metrics.steps))
        record = {"arm": name, "options": overrides, "points": [asdict(p) for p in points], "steps": metrics.steps}
        (arguments.out / f"{config.run.name}.json").write_text(json.dumps(record), encoding="utf-8")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    console = Console(width=160)
    console.print(table)
    console.print(machine(), markup=False, highlight=False)


if __name__ == "__main__":
    main()
