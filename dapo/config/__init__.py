"""The options of a run: `sections` (each option), `schema` (the tree and its rules), `loading` (YAML), `reference`."""

from dapo.config.base import FIXED, Section, Source
from dapo.config.loading import apply_override
from dapo.config.schema import Config, leaves, option_names
from dapo.config.sections import (
    AUTO_WORKERS,
    REWARD_TOKEN,
    EngineName,
    Extraction,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    RewardConfig,
    RewardModelConfig,
)

__all__ = [
    "AUTO_WORKERS",
    "FIXED",
    "REWARD_TOKEN",
    "Config",
    "EngineName",
    "Extraction",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "RewardConfig",
    "RewardModelConfig",
    "Section",
    "Source",
    "apply_override",
    "leaves",
    "option_names",
]
