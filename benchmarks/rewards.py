"""python -m benchmarks.rewards: judgments per second through the worker pool, processes and pipes included.

Groups of 16 responses are submitted all at once, as at the end of a round, to workers that are warmed up. The best of
several runs counts.
"""

from __future__ import annotations

import os
import platform
import random
import sys
import tempfile
import time
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from dapo.config import RewardConfig
from dapo.rewards.judge import build_judge
from dapo.types import Prompt, Rollout, Score

N = 16
TRIVIAL = "def reward(completion, answer):\n    return float(completion.endswith(answer))\n"
THOUGHTS = "Let us think step by step. " * 20
LATEX = [
    r"\frac{{{i}}}{{{j}}}",
    r"\frac{{{i}\sqrt{{{j}}}}}{{7}}",
    r"x^2 + {i}x - {j}",
    r"({i}, {j})",
    r"[{i}, \infty)",
    r"\{{{i}, {j}\}}",
    r"{i}\pi",
    r"\begin{{pmatrix}} {i} \\ {j} \end{{pmatrix}}",
]


def group(serial: int, golds: list[str]) -> tuple[Prompt, list[Rollout]]:
    """Make a group: half of the responses are correct in another spelling, half answer another question."""
    prompt = Prompt(str(serial), ({"role": "user", "content": "How much?"},), (1,), golds[serial])
    none = np.zeros(0, np.int32), np.zeros(0, np.float32)
    rollouts = []
    for i in range(N):
        said = golds[serial] if i % 2 else golds[(serial + i + 1) % len(golds)]
        text = f"{THOUGHTS}\nAnswer: ${said.replace('frac', 'dfrac')}$."
        rollouts.append(Rollout(serial, i, *none, "stop", 0, text))
    return prompt, rollouts


def judgments_per_second(use: str, golds: list[str], repeats: int) -> float:
    """Measure the best rate. Every turn has its own answers, so that no result comes from a cache."""
    judge = build_judge(RewardConfig(use=use))
    rates = []
    for turn in range(repeats + 1):
        own = golds[turn :: repeats + 1]
        groups = [group(serial, own) for serial in range(len(own))]
        start = time.perf_counter()
        futures: list[Future[list[Score]]] = [judge.submit(prompt, rollouts) for prompt, rollouts in groups]
        scores = [score for future in futures for score in future.result()]
        rates.append(len(scores) / (time.perf_counter() - start))
        assert all(score.judged for score in scores), next(score.error for score in scores if not score.judged)
    judge.close()
    return max(rates[1:])


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    console = Console(width=120)
    random.seed(0)
    integers = [str(1000 + 7 * i) for i in range(1000 * (repeats + 1))]
    latex = [random.choice(LATEX).format(i=i + 3, j=i + 5) for i in range(100 * (repeats + 1))]
    rows = []
    with tempfile.TemporaryDirectory() as folder, console.status("judging (about a minute)"):
        path = Path(folder) / "trivial.py"
        path.write_text(TRIVIAL)
        rows.append(("a one-line function", judgments_per_second(f"{path}:reward", integers, repeats)))
        rows.append(("math, integer answers", judgments_per_second("math", integers, repeats)))
        rows.append(("math, LaTeX answers", judgments_per_second("math", latex, repeats)))
    table = Table(title=f"groups of {N} through the pool, best of {repeats}")
    for heading in ("what", "judgments/s"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for what, rate in rows:
        table.add_row(what, f"{rate:,.0f}")
    console.print(table)
    console.print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, mpmath {version('mpmath')}"
    )


if __name__ == "__main__":
    main()
