"""Conversions from values of verl's options that need more than a name; verl.txt says which option needs which."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dapo.config.migration.conversions import (
    SKIP,
    Conversion,
    NoCounterpart,
    Theirs,
    Written,
    choice,
    named_sets,
    null_skips,
    run_name,
    same,
    skip,
    trackers,
)

_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"
_LOSSES = {"vanilla": "dapo", "gspo": "gspo", "cispo": "cispo", "sapo": "sapo", "geo_mean": "gmpo"}
_loss_agg_mode = choice(
    token_mean="token-mean",
    seq_mean_token_sum="seq-mean-token-sum",
    seq_mean_token_mean="seq-mean-token-mean",
    seq_mean_token_sum_norm=Written(
        "seq-mean-token-sum", "without the normalizer the gradient is larger by it, so grad_clip acts differently"
    ),
)


def _train_files(value: Any, theirs: Theirs) -> Any:
    paths = value if isinstance(value, list) else [value]
    size = theirs.get("data.train_max_samples") or -1
    if len(paths) > 1:
        return paths
    return {"path": paths[0], "size": size} if size > 0 else paths[0]


def _train_samples(value: Any, theirs: Theirs) -> Any:
    files = theirs.get("data.train_files")
    if value in (None, -1) or not isinstance(files, list) or len(files) < 2:
        return SKIP
    raise NoCounterpart


def _val_files(value: Any, theirs: Theirs) -> Any:
    return named_sets(value) if isinstance(value, list) else value


def _overlong_prompts(value: Any, theirs: Theirs) -> Any:
    return "raise" if not value and theirs.get("data.truncation") == "error" else "drop"


def _evaluates(theirs: Theirs) -> bool:
    return "data.val_files" in theirs and (theirs["trainer.test_freq"] > 0 or theirs["trainer.val_before_train"])


def _before_training(value: Any, theirs: Theirs) -> Any:
    if value or not _evaluates(theirs):
        return SKIP
    raise NoCounterpart


def _mini_batch(value: Any, theirs: Theirs) -> Any:
    batch = theirs["data.train_batch_size"]
    return Written(batch, f"reduced to data.train_batch_size, {batch}") if value > batch else value


def _learners(value: Any, theirs: Theirs) -> int:
    return value * (theirs.get("trainer.nnodes") or 1)


def _offload(value: Any, theirs: Theirs) -> Any:
    is_on = theirs.get(f"{_ACTOR}.fsdp_config.optimizer_offload") or value
    learners = _learners(theirs.get("trainer.n_gpus_per_node") or 1, theirs)
    if is_on and learners == 1:
        raise NoCounterpart
    return bool(is_on) if learners > 1 else SKIP


def _warmup(value: Any, theirs: Theirs) -> Any:
    ratio, steps = theirs[f"{_ACTOR}.optim.lr_warmup_steps_ratio"], theirs["trainer.total_training_steps"]
    if (value is not None and value > 0) or not ratio:
        return max(value or 0, 0)
    if steps is None:
        raise NoCounterpart(f"a warm-up of {ratio} of all steps needs their number; set optim.warmup_steps")
    return int(ratio * steps)


def _kl_type(value: Any, theirs: Theirs) -> Any:
    if theirs[f"{_ACTOR}.use_kl_loss"] and value not in ("low_var_kl", "k3"):
        raise NoCounterpart
    return SKIP


def _correction(value: Any, theirs: Theirs) -> Any:
    if value is None:
        return SKIP
    if theirs[f"{_CORRECTION}.bypass_mode"]:  # verl leaves the weights out, because the ratio holds them already
        return "none"
    how = "masked" if "_" in str(theirs[f"{_CORRECTION}.rollout_is_threshold"]) else "truncated"
    return choice(token=f"token-{how}", sequence=f"sequence-{how}")(value, theirs)


def _is_corrected(theirs: Theirs) -> bool:
    return theirs[f"{_CORRECTION}.rollout_is"] is not None and not theirs[f"{_CORRECTION}.bypass_mode"]


def _correction_bounds(value: Any, theirs: Theirs) -> Any:
    if _is_corrected(theirs) and [float(bound) for bound in str(value).split("_")] not in ([2.0], [0.5, 2.0]):
        raise NoCounterpart
    return SKIP


def _correction_only_off(value: Any, theirs: Theirs) -> Any:
    if _is_corrected(theirs) and value:
        raise NoCounterpart
    return SKIP


def _bypass_loss(value: Any, theirs: Theirs) -> Any:
    if theirs[f"{_CORRECTION}.bypass_mode"] and value != "ppo_clip":
        raise NoCounterpart
    return SKIP


def _filter_metric(value: Any, theirs: Theirs) -> Any:
    if not theirs["algorithm.filter_groups.enable"] or value is None:
        return SKIP
    has_kl = theirs["algorithm.use_kl_in_reward"]
    return "seq_reward" if value == "reward" or (value == "seq_final_reward" and not has_kl) else value


def _reward_file(value: Any, theirs: Theirs) -> Any:
    if value is None:
        return SKIP
    return f"{os.path.expanduser(value)}:{theirs.get('custom_reward_function.name') or 'compute_score'}"


def _reward_manager(value: Any, theirs: Theirs) -> Any:
    is_replaced = theirs.get("custom_reward_function.path") or theirs.get("reward_model.enable")
    if value not in ("naive", "dapo", None):
        raise NoCounterpart
    return "math_dapo" if value == "dapo" and not is_replaced else SKIP


def _reward_model(value: Any, theirs: Theirs) -> Any:
    if not value or not theirs["reward_model.enable"]:
        return SKIP
    if theirs.get("custom_reward_function.path"):
        raise NoCounterpart("the reward function is used alone; reward.use may also map both to weights")
    return f"model:{value}"


def _epochs(value: Any, theirs: Theirs) -> Any:
    return SKIP if theirs["trainer.total_training_steps"] else float(value)


def _loss(theirs: Theirs) -> str:
    """Return our loss; dapo stands in for one that we lack."""
    return _LOSSES.get(theirs[f"{_ACTOR}.policy_loss.loss_mode"], "dapo")


def _aggregation(value: Any, theirs: Theirs) -> Any:
    loss, mode = _loss(theirs), str(value)
    if loss == "cispo" and mode != "token-mean":
        raise NoCounterpart("`algorithm.loss: cispo` is always token-mean")
    return _loss_agg_mode(value, theirs) if loss in ("dapo", "cispo") else SKIP  # verl ignores it in the others


def _clip_side(value: Any, theirs: Theirs) -> Any:
    if _loss(theirs) == "sapo":
        return SKIP
    return theirs.get(f"{_ACTOR}.clip_ratio", 0.2) if value is None else value


CONVERSIONS: Mapping[str, Conversion] = {
    "same": same,
    "skip": skip,
    "null_skips": null_skips,
    "train_files": _train_files,
    "train_samples": _train_samples,
    "val_files": _val_files,
    "zero_if_null": lambda value, theirs: value or 0,
    "overlong_prompts": _overlong_prompts,
    "seed": null_skips,
    "modules": lambda value, theirs: value if isinstance(value, list) or value == "all-linear" else [value],
    "recompute": lambda value, theirs: "auto" if value else "never",
    "mini_batch": _mini_batch,
    "micro_batch_tokens": lambda value, theirs: value if theirs[f"{_ACTOR}.use_dynamic_bsz"] else SKIP,
    "clip_ratio_side": _clip_side,
    "loss_agg_mode": _aggregation,
    "loss_mode": choice(**_LOSSES),
    "clip_ratio_c": lambda value, theirs: value if _loss(theirs) == "dapo" else SKIP,
    "lr_schedule": choice(constant="constant", none="constant", cosine="cosine"),
    "prompt_key": lambda value, theirs: SKIP if value == "prompt" else {"prompt": value},
    "kl_loss": lambda value, theirs: value if theirs[f"{_ACTOR}.use_kl_loss"] else 0.0,
    "kl_type": _kl_type,
    "warmup": _warmup,
    "offload": _offload,
    "before_training": _before_training,
    "eval_k": lambda value, theirs: value if _evaluates(theirs) else 0,
    "eval_only": lambda value, theirs: value if _evaluates(theirs) else SKIP,
    "top_k": lambda value, theirs: max(value, 0) if _evaluates(theirs) else SKIP,
    "adv_norm": lambda value, theirs: "std" if value else "none",
    "kl_reward": lambda value, theirs: value if theirs["algorithm.use_kl_in_reward"] else 0.0,
    "correction": _correction,
    "correction_bounds": _correction_bounds,
    "correction_only_off": _correction_only_off,
    "bypass_loss": _bypass_loss,
    "filter_metric": _filter_metric,
    "filter_rounds": lambda value, theirs: value if theirs["algorithm.filter_groups.enable"] else SKIP,
    "reward_file": _reward_file,
    "reward_manager": _reward_manager,
    "reward_model": _reward_model,
    "length_shaping": lambda value, theirs: "buffer" if value else "none",
    "epochs": _epochs,
    "steps": null_skips,
    "run_name": run_name,
    "trackers": trackers,
    "learners": _learners,
    "every": lambda value, theirs: max(value, 0),
}

# What verl always does, and dapo does only if it is told so: option -> (value, reason).
ALWAYS: Mapping[str, tuple[Any, str]] = {
    "algorithm.max_staleness": (0, "verl drops groups beyond the batch; 1 (our default) uses them in the next step"),
}
