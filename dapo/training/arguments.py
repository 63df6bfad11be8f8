"""The arguments of Trainer, merged into one checked configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.config import PYTHON, Config, Section, merge_options, option_names, read_yaml
from dapo.config.functions import CustomParts, with_objects
from dapo.config.migration.table import find
from dapo.data.memory import Rows, collect
from dapo.errors import CheckpointError, ConfigError, did_you_mean
from dapo.policy.rules import UpdateRules
from dapo.rewards.judge import RewardFunctions, reward_terms
from dapo.sampling.rules import group_rules
from dapo.store.configuration import is_run, recorded_config

ConfigLike = Config | Mapping[str, Any] | str | os.PathLike[str]

_TRAIN, _EVAL = "train_dataset", "eval_dataset"
# Arguments of Trainer besides the sections.
_OTHERS = ("config", "reward_funcs", _TRAIN, _EVAL, "callbacks", "parts", "resume", "quiet", "reporter")
# Arguments of TRL's GRPOTrainer that Trainer does not have, and what to use instead.
_OF_TRL = {
    "args": "give options as config={...}, or sections such as optim={...}; `dapo convert` turns a GRPOConfig into a "
    "recipe, whose path can be the config",
    "processing_class": "the tokenizer is that of the model",
    "peft_config": "give LoRA as model={'path': ..., 'lora': {'rank': 16}}",
    "optimizers": "the optimizer is AdamW, with the options of optim={...}",
    "rollout_func": "responses come from the engine that rollout={'engine': ...} names",
}


@dataclass(frozen=True, slots=True, eq=False)
class Arguments:
    """The resolved arguments of a Trainer, kept so that it can open the run again."""

    config: Config
    reward_funcs: RewardFunctions | None
    parts: CustomParts | None
    rows: Mapping[str, Rows]  # given as objects, by the path of their source: python:train_dataset
    names_run: bool  # whether the program has chosen run.name
    recipe: str | None  # the name of the recipe file


def resolve(
    config: ConfigLike | None,
    reward_funcs: RewardFunctions | None,
    model: str | os.PathLike[str] | Mapping[str, Any] | None,
    train_dataset: Any,
    eval_dataset: Any,
    sections: Mapping[str, Any],
    parts: CustomParts | None = None,
    *,
    resume: bool,
) -> Arguments:
    """Merge the arguments. Named arguments override sections, and sections override `config`."""
    _check_sections(sections)
    rows: dict[str, Rows] = {}
    explicit: list[Mapping[str, Any]] = [config] if isinstance(config, Mapping) else []
    explicit.append(sections)
    if model is not None:
        explicit.append(_model_options(model))
    if train_dataset is not None:
        explicit.append({"data.train": _sources(_TRAIN, train_dataset, rows)})
    if eval_dataset is not None:
        explicit.append({"eval.data": _eval_sets(eval_dataset, rows)})
    if reward_funcs is not None:
        explicit.append({"reward.use": reward_terms(reward_funcs)[0]})
    if isinstance(config, Config) and not any(explicit):
        return Arguments(_with_parts(config, parts), None, parts, {}, True, None)
    is_recipe = isinstance(config, str | os.PathLike)
    values = _merged(_base(config), explicit)
    if resume and not isinstance(config, Config):
        values = _of_recorded_run(values, explicit)
    if eval_dataset is not None:
        values["eval"].setdefault("k", 1)  # evaluation data was given, so evaluate on it
    _require(values)
    resolved = Config.from_values(values, str(config) if is_recipe else "config")
    if reward_funcs is not None and resolved.cluster.reward_workers and reward_terms(reward_funcs)[1]:
        raise ConfigError(
            "cluster.reward_workers: a reward that is given as a Python function runs in the trainer's process; name "
            "it as path/to/file.py:function in reward.use, or leave reward_workers out"
        )
    names_run = isinstance(config, Config) or "name" in _run_options(_merged({}, explicit))
    recipe = Path(config).stem if is_recipe else None
    return Arguments(_with_parts(resolved, parts), reward_funcs, parts, rows, names_run, recipe)


def _with_parts(config: Config, parts: CustomParts | None) -> Config:
    """Return the configuration with the names of parts given as objects; raise if a part cannot be used."""
    if parts is not None:
        config = with_objects(config, parts)
    for collect_rules in (UpdateRules.of, group_rules):
        collect_rules(config, parts)
    return config


def _base(config: ConfigLike | None) -> dict[str, Any]:
    """Return the values of a recipe or Config that the other arguments change."""
    if isinstance(config, Config):
        return config.model_dump(mode="json", exclude_unset=True)
    if config is None or isinstance(config, Mapping):
        return {}
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"config is a {type(config).__name__}; expected a Config, a mapping of options, or the path of a recipe"
        )
    path = Path(config)
    if not path.is_file() and path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"config is '{config}', which is not a recipe; to name a model, write model='{config}'")
    values = read_yaml(path, option_names())
    merge_options(values, {"run": {}}, option_names())
    values["run"].setdefault("name", path.stem)
    return values


def _merged(values: dict[str, Any], explicit: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = option_names()
    try:
        for options in explicit:
            merge_options(values, options, names)
    except RecursionError:
        raise ConfigError("config: an option holds a value that contains itself, or is nested too deeply") from None
    return values


def _of_recorded_run(values: dict[str, Any], explicit: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the recorded options of the run to resume, changed only by what was given explicitly."""
    place = {name: str(value) for name, value in _run_options(values).items() if name in ("dir", "name")}
    folder = Path(place.get("dir", "runs")) / place.get("name", "run")
    if not is_run(folder):
        raise CheckpointError(f"{folder}: there is no run to resume; leave out resume=True to start one")
    recorded = recorded_config(folder).model_dump(mode="json", exclude_unset=True)
    return _merged(recorded, [*explicit, {"run": place}])


