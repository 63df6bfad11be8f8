"""Checkpoints on disk: a Hugging Face directory beside the trainer's state, in safetensors and JSON, all or nothing.

A checkpoint is written under `checkpoints/.partial`, synced, and renamed to `checkpoints/step_N`. An old checkpoint is
renamed into `.partial` before its files are deleted. So a folder called step_N is always complete, and everything in
`.partial` was written by this program and may be deleted.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError

from dapo.checkpoint.state import FORMAT, STATE_FILE, Best, TrainerState, best_from_json, from_document, to_document
from dapo.errors import CheckpointError, DapoError, ModelError, StorageError
from dapo.system.digest import file_digest
from dapo.system.files import fsync, sync_tree
from dapo.system.machine import size_text
from dapo.system.tensors import TensorFiles, write_tensors

KEEP = 2  # newest checkpoints; the best one is kept besides
PARTIAL = ".partial"
_CHECKSUMS = "trainer/SHA256SUMS"
_STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})", re.ASCII)

Which = int | Literal["best", "last"]


class Savable(Protocol):
    """The owner of weights and optimizer, in one process or several."""

    @property
    def checkpoint_bytes(self) -> int: ...

    def save(self, folder: Path) -> TensorFiles: ...

    def restore(self, folder: Path) -> None: ...


@dataclass(slots=True, eq=False)
class Draft:
    """A checkpoint in `.partial` that lacks the files whose content is in `files`."""

    folder: Path
    state: TrainerState
    files: TensorFiles

    @property
    def target(self) -> Path:
        return self.folder / f"step_{self.state.step}"

    @property
    def path(self) -> Path:
        return self.folder / PARTIAL / self.target.name

    def finish(self, before_piece: Callable[[], None] | None = None) -> Path:
        """Write the missing files, publish the checkpoint, and delete all but the newest two and the best one.

        `before_piece` is called before each piece of a file. If it raises, the draft is deleted.
        """
        with _explained(self.folder, self.target):
            try:
                digests = {name: write_tensors(self.path / name, t, before_piece) for name, t in self.files.items()}
                _write_checksums(self.path, digests)
                sync_tree(self.path)
                if self.target.exists():  # from steps that were undone since, or saved again after a late evaluation
                    self.target.rename(self.path.with_name(f"{self.target.name}.old"))
                self.path.rename(self.target)
                fsync(self.folder)
            finally:
                clean(self.folder)
            _remove_old(self.folder, self.state.best)
        return self.target


def begin(folder: Path, state: TrainerState, policy: Savable, tokenizer: Any) -> Draft:
    """Begin checkpoints/step_N: write all files except the large ones, which a policy in this process returns."""
    draft = Draft(folder, state, {})
    with _explained(folder, draft.target):
        folder.mkdir(parents=True, exist_ok=True)
        fsync(folder.parent)
        clean(folder)
        _check_space(folder, draft.target, policy)
        (draft.path / "trainer").mkdir(parents=True)
        try:
            draft.files = policy.save(draft.path)
            tokenizer.save_pretrained(draft.path)
            (draft.path / STATE_FILE).write_text(json.dumps(to_document(state)), encoding="utf-8")
        except BaseException:
            clean(folder)
            raise
    return draft


def clean(folder: Path) -> None:
    """Delete checkpoints that are half written or half deleted. Put back one whose replacement was not published."""
    for old in (folder / PARTIAL).glob("step_*.old"):
        if not (target := folder / old.stem).exists():
            old.rename(target)
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)


def _remove_old(folder: Path, marked: Best | None) -> None:
    for step, old in sorted(_all(folder).items())[:-KEEP]:
        if not (marked and step == marked.step) and (old / STATE_FILE).is_file():
            (folder / PARTIAL).mkdir(exist_ok=True)
            old.rename(folder / PARTIAL / old.name)
    clean(folder)


def _check_space(folder: Path, target: Path, policy: Savable) -> None:
    needed, free = policy.checkpoint_bytes, shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            f"{target}: a checkpoint takes about {size_text(needed)}, but only {size_text(free)} are free on "
            f"the disk; {_remedy(folder)}"
        )


@contextmanager
def _explained(folder: Path, target: Path) -> Iterator[None]:
    """Turn a full or failing disk into one sentence, however each library reports it."""
    try:
        yield
    except Exception as error:
        # tokenizers raises a bare Exception if it cannot write a file
        if not isinstance(error, OSError | SafetensorError) and type(error) is not Exception:
            raise
        raise StorageError(f"{target}: cannot be written ({_reason(error)}); {_remedy(folder)}") from error


def _reason(error: Exception) -> str:
    """Return the operating system's message; libraries written in Rust wrap it in their own text."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    found = re.search(r"([^:]*) \(os error \d+\)", text)
    return found[1].strip() if found else text


def _remedy(folder: Path) -> str:
    found = _all(folder)
    where = f"which continues after step {max(found)}" if found else "which starts from step 0: nothing was saved yet"
    return f"free some space or repair the disk, then run dapo resume {folder.parent}, {where}"


