"""Conversions from values of TRL's options that need more than a name; trl.txt says which option needs which.

TRL generates for `steps_per_generation` backward passes at once, and makes an update after every
`gradient_accumulation_steps` of them; per_device_train_batch_size counts the responses of one pass on one device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from dapo.config.migration.conversions import (
    SKIP,
    Conversion,
    NoCounterpart,
    Theirs,
    Written,
    choice,
    null_skips,
    run_name,
    same,
    skip,
    trackers,
)


def _passes(theirs: Theirs) -> int:
    """Return the backward passes over one batch that is sampled with the same weights."""
    at_once = theirs["per_device_train_batch_size"] * theirs["num_processes"]
    accumulated = theirs["gradient_accumulation_steps"]
    generated = theirs["generation_batch_size"]
    passes = theirs["steps_per_generation"] or (generated // at_once if generated else accumulated)
    return max(passes, accumulated)


def _prompts(passes: int, theirs: Theirs) -> int:
    responses = theirs["per_device_train_batch_size"] * theirs["num_processes"] * passes
    n = theirs["num_generations"]
    if responses % n:
        raise NoCounterpart(f"{responses} responses are not whole groups of {n}")
    return responses // n


def _in_steps(updates: float, theirs: Theirs) -> int:
    """Return the steps that make at least this many updates."""
    per_step = Fraction(_passes(theirs), theirs["gradient_accumulation_steps"]) * theirs["num_iterations"]
    return math.ceil(updates / per_step)


def _steps(value: Any, theirs: Theirs) -> Any:
    return _in_steps(value, theirs) if value > 0 else SKIP


def _epochs(value: Any, theirs: Theirs) -> Any:
    return SKIP if theirs["max_steps"] > 0 else float(value)


def _warmup(value: Any, theirs: Theirs) -> Any:
    if not 0 < value < 1:
        return _in_steps(value, theirs)
    if theirs["max_steps"] <= 0:
        raise NoCounterpart(f"a warm-up of {value} of all steps needs their number; set optim.warmup_steps")
    return _in_steps(value * theirs["max_steps"], theirs)


def _save_steps(value: Any, theirs: Theirs) -> Any:
    strategy = theirs.get("save_strategy", "steps")
    if strategy in ("no", False):  # YAML reads no as false
        return 0
    if strategy != "steps" or value < 1:
        raise NoCounterpart("run.save_every is a number of steps")
    return _in_steps(value, theirs)


def _eval_steps(value: Any, theirs: Theirs) -> Any:
    if theirs["eval_strategy"] != "steps" or value is None:
        return SKIP
    if value < 1:
        raise NoCounterpart("eval.every is a number of steps")
    return _in_steps(value, theirs)


def _eval_strategy(value: Any, theirs: Theirs) -> Any:
    if value in ("no", False, "steps"):
        return SKIP
    raise NoCounterpart("evaluations are counted in steps; set eval.every")


def _eval_k(value: Any, theirs: Theirs) -> Any:
    return SKIP if theirs["eval_strategy"] in ("no", False) else value or theirs["num_generations"]


def _source(path: str, name: str | None, split: str, is_training: bool = True) -> Any:
    params = {key: text for key, text in (("name", name), ("split", split)) if text}
    if is_training and split == "train":
        params.pop("split")
    return {"path": path, "params": params} if params else path


def _dataset(value: Any, theirs: Theirs) -> Any:
    return _source(value, theirs["dataset_config"], theirs["dataset_train_split"])


def _test_split(value: Any, theirs: Theirs) -> Any:
    if theirs["eval_strategy"] in ("no", False) or not theirs.get("dataset_name"):
        return SKIP
    return {value: _source(theirs["dataset_name"], theirs["dataset_config"], value, is_training=False)}


def _datasets(value: Any, theirs: Theirs) -> Any:
    if not isinstance(value, list) or not all(isinstance(each, dict) and "path" in each for each in value):
        raise NoCounterpart
    return [_source(each["path"], each.get("name"), each.get("split", "train")) for each in value]


def _reward_funcs(value: Any, theirs: Theirs) -> Any:
    model = theirs["reward_model_name_or_path"]
    names = value if isinstance(value, list) else [value]
    judges = [f"model:{model}"] * bool(model) + [_judge(str(name)) for name in names if name is not None]
    weights = theirs["reward_weights"] or [1.0] * len(judges)
    if len(weights) != len(judges):
        raise NoCounterpart(f"{len(weights)} weights for {len(judges)} reward functions")
    if not judges:
        return SKIP
    return judges[0] if len(judges) == 1 else dict(zip(judges, map(float, weights), strict=True))


def _judge(name: str) -> str:
    """Return the judge for a reward function of `trl grpo`: a name in trl.rewards, or an import path from here."""
    name = name.removeprefix("trl.rewards.")
    if name in ("accuracy_reward", "reasoning_accuracy_reward"):
        return "math"
    if ".py:" in name:
        return name
    module, dot, function = name.rpartition(".")
    if not dot:
        raise NoCounterpart(f"import {function} in a file of your own, and set reward.use to file.py:{function}")
    return f"{module.replace('.', '/')}.py:{function}"


def _reward_model(value: Any, theirs: Theirs) -> Any:
    return f"model:{value}" if value and not theirs.get("reward_funcs") else SKIP


def _lora_dropout(value: Any, theirs: Theirs) -> Any:
    if theirs["use_peft"] and value:
        raise NoCounterpart
    return SKIP


def _lora_targets(value: Any, theirs: Theirs) -> Any:
    if not theirs["use_peft"]:
        return SKIP
    if value is None:
        raise NoCounterpart("PEFT chooses the layers by the kind of model, dapo adapts all linear layers; name them")
    if value in ("all-linear", ["all-linear"]):
        return "all-linear"
    return value if isinstance(value, list) else [value]


_correction_mode = choice(
    token_truncate="token-truncated",
    token_mask="token-masked",
    sequence_truncate="sequence-truncated",
    sequence_mask="sequence-masked",
)


def _is_corrected(theirs: Theirs) -> bool:
    return bool(theirs["use_vllm"] and theirs["vllm_importance_sampling_correction"])


def _correction(value: Any, theirs: Theirs) -> Any:
    if not theirs["use_vllm"]:
        return SKIP
    return _correction_mode(value, theirs) if _is_corrected(theirs) else "none"


def _correction_max(value: Any, theirs: Theirs) -> Any:
    if _is_corrected(theirs) and value != 2:
        raise NoCounterpart
    return SKIP


def _correction_min(value: Any, theirs: Theirs) -> Any:
    ours = 0.5 if theirs["vllm_importance_sampling_mode"].endswith("mask") else 0
    if _is_corrected(theirs) and (value or 0) != ours:
        raise NoCounterpart
    return SKIP


def _is_gspo(theirs: Theirs) -> bool:
    return theirs["importance_sampling_level"] == "sequence" and theirs["loss_type"] == "grpo"


def _ratio_level(value: Any, theirs: Theirs) -> Any:
    if value == "token":
        return SKIP
    if not _is_gspo(theirs):
        raise NoCounterpart
    return "gspo"


def _delta(value: Any, theirs: Theirs) -> Any:
    if value is not None and _is_gspo(theirs):
        raise NoCounterpart
    return _epsilon(value, theirs)  # TRL's other losses ignore it, too


def _kl_correction(value: Any, theirs: Theirs) -> Any:
    if theirs["beta"] and value:
        raise NoCounterpart
    return SKIP


def _weight_decay(value: Any, theirs: Theirs) -> Any:
    is_other = value and not theirs["use_peft"]  # adapters have neither biases nor norms
    return Written(value, "biases and norms decay, too; in TRL they do not") if is_other else value


def _optimizer(value: Any, theirs: Theirs) -> Any:
    if value not in ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla"):
        raise NoCounterpart
    return SKIP


def _epsilon(value: Any, theirs: Theirs) -> Any:
    return SKIP if theirs["loss_type"] in ("cispo", "sapo") else value


def _epsilon_high(value: Any, theirs: Theirs) -> Any:
    if theirs["loss_type"] == "sapo":
        return SKIP
    high = theirs["epsilon"] if value is None else value
    return high - 1 if theirs["loss_type"] == "cispo" else high  # there the ratio is at most epsilon_high


def _sapo_temperature(ours: float) -> Conversion:
    def convert(value: Any, theirs: Theirs) -> Any:
        if theirs["loss_type"] == "sapo" and value != ours:
            raise NoCounterpart
        return SKIP

    return convert


CONVERSIONS: Mapping[str, Conversion] = {
    "same": same,
    "skip": skip,
    "null_skips": null_skips,
    "dtype": choice(auto="auto", none="auto", float32="float32", bfloat16="bfloat16"),
    "lora_r": lambda value, theirs: value if theirs["use_peft"] else 0,
    "lora_only": lambda value, theirs: value if theirs["use_peft"] else SKIP,
    "lora_dropout": _lora_dropout,
    "lora_targets": _lora_targets,
    "dataset": _dataset,
    "test_split": _test_split,
    "datasets": _datasets,
    "reward_funcs": _reward_funcs,
    "reward_model": _reward_model,
    "batch": lambda value, theirs: _prompts(_passes(theirs), theirs),
    "mini_batch": lambda value, theirs: _prompts(value, theirs),
    "epochs": _epochs,
    "steps": _steps,
    "loss_type": choice(
        dapo="token-mean",
        bnpo="token-mean",
        grpo="seq-mean-token-mean",
        dr_grpo=Written(
            "seq-mean-token-sum",
            "without the division by max_completion_length the gradient is larger, so grad_clip acts differently",
        ),
        cispo=Written("token-mean", also={"algorithm.loss": "cispo"}),
        sapo=Written("seq-mean-token-mean", also={"algorithm.loss": "sapo"}),
    ),
    "epsilon": _epsilon,
    "sapo_temperature_pos": _sapo_temperature(1.0),
    "sapo_temperature_neg": _sapo_temperature(1.05),
    "lr_schedule": choice(
        linear="linear", cosine="cosine", constant="constant", constant_with_warmup="constant", none="linear"
    ),
    "epsilon_high": _epsilon_high,
    "delta": _delta,
    "ratio_level": _ratio_level,
    "use_vllm": lambda value, theirs: "vllm" if value else SKIP,
    "vllm_only": lambda value, theirs: value if theirs["use_vllm"] else SKIP,
    "correction": _correction,
    "correction_max": _correction_max,
    "correction_min": _correction_min,
    "kl_correction": _kl_correction,
    "scale_rewards": choice(group="std", true="std", none="none", false="none"),
    "warmup": _warmup,
    "warmup_ratio": _warmup,
    "betas": lambda value, theirs: [value, theirs["adam_beta2"]],
    "weight_decay": _weight_decay,
    "optimizer": _optimizer,
    "recompute": lambda value, theirs: "auto" if value else "never",
    "output_dir": lambda value, theirs: SKIP if theirs.get("run_name") else run_name(value, theirs),
    "run_name": run_name,
    "trackers": trackers,
    "save_steps": _save_steps,
    "eval_strategy": _eval_strategy,
    "eval_steps": _eval_steps,
    "eval_k": _eval_k,
    "use_cpu": lambda value, theirs: "cpu" if value else SKIP,
}

# What TRL always does, and dapo does only if it is told so: option -> (value, reason).
ALWAYS: Mapping[str, tuple[Any, str]] = {
    "algorithm.filter_groups.enable": (False, "TRL has no dynamic sampling; true (our default) turns it on"),
}
