"""The arms of an ablation: the published ladder, leave-one-out, or the user's own lists of changed options."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dapo.config import Config, option_names
from dapo.config.loading import Dumper, parse_yaml, read_text
from dapo.config.training_options import CLIP_BOUNDS, LOSS_SETTINGS, AlgorithmConfig
from dapo.errors import ConfigError, did_you_mean

FULL, RECIPE = "full", "recipe"
LADDER, LEAVE_ONE_OUT = "ladder", "leave-one-out"
# Arms may not change these, or they could not be compared: a question is recognized by the text of its prompt.
_SHARED = ("run.", "eval.", "data.prompt_template.", "data.system_prompt.", "data.columns.")
_LONGEST_NAME = 200  # bytes; a file system allows 255 for the name of a run's folder
# Options that belong to the loss, with the loss itself.
_LOSS_OPTIONS = {f"algorithm.{name}" for settings in LOSS_SETTINGS.values() for name in ("loss", *settings)}


@dataclass(frozen=True, slots=True)
class Arm:
    """A name, and the options that the arm changes in the recipe, as KEY=VALUE."""

    name: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Technique:
    """One technique of DAPO, and the options that turn it on (with the recipe's values, if any) and off."""

    name: str
    on: Callable[[Config], dict[str, Any]]
    off: Callable[[Config], dict[str, Any]]


def _clip_higher(config: Config) -> dict[str, Any]:
    low, high = config.algorithm.clip_ratio_low, config.algorithm.clip_ratio_high
    return {"algorithm.clip_ratio_high": high if high > low else round(low + 0.08, 6)}  # published: 0.2 and 0.28


def _soft_overlong(config: Config) -> dict[str, Any]:
    if config.reward.length_shaping != "none":
        return {"reward.length_shaping": config.reward.length_shaping}
    fifth = max(1, config.data.max_response_length // 5)  # published: 4,096 of 20,480 tokens, factor 1
    return {
        "reward.length_shaping": "buffer",
        "reward.overlong_buffer.len": fifth,
        "reward.overlong_buffer.penalty_factor": 1.0,
    }


def _token_loss(config: Config) -> dict[str, Any]:
    mode = config.algorithm.loss_agg_mode
    return {"algorithm.loss_agg_mode": "token-mean" if mode == "seq-mean-token-mean" else mode}


def _without_dynamic_sampling(config: Config) -> dict[str, Any]:
    """Sample exactly one batch and train on what there is: no group is replaced, and none is carried over.

    The overlong filter and the judge can also leave groups without anything to train on. The ledger, which avoids flat
    groups, is off too. In flight, where groups of several steps overlap, groups with nothing to train on are replaced:
    a limit of one batch would leave the engine empty at the end of each step.
    """
    one_batch: dict[str, Any] = {
        "algorithm.filter_groups.max_num_gen_batches": 1,
        "algorithm.filter_groups.on_exhausted": "train_partial",
    }
    return {
        "algorithm.filter_groups.enable": False,
        "algorithm.filter_groups.function": None,
        **(one_batch if config.rollout.mode == "strict" else {}),
        "algorithm.ledger.enable": False,
        "algorithm.ledger.revisit": 0.0,
        "algorithm.ledger.lookahead": 1,
        "algorithm.ledger.correct": False,
        "data.gen_batch_size": 0,
    }


# In the order of the paper's table.
TECHNIQUES = (
    Technique(
        "overlong-filter",
        lambda config: {"algorithm.overlong_filter": True},
        lambda config: {"algorithm.overlong_filter": False},
    ),
    Technique(
        "clip-higher",
        _clip_higher,
        lambda config: {"algorithm.clip_ratio_high": config.algorithm.clip_ratio_low},
    ),
    Technique("soft-overlong", _soft_overlong, lambda config: {"reward.length_shaping": "none"}),
    Technique("token-loss", _token_loss, lambda config: {"algorithm.loss_agg_mode": "seq-mean-token-mean"}),
    Technique(
        "dynamic-sampling",
        lambda config: {} if config.algorithm.filter_groups.enable else {"algorithm.filter_groups.enable": True},
        _without_dynamic_sampling,
    ),
)
PUBLISHED = {FULL, "grpo", *(f"{prefix}{technique.name}" for prefix in ("+", "no-") for technique in TECHNIQUES)}


def published_arms(config: Config, families: Iterable[str]) -> list[Arm]:
    """Return the arms of the given families for this recipe, `full` last. Equal arms are listed once."""
    if config.algorithm.loss != "dapo":
        raise ConfigError(
            "--arms: the ladder turns the parts of algorithm.loss dapo on and off, but the recipe has "
            f"{config.algorithm.loss}; name your own arms with --arm"
        )
    names = [technique.name for technique in TECHNIQUES]
    arms: dict[str, set[str]] = {}  # name -> its techniques
    if LADDER in families:
        arms["grpo"] = set()
        arms |= {f"+{name}": set(names[: i + 1]) for i, name in enumerate(names[:-1])}
    if LEAVE_ONE_OUT in families:
        arms |= {f"no-{name}": set(names) - {name} for name in names}
    arms[FULL] = set(names)
    distinct: dict[frozenset[str], str] = {}
    for name, used in arms.items():
        distinct.setdefault(frozenset(used), name)  # no-dynamic-sampling is the same arm as the last rung but one
    return [Arm(name, _overrides(config, used)) for used, name in distinct.items()]


def _overrides(config: Config, used: Iterable[str]) -> tuple[str, ...]:
    """Return the options of the arm with these techniques that differ from the recipe."""
    options: dict[str, Any] = {}
    for technique in TECHNIQUES:
        options |= (technique.on if technique.name in used else technique.off)(config)
    return as_overrides(options, config)


def as_overrides(options: Mapping[str, Any], config: Config) -> tuple[str, ...]:
    """Return options as KEY=VALUE, leaving out those whose value `config` already has."""
    return tuple(f"{key}={_yaml(value)}" for key, value in options.items() if config.option(key) != value)


def _yaml(value: Any) -> str:
    """Return a value on one line, as an override has it."""
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, allow_unicode=True, width=math.inf)
    return text.removesuffix("...\n").strip()


def own_arm(text: str) -> Arm:
    """Return the arm given as 'NAME: KEY=VALUE KEY=VALUE'."""
    name, _, options = text.partition(":")
    try:
        overrides = tuple(shlex.split(options))
    except ValueError as error:
        raise ConfigError(f"--arm '{text}': cannot be split into options ({error})") from None
    if wrong := [override for override in overrides if "=" not in override]:
        raise ConfigError(
            f"--arm '{text}': '{wrong[0]}' is not KEY=VALUE; put quotes around a value that contains spaces, such as "
            'data.train="{path: train.jsonl, size: 400}"'
        )
    return Arm(name.strip(), overrides)


def published_arm(config: Config, name: str) -> Arm:
    """Return an arm of the ladder or of leave-one-out by its name."""
    known = {arm.name: arm for family in (LADDER, LEAVE_ONE_OUT) for arm in published_arms(config, [family])}
    if name not in known:
        raise ConfigError(
            f"--arm '{name}': expected 'NAME: KEY=VALUE ...', for example 'hot: optim.lr=1e-5', or one of "
            f"{', '.join(known)}{did_you_mean(name, known)}"
        )
    return known[name]


def arms_from_file(path: Path) -> list[Arm]:
    """Read arms from YAML: names with their options, nested or dotted, such as `hot: {optim.lr: 1e-5}`."""
    arms = []
    for name, options in parse_yaml(read_text(path, "YAML"), str(path), "arms such as `hot: {optim.lr: 1e-5}`").items():
        if not isinstance(options, dict):
            raise ConfigError(f"{path}: arm '{name}' is {options!r}; expected options, such as {{optim.lr: 1e-5}}")
        arms.append(Arm(str(name), tuple(f"{key}={_yaml(value)}" for key, value in _flat(options))))
    return arms


def _flat(options: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    names = option_names()
    for key, value in options.items():
        if isinstance(value, dict) and f"{prefix}{key}" not in names:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def collect_arms(config: Config, families: Sequence[str], given: Sequence[str]) -> tuple[list[Arm], str]:
    """Return the arms of --arms and --arm, and the name of the reference, with which the others are compared.

    The ladder is the default. Without a published arm, the unchanged recipe is the reference instead of `full`.
    """
    families = families or (() if given else (LADDER,))
    published = [each for each in families if each in (LADDER, LEAVE_ONE_OUT)]
    arms, own = published_arms(config, published) if published else [], []
    for each in families:
        if each not in published:
            if not Path(each).is_file():
                hint = did_you_mean(each, [LADDER, LEAVE_ONE_OUT])
                raise ConfigError(f"--arms '{each}': is neither {LADDER}, {LEAVE_ONE_OUT} nor a file{hint}")
            own += arms_from_file(Path(each))
    named = list(dict.fromkeys(text for text in given if ":" not in text))
    own += [own_arm(text) for text in given if text not in named]
    _check_names(own)
    own = [_with_options_of_loss(arm, config) for arm in own]
    listed = [arm.name for arm in arms]
    arms += [*(published_arm(config, text) for text in named if text not in listed), *own]
    reference = FULL if published or named else RECIPE
    if reference not in [arm.name for arm in arms]:
        arms.append(published_arm(config, FULL) if reference == FULL else Arm(RECIPE))
    _check(arms)
    return arms, reference


def _with_options_of_loss(arm: Arm, config: Config) -> Arm:
    """Add what the name of the arm's loss sets, where the recipe gives the value of its own loss instead.

    Without this, an arm `algorithm.loss=gspo` would clip at the recipe's 0.2, or be refused for its `loss_agg_mode`.
    """
    recipe, given = config.algorithm, dict[str, Any]()
    try:
        for key, _, value in (override.partition("=") for override in arm.overrides):
            if key in _LOSS_OPTIONS:
                given[key.removeprefix("algorithm.")] = parse_yaml(f"value: {value}", arm.name)["value"]
        wanted = AlgorithmConfig.model_validate(given)
    except ValueError:  # a bad value is reported when the arm is loaded
        return arm
    if "loss" not in given or wanted.loss == recipe.loss or wanted.loss not in LOSS_SETTINGS:
        return arm
    names = {*CLIP_BOUNDS, *LOSS_SETTINGS.get(recipe.loss, {}), *LOSS_SETTINGS[wanted.loss]}
    replaced = sorted(names & recipe.model_fields_set - given.keys())
    added = {f"algorithm.{name}": getattr(wanted, name) for name in replaced}
    return Arm(arm.name, (*arm.overrides, *as_overrides(added, config)))


def _check_names(own: Iterable[Arm]) -> None:
    for arm in own:
        if arm.name in PUBLISHED:
            raise ConfigError(f"arm '{arm.name}': a published arm has this name; give yours another")
        if arm.name == RECIPE and arm.overrides:
            raise ConfigError(
                f"arm '{RECIPE}': this is the name of the unchanged recipe; give the arm with "
                f"{arm.overrides[0].partition('=')[0]} another name"
            )
        try:
            length = len(arm.name.encode())
        except UnicodeEncodeError:  # from the command line, where bytes that are not UTF-8 become half surrogates
            raise ConfigError(f"arm {arm.name!a}: the name is not valid UTF-8; choose another name") from None
        if not arm.name or arm.name.startswith(".") or set(arm.name) & set("/\\\0"):
            raise ConfigError(
                f"arm '{arm.name}': the name becomes that of a folder, so it cannot be empty, start with a dot or "
                "contain a slash; choose another name"
            )
        if length > _LONGEST_NAME:
            raise ConfigError(
                f"arm '{arm.name[:40]}...': the name becomes that of a folder, but has {length} bytes; choose one of "
                f"at most {_LONGEST_NAME}"
            )


def _check(arms: Sequence[Arm]) -> None:
    names, options = [arm.name for arm in arms], option_names()
    for arm in arms:
        if names.count(arm.name) > 1:
            raise ConfigError(f"arm '{arm.name}': two arms have this name; give each its own")
        if alike := [name for name in names if name != arm.name and name.casefold() == arm.name.casefold()]:
            raise ConfigError(
                f"arm '{arm.name}': differs from '{alike[0]}' only in case, and some disks would give both the same "
                "folder; choose another name"
            )
        keys = [override.partition("=")[0] for override in arm.overrides]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise ConfigError(f"arm '{arm.name}': {twice[0]} is given twice; give it one value")
        for key in keys:
            if f"{key}.".startswith(_SHARED):
                raise ConfigError(
                    f"arm '{arm.name}': {key} is the same for all arms, so that they can be compared; give it once, "
                    "for the whole ablation"
                )
            if members := [name for name in options if name.startswith(f"{key}.")]:
                raise ConfigError(
                    f"arm '{arm.name}': {key} is a section; give its options one by one, such as {members[0]}=..."
                )
    if len(arms) < 2:
        raise ConfigError(f"there is only one arm, '{names[0]}'; name another to compare it with")
