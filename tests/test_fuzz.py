"""Fuzz tests: no input may end in a traceback.

`make test` runs a sample; `DAPO_FUZZ=10000 python -m pytest tests/test_fuzz.py` runs 10,000 inputs in total. A failure
names its area and seed.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from dapo.cli import main
from dapo.config import Config, ModelConfig, RewardConfig
from dapo.data.check import check_dataset
from dapo.data.dataset import load_train_stream
from dapo.evaluation.gold import gold_judge
from dapo.model.forward import check_model
from dapo.model.loading import load_model
from dapo.plan import plan_text
from tests import fuzz, runs
from tests.tiny import tiny_tokenizer

TOTAL = int(os.environ.get("DAPO_FUZZ", "450"))
# Shares of the total, by cost: a model takes a tenth of a second, a configuration a thousandth.
COUNTS = {"overrides": 0.3, "recipes": 0.24, "rows": 0.24, "models": 0.12, "commands": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    runs.recipe(folder)
    return folder


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Keep the tests off the hub and the package index, and let relative paths lead nowhere."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("DAPO_CACHE", str(folder / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(folder)


def seeds(area: str) -> Iterator[tuple[int, Random]]:
    for seed in range(round(TOTAL * COUNTS[area])):
        yield seed, Random(f"{area} {seed}")


def hunt(area: str, attempt: Callable[[int, Random], object]) -> None:
    """Run all attempts of an area, and report each kind of fault with its first seed.

    At least a fifth of the inputs must be refused; otherwise they would not test the error messages.
    """
    refused, faults = 0, {}
    for seed, random in seeds(area):
        try:
            refused += attempt(seed, random) is not None
        except Exception as error:
            *_, last = traceback.extract_tb(error.__traceback__)
            place = f"{type(error).__name__} at {last.filename}:{last.lineno}"
            faults.setdefault(place, f"{area}, seed {seed}: {place}: {str(error)[:300]}")
    assert not faults, "\n".join(faults.values())
    assert refused > 0.2 * TOTAL * COUNTS[area]


def use(config: Config, folder: Path) -> None:
    """Check that an accepted configuration survives being written and read, and can be planned."""
    file = folder / "again.yaml"
    file.write_text(config.to_yaml(), encoding="utf-8")
    assert Config.load(file) == config
    plan_text(config)


def test_overrides(folder: Path) -> None:
    path = folder / "recipe.yaml"

    def attempt(seed: int, random: Random) -> str | None:
        chosen = fuzz.overrides(random)
        return fuzz.survives(lambda: use(Config.load(path, chosen), folder))

    hunt("overrides", attempt)


def test_recipes(folder: Path) -> None:
    good: dict[str, Any] = yaml.safe_load((folder / "recipe.yaml").read_text())
    path = folder / "fuzzed.yaml"

    def attempt(seed: int, random: Random) -> str | None:
        path.write_bytes(fuzz.recipe(random, good))
        return fuzz.survives(lambda: use(Config.load(path), folder))

    hunt("recipes", attempt)


def test_rows(folder: Path) -> None:
    tokenizer, options = tiny_tokenizer(), RewardConfig()

    def load(path: Path) -> None:
        check_dataset(str(path), gold_judge(options), None, tokenizer)
        load_train_stream(Config.load(folder / "recipe.yaml", [f"data.train={path}"]), tokenizer)

    def attempt(seed: int, random: Random) -> str | None:
        path = fuzz.write_dataset(random, folder)
        return fuzz.survives(lambda: load(path))

    hunt("rows", attempt)


def test_models(folder: Path, tmp_path: Path) -> None:
    def load(path: Path) -> None:
        config = Config.load(folder / "recipe.yaml")
        loaded = load_model(ModelConfig(path=str(path), device="cpu"))
        check_model(loaded.model, 72)
        load_train_stream(config, loaded.tokenizer)

    def attempt(seed: int, random: Random) -> str | None:
        path = fuzz.damage_model(random, folder / "model", tmp_path / str(seed))
        return fuzz.survives(lambda: load(path))

    hunt("models", attempt)


def test_commands(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Fuzz the command line itself: its messages and exit codes."""
    recipe, data = str(folder / "recipe.yaml"), str(folder / "data.jsonl")

    def arguments(random: Random) -> list[str]:
        word, number = fuzz.value(random), random.choice(fuzz.SCALARS)
        return random.choice(
            [
                ["train", recipe, "--dry-run", *fuzz.overrides(random)],
                ["train", word, "--dry-run"],
                ["ablate", recipe, "--dry-run", "eval.k=1", f"eval.data={data}", f"--arms={word}"],
                ["ablate", recipe, "--dry-run", "eval.k=1", f"eval.data={data}", f"--arm={word}: {word}"],
                ["plan", recipe, *fuzz.overrides(random)],
                ["plan", recipe, "model.path=qwen2.5-7b", f"--gpus={number}"],
                ["plan", recipe, "model.path=qwen2.5-7b", f"--{random.choice(PLAN_OPTIONS)}={number}"],
                ["data", "check", data, f"--reward={word}"],
                ["data", "check", data, f"--template={word}"],
                ["data", "check", data, f"--model={word}"],
                ["data", "check", word],
                ["data", "prepare", word],
                ["data", "prepare", "gsm8k", f"--from={word}"],
                ["export", word, f"--to={folder / 'out'}", f"--which={number}"],
                ["eval", word, f"--data={number}", *fuzz.overrides(random)],
                ["eval", str(folder / "model"), f"--data={word}", "--k", "1"],
                ["metrics", word],
                ["report", word],
            ]
        )

    def attempt(seed: int, random: Random) -> int | None:
        monkeypatch.setattr(sys, "argv", ["dapo", *(word.replace("\0", "") for word in arguments(random))])
        with pytest.raises(SystemExit) as end:
            main()
        shown = capsys.readouterr().err
        assert end.value.code in (0, 1, 2, 3, None), sys.argv
        assert "Traceback" not in shown
        if end.value.code in (2, 3):
            assert len(shown) < 5000, sys.argv
        return end.value.code or None

    hunt("commands", attempt)


PLAN_OPTIONS = [
    "gpu", "rollout-share", "tensor-parallel", "mean-response", "mean-prompt", "keep-rate", "judge-seconds", "network",
]  # fmt: skip
