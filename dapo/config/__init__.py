"""The options of a run: `sampling_options`, `training_options`, `schema` (their tree and rules), `loading` (YAML)."""

from dapo.config.base import FIXED, PYTHON, Section, Source
from dapo.config.loading import apply_override, merge_options, read_yaml
from dapo.config.sampling_options import (
    AUTO_WORKERS,
    ENVIRONMENTS,
    REWARD_TOKEN,
    TOOLS,
    EngineName,
    EnvironmentConfig,
    Extraction,
    LoraConfig,
    ModelConfig,
    RewardConfig,
    RewardModelConfig,
)
from dapo.config.schema import Config, leaves, option_names
from dapo.config.training_options import OptimConfig

__all__ = [
    "AUTO_WORKERS",
    "ENVIRONMENTS",
    "FIXED",
    "PYTHON",
    "REWARD_TOKEN",
    "TOOLS",
    "Config",
    "EngineName",
    "EnvironmentConfig",
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
    "merge_options",
    "option_names",
    "read_yaml",
]
