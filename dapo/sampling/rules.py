"""The configured rules for groups: reward shaping, advantage and filter, built in or the user's own."""

from __future__ import annotations

from dapo.algorithm.advantage import centered, normalized
from dapo.algorithm.checked import checked_advantage, checked_filter, checked_shaping
from dapo.algorithm.filtering import GroupRules
from dapo.algorithm.overlong import LengthShaping, soft_overlong_penalty, target_length_penalty
from dapo.config import Config, RewardConfig
from dapo.config.functions import CustomParts, load_parts


def group_rules(config: Config, given: CustomParts | None = None) -> GroupRules:
    """Build the rules from the options. `given` are the user's parts that were passed as objects instead of files."""
    algorithm, parts, limit = config.algorithm, load_parts(config, given), config.data.max_response_length
    advantage = normalized if algorithm.adv_norm == "std" else centered
    return GroupRules(
        max_response_length=limit,
        shaping=checked_shaping(parts.length_shaping, limit) if parts.length_shaping else _shaping(config.reward),
        advantage=checked_advantage(parts.advantage, config.rollout.n) if parts.advantage else advantage,
        overlong_filter=algorithm.overlong_filter,
        filter_enabled=algorithm.filter_groups.enable,
        filter_metric=algorithm.filter_groups.metric,
        group_filter=checked_filter(parts.group_filter) if parts.group_filter else None,
        kl_reward_coef=algorithm.kl_reward_coef,
    )


def _shaping(options: RewardConfig) -> LengthShaping | None:
    buffer, target = options.overlong_buffer, options.target_length

    def in_buffer(reward: float, length: int, max_length: int, is_cut_off: bool) -> float:
        return soft_overlong_penalty(length, max_length, buffer.len, buffer.penalty_factor)

    def past_target(reward: float, length: int, max_length: int, is_cut_off: bool) -> float:
        return target_length_penalty(reward, length, target, is_cut_off=is_cut_off)

    return {"buffer": in_buffer, "target": past_target}.get(options.length_shaping)
