"""Real runs on a tiny model: everything but the size is as in the product."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file

from dapo.config import Config
from dapo.store.database import RunDatabase
from tests.tiny import save_tiny

# Half of the groups at most differ in it, and no other one is like it: verdicts, carry-over and advantages all occur.
REWARD = """
def reward(completion, answer, **row):
    letters = sum(character.isalpha() for character in completion)
    return {"score": letters / 8 if len(completion) > 2 else 0.0, "acc": letters % 5 == answer % 2}
"""


def deadly_reward(marker: Path) -> str:
    """From its worker process it kills the trainer in step 5, once: then the marker is there."""
    return REWARD.replace(
        "def reward(completion, answer, **row):",
        "import os, signal\nfrom pathlib import Path\ncalls = 0\n"
        "def reward(completion, answer, **row):\n"
        "    global calls\n    calls += 1\n"
        f"    if calls == 150 and not Path({str(marker)!r}).exists():\n"
        f"        Path({str(marker)!r}).touch()\n        os.kill(os.getppid(), signal.SIGKILL)",
    )


def recipe(folder: Path, reward: str = REWARD, **sections: dict[str, Any]) -> Path:
    """Model, data, reward and recipe on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        save_tiny(folder / "model")
    rows = [{"prompt": f"question {'x' * i}", "answer": i} for i in range(6)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "reward.py").write_text(reward, encoding="utf-8")
    values: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / "runs"), "steps": 6, "save_every": 3, "seed": 5},  # groups wait when it is saved
        "model": {"path": str(folder / "model"), "device": "cpu"},
        "data": {
            "train": str(folder / "data.jsonl"), "train_batch_size": 4, "gen_batch_size": 6,
            "max_prompt_length": 64, "max_response_length": 8,
        },
        "rollout": {"n": 4},
        "reward": {"use": f"{folder / 'reward.py'}:reward"},
        "optim": {"lr": 1e-3, "warmup_steps": 2, "ppo_mini_batch_size": 2},
    }  # fmt: skip
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def load(folder: Path, *overrides: str, **sections: dict[str, Any]) -> Config:
    return Config.load(recipe(folder, **sections), overrides)


def weights(run_dir: Path, step: int) -> dict[str, Any]:
    return weights_of(run_dir / "checkpoints" / f"step_{step}")


def weights_of(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model.safetensors")


def figures(run_dir: Path) -> list[dict[str, Any]]:
    """Every step's metrics but those of the clock."""
    with RunDatabase.open_readonly(run_dir / "run.db") as database:
        return [
            {
                k: v
                for k, v in step.items()
                if not k.startswith(("timing_s/", "throughput/", "time_share/")) and k != "time"
            }
            for step in database.steps()
        ]


def verdicts(run_dir: Path) -> list[tuple[int, str, int, int | None]]:
    with RunDatabase.open_readonly(run_dir / "run.db") as database:
        return [(g["serial"], g["verdict"], g["generated_step"], g["decided_step"]) for g in database.groups()]
