"""Reinforcement learning of language models from verifiable rewards with DAPO."""

import os
from typing import TYPE_CHECKING, Any

# Before torch is imported: its threads otherwise spin for milliseconds when they wait, and with anything else on the
# same cores (the processes that judge, a second run, a browser) the whole program becomes ten times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
# The library whose products can be told to give the same bits for any number of rows; see dapo.model.products.
os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", "1")

from dapo.config import Config

if TYPE_CHECKING:
    from dapo.training.trainer import RunResult, Trainer

__all__ = ["Config", "RunResult", "Trainer"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # torch takes seconds to import; `dapo --help` and configuration errors should not.
    if name in ("RunResult", "Trainer"):
        from dapo.training import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module 'dapo' has no attribute '{name}'")
