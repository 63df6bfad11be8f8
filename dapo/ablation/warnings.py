"""Warnings about an ablation before its first run: arms that train identically, and results that could mislead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations

from dapo.ablation.arms import PUBLISHED
from dapo.ablation.plan import Plan, by_arms
from dapo.ablation.results import LEVEL
from dapo.algorithm.crossed import clearest_needed
from dapo.algorithm.loss import LOSSES
from dapo.config import Config
from dapo.config.training_options import LOSS_SETTINGS

_CLIPS = {"algorithm.clip_ratio_low", "algorithm.clip_ratio_high", "algorithm.clip_ratio_c"}
_AT_RATIO_ONE = {"clip": "", "loss": ", where these losses have the same gradient"}
# Options, by the start of their names, that are read only under a condition.
_READ_IF: dict[str, Callable[[Config], bool]] = {
    "algorithm.ledger.explore": lambda config: config.algorithm.ledger.enable,
    "algorithm.max_staleness": lambda config: _may_leave_groups_over(config),
    "algorithm.filter_groups.metric": lambda config: config.algorithm.filter_groups.enable,
    "algorithm.filter_groups.max_num_gen_batches": lambda config: _may_fall_short(config),
    "algorithm.filter_groups.on_exhausted": lambda config: _may_fall_short(config),
    "algorithm.filter_groups.min_batch_ratio": lambda config: (
        _may_fall_short(config) and config.algorithm.filter_groups.on_exhausted in ("skip", "pad")
    ),
    "environment.": lambda config: config.environment.use is not None,
    "model.lora.alpha": lambda config: config.model.lora.rank > 0,
    "model.lora.target_modules": lambda config: config.model.lora.rank > 0,
    "reward.overlong_buffer.": lambda config: config.reward.length_shaping == "buffer",
    "reward.target_length": lambda config: config.reward.length_shaping == "target",
}
# Options of which different values can stand for the same: what each value stands for.
_MEANINGS: dict[str, Callable[[Config], object]] = {
    "algorithm.importance_correction": lambda config: _correction(config),
    "algorithm.loss": lambda config: LOSSES.get(config.algorithm.loss, config.algorithm.loss),
    "data.gen_batch_size": lambda config: (
        config.gen_batch_size,
        config.largest_round if config.algorithm.max_staleness > 0 else None,
    ),
    "optim.ppo_mini_batch_size": lambda config: config.mini_batch_size,
}
# Options of memory, speed and safety. They may change the order of sums, and so their rounding.
_COSTS = {
    "algorithm.max_logprob_gap", "cluster.max_restarts", "cluster.offload", "cluster.timeout", "environment.workers",
    "optim.max_tokens_per_micro_batch", "optim.recompute_activations", "reward.code_unsafe", "reward.workers",
}  # fmt: skip
_UNREAD = "which neither reads"
_SAME_MEANING = "whose values mean the same here"
_COST = "with an effect only on memory, speed or safety"
_NO_GAP = "which has nothing to correct, because every response is sampled with the weights that are then trained"
_ROUNDED = {_COST, _NO_GAP}  # reasons that hold up to rounding

# Options that decide how an arm is evaluated: on which questions, with which limits, and by which judge.
_EVALUATING = {
    "data.chat_template_kwargs", "data.deduplicate", "data.max_prompt_length", "data.max_response_length",
    "environment.max_turn_tokens", "environment.max_turns", "environment.memory_gb", "environment.timeout",
    "environment.use", "reward.code_score", "reward.extract", "reward.memory_gb", "reward.regex", "reward.think_tags",
    "reward.threshold", "reward.timeout", "reward.use", "rollout.engine", "rollout.stop", "rollout.vllm",
}  # fmt: skip

# Options that the published arms keep from the recipe, and the values that the paper has: with a technique and without.
_PAPER: dict[str, tuple[object, ...]] = {
    "algorithm.adv_norm": ("std",),
    "algorithm.advantage": (None,),
    "algorithm.filter_groups.function": (None,),
    "algorithm.kl_loss_coef": (0.0,),
    "algorithm.kl_reward_coef": (0.0,),
    "algorithm.loss_agg_mode": ("token-mean", "seq-mean-token-mean"),
    "reward.length_shaping": ("buffer", "none"),
}

_FEW_SEEDS, _ENOUGH_SEEDS = 3, 5


def warnings(plan: Plan) -> Iterator[str]:
    """Yield warnings before the first run: arms that train identically, and seeds too few to show anything."""
    configs = {run.arm: run.config for run in plan.runs if run.seed == plan.runs[0].seed}
    first = {arm.name: configs[arm.name] for arm in plan.arms}
    for (one, config), (other, changed) in combinations(first.items(), 2):
        if same := _sameness(config, changed):
            yield f"{one} and {other} {same}"
    yield from _unlike_the_paper(first)
    reference = first[plan.reference]
    for name, config in first.items():
        differing = _EVALUATING & config.differences(reference).keys()
        if read := sorted(option for option in differing if _reads(config, option) or _reads(reference, option)):
            yield (
                f"{name} is evaluated differently from {plan.reference} ({', '.join(read)}), so a difference between "
                "them mixes what was learned with how it is measured"
            )
    if plan.config.eval.every == 0:
        yield (
            "eval.every is 0, so each run is evaluated only before and after training; comparisons at equal seconds "
            "or tokens then assume a straight line between the two"
        )
    yield from _few_seeds(plan)


def _unlike_the_paper(arms: Mapping[str, Config]) -> Iterator[str]:
    """Yield how published arms differ from those of their name in the paper."""
    found: dict[str, list[str]] = {}
    for name in (name for name in arms if name in PUBLISHED):
        for option, values in _PAPER.items():
            value = arms[name].option(option)
            if value not in values:
                paper = "null" if values[0] is None else values[0]
                sentence = f"{option} is {value}, as in the recipe; the published arm of this name has {paper}"
                found.setdefault(sentence, []).append(name)
    yield from by_arms(found, len(arms))


def _few_seeds(plan: Plan) -> Iterator[str]:
    """Yield what the plan's number of seeds cannot show."""
    seeds, comparisons = len(plan.seeds), len(plan.arms) - 1
    if seeds == 1:
        yield (
            "with one seed, no arm is called better or worse: the intervals cover the choice of questions, but not the "
            f"differences between seeds; --seeds {_ENOUGH_SEEDS} covers both"
        )
    elif seeds <= _FEW_SEEDS:
        needed, enough = (clearest_needed(count, comparisons, LEVEL) for count in (seeds, _ENOUGH_SEEDS))
        among = f"{comparisons} comparison{'s' * (comparisons != 1)}"
        yield (
            f"with {seeds} seeds and {among}, no arm is called better or worse unless the clearest difference is more "
            f"than {needed:.1f} times its standard error; with --seeds {_ENOUGH_SEEDS} it is {enough:.1f} times"
        )


