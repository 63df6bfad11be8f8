"""`dapo export`: a run's model with its model card, in a folder that others can load."""

from __future__ import annotations

from pathlib import Path

from dapo.checkpoint import folder as checkpoint
from dapo.checkpoint.card import model_card
from dapo.checkpoint.export import export_adapters, export_merged
from dapo.config import Config
from dapo.errors import CheckpointError


def export_run(run: Path, to: Path, which: str | None = None, *, adapters: bool = False) -> Path:
    """Write the best or last checkpoint, or that of a step; left open: the best where one is marked. Returns which."""
    if not (run / "config.yaml").is_file():
        raise CheckpointError(f"{run}: there is no run here (it has no config.yaml)")
    saved = checkpoint.find(run / "checkpoints", checkpoint.parse_which(which) if which is not None else None)
    card = model_card(run, saved, adapters=adapters)
    if adapters:
        export_adapters(saved, to, card, Config.load(run / "config.yaml").model)
    else:
        export_merged(saved, to, card)
    return saved