def best(folder: Path) -> Best | None:
    """Return the best checkpoint, as recorded in the newest one; None if its folder is gone."""
    found = _all(folder)
    if not found:
        return None
    marked = best_from_json(_read_json(found[max(found)]).get("best"))
    return marked if marked and marked.step in found else None


def steps(folder: Path) -> list[int]:
    """Return the steps of all complete checkpoints, oldest first."""
    return sorted(_all(folder))


def newest(folder: Path) -> Path | None:
    found = _all(folder)
    return found[max(found)] if found else None


def parse_which(text: str) -> Which:
    """Parse a user's name for a checkpoint: best, last, or the number of its step."""
    if text in ("best", "last"):
        return text
    if _STEP.fullmatch(f"step_{text}"):
        return int(text)
    raise CheckpointError(f"'{text}' does not name a checkpoint; expected best, last or the number of a step")


def find(folder: Path, which: Which | None = None) -> Path:
    """Return the checkpoint of a step, the best or the last one; default: the best if one is marked, else the last."""
    found, marked = _all(folder), best(folder)
    if not found:
        raise CheckpointError(f"{folder}: there is no checkpoint here")
    if which is None:
        which = "best" if marked else "last"
    step = max(found) if which == "last" else marked.step if which == "best" and marked else which
    if isinstance(step, int) and step in found:
        return found[step]
    available = ", ".join(map(str, sorted(found)))
    missing = "no checkpoint is marked best" if which == "best" else f"there is no checkpoint of step {which}"
    raise CheckpointError(f"{folder}: {missing}; there are checkpoints of steps {available}")


def read_state(checkpoint: Path) -> TrainerState:
    """Return the trainer's state, after checking every file of the checkpoint against its checksum."""
    try:
        document = _read_json(checkpoint)
        if (found := document.pop("format", None)) != FORMAT:
            raise CheckpointError(
                f"{checkpoint}: written in format {found}, but this version of dapo reads format {FORMAT}; use the "
                "version that wrote it"
            )
        _verify(checkpoint)
        return from_document(document)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(_damaged(checkpoint, f"{type(error).__name__}: {error}")) from error


def _write_checksums(draft: Path, known: Mapping[str, str]) -> None:
    """Write the format of sha256sum, so that `sha256sum --check trainer/SHA256SUMS` works."""
    names = ((str(path.relative_to(draft)), path) for path in _files(draft))
    lines = [f"{known.get(name) or file_digest(path)}  {name}\n" for name, path in names]
    (draft / _CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def _files(checkpoint: Path) -> list[Path]:
    """Return all files except the checksums and hidden files, which file systems and desktops leave behind."""
    found = (path for path in checkpoint.rglob("*") if path.is_file() and not path.name.startswith("."))
    return sorted(path for path in found if path != checkpoint / _CHECKSUMS)


def _verify(checkpoint: Path) -> None:
    """Compare all files with the checksums, and refuse files that are not listed.

    transformers loads files by name, so an added file could change the model.
    """
    lines = (checkpoint / _CHECKSUMS).read_text(encoding="utf-8").splitlines()
    written = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    for name, digest in written.items():
        if file_digest(checkpoint / name) != digest:
            raise CheckpointError(_damaged(checkpoint, f"{name} is not what was written"))
    present = {str(path.relative_to(checkpoint)) for path in _files(checkpoint)}
    if unknown := sorted(present - written.keys()):
        raise CheckpointError(
            f"{checkpoint}: holds files that do not belong to the checkpoint ({', '.join(unknown[:3])}); move them away"
        )


def _read_json(checkpoint: Path) -> dict[str, Any]:
    try:
        document = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise TypeError(f"{STATE_FILE} holds a {type(document).__name__}")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(_damaged(checkpoint, f"{type(error).__name__}: {error}")) from error
    return document


def restore(checkpoint: Path, policy: Savable) -> None:
    """Restore optimizer and adapters. A full model's weights are loaded from the checkpoint like any other model's.

    A RuntimeError passes: a lost learner or too little memory says nothing about the checkpoint.
    """
    try:
        policy.restore(checkpoint)
    except torch.cuda.OutOfMemoryError as error:
        raise ModelError(
            f"{checkpoint}: the GPU has too little free memory to restore the optimizer's state; end other programs on "
            f"the GPU, or lower rollout.kv_memory_fraction, then run dapo resume {checkpoint.parent.parent}"
        ) from error
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        if isinstance(error, DapoError):
            raise
        raise CheckpointError(_damaged(checkpoint, f"the optimizer's state does not fit: {error}")) from error


def _all(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints by step."""
    if not folder.is_dir():
        return {}
    matches = ((_STEP.fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in matches if match and path.is_dir()}


def _damaged(checkpoint: Path, why: str) -> str:
    others = sorted(step for step, path in _all(checkpoint.parent).items() if path != checkpoint)
    remedy = (
        f"use another one (of step {', '.join(map(str, others))}), or delete this folder to resume "
        f"from step {others[-1]}"
        if others
        else "there is no other checkpoint: restore it from a copy, or start again under another run.name"
    )
    return f"{checkpoint}: the checkpoint is damaged ({why}); {remedy}"
