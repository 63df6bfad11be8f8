"""Reinforcement learning of language models from verifiable rewards with DAPO."""

import os
from typing import TYPE_CHECKING, Any

# Both variables must be set before torch is imported. By default its threads spin for milliseconds while they wait.
# With anything else on the same cores (judging processes, a second run) that makes the program ten times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
# cuBLASLt can give the same bits for any number of rows; see dapo.model.products.
os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", "1")

from dapo.config import Config
from dapo.config.functions import CustomParts

if TYPE_CHECKING:
    from dapo.evaluation.judging import Judgment, judge
    from dapo.training.trainer import RunResult, Trainer

__all__ = ["Config", "CustomParts", "Judgment", "RunResult", "Trainer", "judge"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Import torch only when it is needed: it takes seconds, which `dapo --help` and configuration errors should not.
    if name in ("RunResult", "Trainer"):
        from dapo.training import trainer

        return getattr(trainer, name)
    if name in ("Judgment", "judge"):
        from dapo.evaluation import judging

        return getattr(judging, name)
    raise AttributeError(f"module 'dapo' has no attribute '{name}'")
