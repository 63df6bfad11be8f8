"""Run directories with checkpoints but without training, for tests of export and evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dapo.checkpoint import folder as checkpoint
from dapo.checkpoint.state import Best, DrawerState, SamplerState, TrainerState
from dapo.config import Config
from dapo.model.export import save_dense
from dapo.model.loading import load_model
from dapo.model.lora import add_adapters, causal_lm, merged
from dapo.policy.policy import Policy
from dapo.store.database import RunDatabase
from tests.tiny import save_tiny


def save_merged(model: Any, tokenizer: Any, directory: Path) -> None:
    """Save a model as a checkpoint does, with adapters merged if it has any."""
    save_dense(causal_lm(model), merged(model), directory)
    tokenizer.save_pretrained(directory)


IDS = torch.tensor([[1, 40, 50, 60, 70, 80]])


class SavedRun:
    """A run directory as a trainer leaves it; `move` changes the weights at random instead of training."""

    def __init__(
        self,
        folder: Path,
        rank: int = 0,
        targets: Any = "all-linear",
        shape: dict[str, Any] | None = None,
        **sections: dict[str, Any],
    ) -> None:
        save_tiny(folder / "model", **(shape or {}))
        lora = {"rank": rank, "target_modules": targets}
        values: dict[str, dict[str, Any]] = {
            "run": {"dir": str(folder), "name": "run", "steps": 9, "store_tokens": "none"},
            "model": {"path": str(folder / "model"), "device": "cpu", "lora": lora},
            "data": {"train": "questions.jsonl"},
            **sections,
        }
        self.config = Config.parse(values)
        self.path = self.config.run_dir
        self.folder = self.path / "checkpoints"
        loaded = load_model(self.config.model)
        self.tokenizer = loaded.tokenizer
        torch.manual_seed(1)
        model = add_adapters(loaded.model, self.config.model.lora) if rank else loaded.model
        self.policy = Policy(model, self.config)
        self.path.mkdir()
        (self.path / "config.yaml").write_text(self.config.to_yaml())
        RunDatabase.create(self.path / "run.db", self.config.to_yaml(), {"torch": torch.__version__}).close()

    @torch.no_grad()
    def move(self) -> None:
        for parameter in self.policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))

    def save(self, step: int, best: Best | None = None) -> None:
        sampler = SamplerState(
            DrawerState([0], data_digest="", considered=0, ledger={}), next_serial=0, recent=[], carried=[]
        )
        state = TrainerState(step, step, empty_in_a_row=0, non_finite_in_a_row=0, sampler=sampler, best=best)
        checkpoint.begin(self.folder, state, self.policy, self.tokenizer).finish()

    @property
    def steps(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step_")) for path in self.folder.glob("step_*"))

    def logits(self) -> torch.Tensor:
        """Return the logits of the model in memory, adapters on, computed with transformers' own attention."""
        self.policy.causal_lm.set_attn_implementation("eager")
        with torch.no_grad():
            return self.policy.model(IDS).logits
