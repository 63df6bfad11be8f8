"""What is said of an ablation before its first run: arms that train identically, and results that could mislead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

from dapo.ablation.plan import Plan
from dapo.config import Config
from dapo.config.training_options import LOSS_SETTINGS

_CLIPS = {"algorithm.clip_ratio_low", "algorithm.clip_ratio_high", "algorithm.clip_ratio_c"}
_AT_RATIO_ONE = {"clip": "", "loss": ", where these losses have the same gradient"}
# Options, by the start of their names, that are read only under a condition.
_READ_IF: dict[str, Callable[[Config], bool]] = {
    "algorithm.ledger.explore": lambda config: config.algorithm.ledger.enable,
    "algorithm.filter_groups.metric": lambda config: config.algorithm.filter_groups.enable,
    "algorithm.filter_groups.min_batch_ratio": lambda config: (
        config.algorithm.filter_groups.on_exhausted in ("skip", "pad")
    ),
    "reward.overlong_buffer.": lambda config: config.reward.length_shaping == "buffer",
    "reward.target_length": lambda config: config.reward.length_shaping == "target",
}
# Options that decide which responses count as right, in training and in evaluations.
_JUDGING = {
    "reward.use",
    "reward.extract",
    "reward.regex",
    "reward.think_tags",
    "reward.threshold",
    "reward.code_score",
}


def warnings(plan: Plan) -> Iterator[str]:
    """Yield what can be said before the first run: arms that train identically, and intervals that are too wide."""
    configs = {run.arm: run.config for run in plan.runs if run.seed == plan.runs[0].seed}
    first = {arm.name: configs[arm.name] for arm in plan.arms}
    for (one, config), (other, changed) in combinations(first.items(), 2):
        options = config.differences(changed).keys() - {"run.name"}
        differing = {key for key in options if _reads(config, key) or _reads(changed, key)}
        if not options:
            yield f"{one} and {other} have the same options, so they will train identically"
        elif not differing:
            yield (
                f"{one} and {other} will train identically: they differ only in {', '.join(sorted(options))}, which "
                "neither reads"
            )
        elif differing <= _CLIPS | {"algorithm.loss"} and _is_clip_idle(config) and _is_clip_idle(changed):
            what = "loss" if "algorithm.loss" in differing else "clip"
            yield (
                f"{one} and {other} will train identically: only the {what} differs, and with one update per batch "
                f"every importance ratio is 1{_AT_RATIO_ONE[what]}; set optim.ppo_mini_batch_size below "
                "data.train_batch_size, or raise optim.ppo_epochs"
            )
    for name, config in first.items():
        if judging := sorted(_JUDGING & config.differences(first[plan.reference]).keys()):
            yield (
                f"{name} is judged differently from {plan.reference} ({', '.join(judging)}), in evaluations too, so "
                "their accuracies are not measured by the same rule"
            )
    if plan.config.eval.every == 0:
        yield (
            "eval.every is 0, so each run is evaluated only before and after training; comparisons at equal seconds "
            "or tokens then assume a straight line between the two"
        )
    if len(plan.seeds) == 1:
        yield "with one seed, the intervals cover the choice of questions, but not the differences between seeds"


def _reads(config: Config, option: str) -> bool:
    """Return whether a run reads the option."""
    return all(reads(config) for name, reads in _READ_IF.items() if option.startswith(name))


def _is_clip_idle(config: Config) -> bool:
    """Return whether every ratio is 1, where all the named losses have the gradient -A of each token."""
    return has_ratio_one(config) and config.algorithm.loss in LOSS_SETTINGS


def has_ratio_one(config: Config) -> bool:
    """Return whether each step makes one update, and with the weights to which its ratios compare, so that they are 1.

    An importance correction compares with the weights at the start of the step, otherwise it is those that sampled.
    Groups that the judge could not judge are not considered: they, too, are replaced, and may leave a surplus.
    """
    algorithm, rule, batch = config.algorithm, config.algorithm.filter_groups, config.data.train_batch_size
    # In flight a batch may grow, and then take more updates.
    if config.mini_batch_size < batch or config.optim.ppo_epochs > 1 or config.rollout.mode != "strict":
        return False
    asked = algorithm.importance_correction
    if config.uses_vllm if asked == "auto" else asked != "none":
        return True
    has_rounds = rule.max_num_gen_batches != 1 or rule.on_exhausted == "skip"
    replaces = rule.enable or (algorithm.overlong_filter and has_rounds)
    carries = algorithm.max_staleness > 0 and (replaces or config.gen_batch_size > batch)
    return not carries and not config.uses_vllm