def _sameness(one: Config, other: Config) -> str | None:
    """Say why two arms train identically, or return None if they may differ."""
    options = sorted(one.differences(other).keys() - {"run.name"})
    if not options:
        return "have the same options, so they will train identically"
    reasons: dict[str | None, list[str]] = {}
    for option in options:
        reasons.setdefault(_why_idle(option, one, other), []).append(option)
    acting = set(reasons.pop(None, ()))
    found = f"will train identically{'' if _ROUNDED.isdisjoint(reasons) else ' up to rounding'}"
    if not acting:
        parts = [f"{', '.join(members)}, {why}" for why, members in reasons.items()]
        return f"{found}: they differ only in {'; and in '.join(parts)}"
    if acting <= _CLIPS | {"algorithm.loss"} and _is_clip_idle(one) and _is_clip_idle(other):
        what = "loss" if "algorithm.loss" in acting else "clip"
        return (
            f"{found}: only the {what} differs, and with one update per batch every importance ratio is "
            f"1{_AT_RATIO_ONE[what]}; set optim.ppo_mini_batch_size below data.train_batch_size, or raise "
            "optim.ppo_epochs"
        )
    return None


def _why_idle(option: str, one: Config, other: Config) -> str | None:
    """Say why an option does not make these arms differ, or return None if it may."""
    if not (_reads(one, option) or _reads(other, option)):
        return _UNREAD
    if (meaning := _MEANINGS.get(option)) and meaning(one) == meaning(other):
        return _SAME_MEANING
    if option in _COSTS:
        return _COST
    if option == "algorithm.importance_correction" and _is_on_policy(one) and _is_on_policy(other):
        return _NO_GAP
    return None


def _reads(config: Config, option: str) -> bool:
    """Return whether a run reads the option."""
    return all(reads(config) for name, reads in _READ_IF.items() if option.startswith(name))


def _is_clip_idle(config: Config) -> bool:
    """Return whether every ratio is 1, where all the named losses have the gradient -A of each token."""
    return _has_ratio_one(config) and config.algorithm.loss in LOSS_SETTINGS


def _has_ratio_one(config: Config) -> bool:
    """Return whether each step makes one update, and with the weights to which its ratios compare, so that they are 1.

    An importance correction compares with the weights at the start of the step, otherwise it is those that sampled.
    """
    # In flight a batch may grow, and then take more updates.
    if config.mini_batch_size < config.data.train_batch_size or config.optim.ppo_epochs > 1:
        return False
    return config.rollout.mode == "strict" and (_correction(config) != "none" or _is_on_policy(config))


def _correction(config: Config) -> str:
    asked = config.algorithm.importance_correction
    return asked if asked != "auto" else "token-truncated" if config.uses_vllm else "none"


def _is_on_policy(config: Config) -> bool:
    """Return whether the embedded engine samples every response with the weights at the start of its training step."""
    carries = config.algorithm.max_staleness > 0 and (
        _replaces_groups(config) or config.gen_batch_size > config.data.train_batch_size
    )
    return config.rollout.mode == "strict" and not carries and not config.uses_vllm


# Groups that could not be judged are not considered below: they, too, are replaced, and may leave a surplus.


def _replaces_groups(config: Config) -> bool:
    """Return whether more groups are sampled in place of those that are dropped."""
    rule = config.algorithm.filter_groups
    has_rounds = rule.max_num_gen_batches != 1 or rule.on_exhausted == "skip"
    return rule.enable or (config.algorithm.overlong_filter and has_rounds)


def _may_leave_groups_over(config: Config) -> bool:
    """Return whether a step may sample more groups than its batch takes."""
    is_one_round = config.gen_batch_size == config.data.train_batch_size
    return config.rollout.mode != "strict" or not is_one_round or _replaces_groups(config)


def _may_fall_short(config: Config) -> bool:
    """Return whether the limit of a step's groups may leave its batch smaller than data.train_batch_size."""
    algorithm, limit = config.algorithm, config.algorithm.filter_groups.max_num_gen_batches
    drops = algorithm.filter_groups.enable or algorithm.overlong_filter
    is_limited = 0 < limit * config.gen_batch_size < config.data.train_batch_size
    return config.rollout.mode != "strict" or drops or is_limited
