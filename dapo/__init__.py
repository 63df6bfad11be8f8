"""Reinforcement learning of language models from verifiable rewards with DAPO."""

from typing import TYPE_CHECKING, Any

from dapo.config import Config

if TYPE_CHECKING:
    from dapo.trainer import RunResult, Trainer

__all__ = ["Config", "RunResult", "Trainer"]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import; `dapo --help` and configuration errors should not.
    if name in ("RunResult", "Trainer"):
        from dapo import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module 'dapo' has no attribute '{name}'")
