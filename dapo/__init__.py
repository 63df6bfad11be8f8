"""Reinforcement learning of language models from verifiable rewards with DAPO."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Both variables must be set before torch is imported. By default its threads spin for milliseconds while they wait.
# With anything else on the same cores (judging processes, a second run) that makes the program ten times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
# cuBLASLt can give the same bits for any number of rows; see dapo.model.products.
os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", "1")

from dapo.config import Config
from dapo.config.functions import CustomParts

if TYPE_CHECKING:
    from dapo.environments.environment import End, Turn
    from dapo.errors import DapoError
    from dapo.evaluation.judging import Judgment, judge
    from dapo.training.callbacks import Callback
    from dapo.training.trainer import RunResult, Trainer
    from dapo.types import EvalReport, Group, StepReport

__all__ = [
    "Callback",
    "Config",
    "CustomParts",
    "DapoError",
    "End",
    "EvalReport",
    "Group",
    "Judgment",
    "RunResult",
    "StepReport",
    "Trainer",
    "Turn",
    "judge",
]
__version__ = "0.1.0"


_MODULES = {
    "Callback": "dapo.training.callbacks",
    "DapoError": "dapo.errors",
    "End": "dapo.environments.environment",
    "EvalReport": "dapo.types",
    "Group": "dapo.types",
    "Judgment": "dapo.evaluation.judging",
    "RunResult": "dapo.training.trainer",
    "StepReport": "dapo.types",
    "Trainer": "dapo.training.trainer",
    "Turn": "dapo.environments.environment",
    "judge": "dapo.evaluation.judging",
}


def __getattr__(name: str) -> Any:
    # Import torch only when it is needed: it takes seconds, which `dapo --help` and configuration errors should not.
    if name not in _MODULES:
        raise AttributeError(f"module 'dapo' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