def _run_options(values: Mapping[str, Any]) -> Mapping[str, Any]:
    run = values.get("run")
    return run if isinstance(run, dict) else {}  # a wrong type is reported with all other mistakes


def _require(values: Mapping[str, Any]) -> None:
    for section, option, argument in (("model", "path", "model"), ("data", "train", _TRAIN)):
        found = values.get(section, {})
        if isinstance(found, dict) and found.get(option) is None:
            raise ConfigError(f"{section}.{option} is missing; give {argument}=..., or {section}.{option} in config")


def _model_options(model: Any) -> Mapping[str, Any]:
    if isinstance(model, Mapping):
        return {"model": model}
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(
            f"model is a {type(model).__name__}; expected a hub id or a folder: save the model there with "
            "save_pretrained, beside its tokenizer"
        )
    return {"model.path": model}


def _sources(name: str, given: Any, rows: dict[str, Rows]) -> Any:
    """Return the value of data.train, or of one set of eval.data. Rows given as objects are added to `rows`."""
    is_named = isinstance(given, list | tuple) and given and all(isinstance(each, str | os.PathLike) for each in given)
    if is_named or isinstance(given, str | os.PathLike):
        return given
    path = f"{PYTHON}{name}"
    rows[path] = collect(name, given)
    return [{"path": path}]


def _eval_sets(given: Any, rows: dict[str, Rows]) -> Any:
    if isinstance(given, Mapping):
        return {str(name): _sources(f"{_EVAL}[{str(name)!r}]", each, rows) for name, each in given.items()}
    found = _sources(_EVAL, given, rows)
    return {_EVAL: found} if rows.get(f"{PYTHON}{_EVAL}") is not None else found


def _check_sections(sections: Mapping[str, Any]) -> None:
    known = [*Config.model_fields]
    for name in sections:
        if name in _OF_TRL:
            raise ConfigError(f"Trainer has no argument '{name}'; {_OF_TRL[name]}")
        if name not in known and (row := find("trl", name)) is not None:
            raise ConfigError(f"Trainer has no argument '{name}'; as an option of TRL, {row.answer()}")
        if name not in known:
            hint = did_you_mean(name, [*known, *_OTHERS]) or f"; the sections of options are {', '.join(known)}"
            raise ConfigError(f"Trainer has no argument '{name}'{hint}")
        if not isinstance(sections[name], Mapping | Section):
            raise ConfigError(f"Trainer: {name} is {sections[name]!r}; expected options, such as optim={{'lr': 1e-5}}")
