"""`dapo export`: a checkpoint's model and its card, as a plain Hugging Face directory or as PEFT adapters."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import safe_open

from dapo.checkpoint import folder as checkpoints
from dapo.checkpoint.card import model_card
from dapo.checkpoint.weights import ADAPTERS
from dapo.config import ModelConfig
from dapo.errors import CheckpointError
from dapo.model.lora import adapter_settings
from dapo.store.configuration import CHECKPOINTS, recorded_config
from dapo.system.files import atomic_folder

_WEIGHTS_AND_SHAPE = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json")


def export_run(run: Path, to: Path, which: str | None = None, *, adapters: bool = False) -> Path:
    """Export the checkpoint that `which` names (best, last or a step; default: the best if marked), and return it."""
    config = recorded_config(run)
    saved = checkpoints.find(run / CHECKPOINTS, checkpoints.parse_which(which) if which is not None else None)
    card = model_card(run, saved, adapters=adapters)
    if adapters:
        export_adapters(saved, to, card, config.model)
    else:
        export_merged(saved, to, card)
    return saved


def export_merged(checkpoint: Path, folder: Path, card: str) -> None:
    """Write the whole model, adapters merged; transformers and vLLM load it as it is."""
    with _checked(checkpoint, folder) as draft:
        shutil.copytree(checkpoint, draft, ignore=shutil.ignore_patterns("trainer"), dirs_exist_ok=True)
        (draft / "README.md").write_text(card, encoding="utf-8")


def export_adapters(checkpoint: Path, folder: Path, card: str, model: ModelConfig) -> None:
    """Write the adapters alone, for `peft.PeftModel.from_pretrained(base, folder)`."""
    if not (checkpoint / ADAPTERS).is_file():
        raise CheckpointError(
            f"{checkpoint}: this run trained all weights, so there are no adapters; export without --adapters"
        )
    with _checked(checkpoint, folder) as draft:
        all_but_tokenizer = shutil.ignore_patterns("trainer", *_WEIGHTS_AND_SHAPE)
        shutil.copytree(checkpoint, draft, ignore=all_but_tokenizer, dirs_exist_ok=True)
        shutil.copyfile(checkpoint / ADAPTERS, draft / "adapter_model.safetensors")
        targets, base = _targets(checkpoint, model), model.path
        settings = adapter_settings(model.lora, targets, base_model_name_or_path=base, inference_mode=True)
        settings.save_pretrained(str(draft))
        (draft / "README.md").write_text(card, encoding="utf-8")


@contextmanager
def _checked(checkpoint: Path, folder: Path) -> Iterator[Path]:
    """Yield a draft that is published as `folder` all or nothing, after the checkpoint's checksums were verified."""
    if folder.exists():
        raise CheckpointError(f"{folder}: exists already; name a new folder")
    checkpoints.read_state(checkpoint)
    with atomic_folder(folder) as draft:
        yield draft


def _targets(checkpoint: Path, model: ModelConfig) -> list[str]:
    """Return the names of the adapted layers: some programs that read adapters do not know `all-linear`."""
    if model.lora.target_modules != "all-linear":
        return list(model.lora.target_modules)
    with safe_open(checkpoint / ADAPTERS, framework="np") as file:
        return sorted({name.rsplit(".", 3)[1] for name in file.keys()})  # noqa: SIM118  # not a mapping
