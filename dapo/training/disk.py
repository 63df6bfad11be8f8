"""Estimate of the disk space that a run needs, reported before it starts."""

from __future__ import annotations

from dapo.checkpoint.folder import KEEP
from dapo.config import Config
from dapo.store.encoding import response_bytes
from dapo.system.machine import free_disk, size_text

_KEPT = 0.5  # share of the groups that dynamic sampling keeps, as `dapo plan` assumes


def disk_plan(config: Config, checkpoint: int) -> str:
    """Return one line: the size of checkpoints, the growth of the database, and the free space."""
    kept = f"the {KEEP} newest" + (" and the best" if config.eval.best_metric else "")
    return (
        f"a checkpoint takes {size_text(checkpoint)} ({kept} are kept), a step up to about "
        f"{size_text(step_bytes(config))} in the database; {size_text(free_disk(config.run_dir))} are free in "
        f"{config.run.dir}"
    )


def disk_warning(config: Config, checkpoint: int) -> str | None:
    """Return a sentence if the disk cannot hold two checkpoints."""
    free = free_disk(config.run_dir)
    if free >= 2 * checkpoint:
        return None
    return (
        f"only {size_text(free)} are free in {config.run.dir}, but two checkpoints take {size_text(2 * checkpoint)}; "
        "free some space, or set run.dir to a larger disk"
    )


def step_bytes(config: Config) -> int:
    """Estimate the bytes by which a step makes the database grow, if responses are as long as allowed."""
    tokens, stored = config.data.max_response_length, config.run.store_tokens
    trained = config.data.train_batch_size * config.rollout.n
    dropped = int(trained / _KEPT) - trained if config.algorithm.filter_groups.enable else 0
    of_trained = response_bytes(tokens, has_tokens=stored != "none", is_trained=True)
    return trained * of_trained + dropped * response_bytes(tokens, has_tokens=stored == "all", is_trained=False)
