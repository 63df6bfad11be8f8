"""Real runs of a tiny model for tests."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from dapo.config import Config
from dapo.store.database import RunDatabase
from dapo.terminal.console import Reporter
from tests.tiny import save_tiny

# With this reward some groups have different accuracies and some do not, so that all verdicts and carry-over occur.
REWARD = """
def reward(completion, answer, **row):
    letters = sum(character.isalpha() for character in completion)
    return {"score": letters / 8 if len(completion) > 2 else 0.0, "acc": letters % 5 == answer % 2}
"""


# A loss of the user over whole responses, for learners in several processes.
SEQUENCE_LOSS = """
from dapo.algorithm.loss import response_mean

def loss(logprobs, old_logprobs, advantages, responses, config):
    ratio = response_mean(logprobs - old_logprobs, responses).exp()
    return -ratio * advantages, {"ratio": ratio}
"""


def deadly_reward(marker: Path) -> str:
    """Return a reward that kills the trainer from its worker process in step 5, unless the file `marker` exists.

    It waits for the first checkpoint of the run "killed", because checkpoints are written in the background.
    """
    return REWARD.replace(
        "def reward(completion, answer, **row):",
        "import os, signal, time\nfrom pathlib import Path\ncalls = 0\n"
        "def reward(completion, answer, **row):\n"
        "    global calls\n    calls += 1\n"
        f"    if calls == 150 and not Path({str(marker)!r}).exists():\n"
        f"        while not any(Path({str(marker.parent)!r}).glob('runs/killed/checkpoints/step_*')):\n"
        "            time.sleep(0.05)\n"
        f"        Path({str(marker)!r}).touch()\n        os.kill(os.getppid(), signal.SIGKILL)",
    )


class Interrupts(Reporter):
    """Sends a signal as soon as the evaluation of `name` has some samples at this step or later."""

    def __init__(self, step: int, number: int = signal.SIGINT, name: str = "") -> None:
        self.at, self.number, self.name = step, number, name
        self.step_now, self.is_done = 0, False

    def step(self, report) -> None:
        self.step_now = report.step

    def phase(self, name: str) -> None:
        if name.startswith(f"evaluating {self.name}") and self.step_now >= self.at and not self.is_done:
            self.is_done = True
            os.kill(os.getpid(), self.number)


def recipe(folder: Path, reward: str = REWARD, **sections: dict[str, Any]) -> Path:
    """Write a model, data, a reward and a recipe, and return the path of the recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        save_tiny(folder / "model")
    rows = [{"prompt": f"question {'x' * i}", "answer": i} for i in range(6)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "reward.py").write_text(reward, encoding="utf-8")
    values: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / "runs"), "steps": 6, "save_every": 3, "seed": 5},  # carries groups at step 3
        "model": {"path": str(folder / "model"), "device": "cpu"},
        "data": {
            "train": str(folder / "data.jsonl"), "train_batch_size": 4, "gen_batch_size": 6,
            "max_prompt_length": 64, "max_response_length": 8,
        },
        "rollout": {"n": 4},
        # One process: a second one would take longer to start than these runs take to judge.
        "reward": {"use": f"{folder / 'reward.py'}:reward", "workers": 1},
        "optim": {"lr": 1e-3, "warmup_steps": 2, "ppo_mini_batch_size": 2},
    }  # fmt: skip
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def eval_sets(folder: Path) -> dict[str, str]:
    """Write two evaluation sets; the second contains two of the training questions."""
    rows = {"easy": ["other", "another"], "hard": ["question x", "question xx", "yet another"]}
    for name, prompts in rows.items():
        lines = [json.dumps({"prompt": prompt, "answer": i}) for i, prompt in enumerate(prompts)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return {name: str(folder / f"{name}.jsonl") for name in rows}


def load(folder: Path, *overrides: str, **sections: dict[str, Any]) -> Config:
    return Config.load(recipe(folder, **sections), overrides)


def weights(run_dir: Path, step: int) -> dict[str, Any]:
    return weights_of(run_dir / "checkpoints" / f"step_{step}")


def weights_of(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model.safetensors")


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics of every step, without those that depend on the clock."""
    with RunDatabase.open_readonly(run_dir / "run.db") as database:
        return [
            {
                k: v
                for k, v in step.items()
                if not k.startswith(("timing_s/", "throughput/", "time_share/", "time/")) and k != "time"
            }
            for step in database.steps()
        ]


def verdicts(run_dir: Path) -> list[tuple[int, str, int, int | None]]:
    with RunDatabase.open_readonly(run_dir / "run.db") as database:
        return [(g["serial"], g["verdict"], g["generated_step"], g["decided_step"]) for g in database.groups()]


def assert_same_run(first: Path, second: Path, step: int) -> None:
    """Compare the weights of a step bit for bit, and all metrics and verdicts."""
    one, two = weights(first, step), weights(second, step)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert metrics(first) == metrics(second)
    assert verdicts(first) == verdicts(second)
