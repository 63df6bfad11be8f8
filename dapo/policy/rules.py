"""The rules of an update that the options name: the loss and the learning rate, built in or from the user."""

from __future__ import annotations

from dataclasses import dataclass

from dapo.algorithm.checked import checked_loss, checked_schedule
from dapo.algorithm.correction import Correction
from dapo.algorithm.loss import LOSSES, Loss
from dapo.algorithm.ratio import LossConfig
from dapo.algorithm.schedule import SCHEDULES, Schedule, learning_rate_factor
from dapo.config import Config
from dapo.config.functions import CustomParts, load_parts


@dataclass(frozen=True, slots=True)
class UpdateRules:
    config: Config
    loss: Loss
    loss_config: LossConfig
    schedule: Schedule
    correction: Correction
    is_custom_loss: bool

    @classmethod
    def of(cls, config: Config, given: CustomParts | None = None) -> UpdateRules:
        """Collect the rules. `given` are parts of the user that are objects, not files."""
        algorithm, parts = config.algorithm, load_parts(config, given)
        loss_config = LossConfig(
            clip_low=algorithm.clip_ratio_low,
            clip_high=algorithm.clip_ratio_high,
            clip_c=algorithm.clip_ratio_c,
            kl_coef=algorithm.kl_loss_coef,
        )
        decay_steps = (config.run.steps or 0) - config.optim.warmup_steps  # without steps, the rate is constant
        return cls(
            config,
            checked_loss(parts.loss, loss_config) if parts.loss else LOSSES[algorithm.loss],
            loss_config,
            checked_schedule(parts.lr_schedule, decay_steps)
            if parts.lr_schedule
            else SCHEDULES[config.optim.lr_schedule],
            _correction(config),
            is_custom_loss=parts.loss is not None,
        )

    @property
    def per_token(self) -> bool:
        """Whether the loss of a token depends on its own log-probability only."""
        return self.loss.per_token and not self.correction.startswith("sequence")

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a trainer step, which counts from 1."""
        optim, steps = self.config.optim, self.config.run.steps or 0
        return optim.lr * learning_rate_factor(step, optim.warmup_steps, steps, self.schedule)


def _correction(config: Config) -> Correction:
    asked = config.algorithm.importance_correction
    if asked == "auto":
        return "token-truncated" if config.uses_vllm else "none"
    return asked
