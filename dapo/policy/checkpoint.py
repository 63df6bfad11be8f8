"""Checkpoints: a Hugging Face directory beside the trainer's state, in safetensors and JSON, written all or nothing."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError

from dapo.errors import CheckpointError
from dapo.model.cache import published
from dapo.policy.protocol import Learner
from dapo.types import Group, Prompt, Rollout, Score

FORMAT = 2
KEEP = 2
_STATE = "trainer/state.json"
_BEST = "best.json"
_STEP = re.compile(r"0|[1-9][0-9]{0,17}")  # as it is written: step_007 and step_² are somebody else's

Which = int | Literal["best", "last"]


@dataclass(frozen=True, slots=True, eq=False)
class TrainerState:
    """What the next step depends on besides weights and optimiser. All randomness is hashed from these counters."""

    step: int
    version: int
    positions: list[int]  # in the stream's sources
    data_digest: str
    next_serial: int
    recent: list[bool]
    empty_in_a_row: int
    non_finite_in_a_row: int
    considered: int  # prompts that the ledger was asked about
    ledger: Mapping[str, Sequence[int]]
    carried: list[Group]
    pending: Mapping[int, Prompt] = field(default_factory=dict)  # by serial: under way, to be submitted again


@dataclass(frozen=True, slots=True)
class Best:
    """The step that an evaluation found best so far, and the figure that says so."""

    step: int
    metric: str
    value: float


def save(folder: Path, state: TrainerState, policy: Learner, tokenizer: Any, best: int | None = None) -> Path:
    """Write checkpoints/step_N, all or nothing; keep the newest two, that of step `best`, and the one marked best."""
    target = folder / f"step_{state.step}"
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".step_*"):  # of a process that was killed while it wrote
        shutil.rmtree(leftover)
    if target.exists():  # of a later part of the run that was undone
        _remove(target)
    with _explained(target), published(target) as draft:
        (draft / "trainer").mkdir()
        policy.save(draft)
        tokenizer.save_pretrained(draft)
        files = {str(path.relative_to(draft)): _digest(path) for path in sorted(draft.rglob("*")) if path.is_file()}
        own = {f.name: getattr(state, f.name) for f in fields(state) if f.name not in ("carried", "pending")}
        carried = [_to_json(group) for group in state.carried]
        pending = [{"serial": serial, "prompt": asdict(prompt)} for serial, prompt in state.pending.items()]
        document = {"format": FORMAT, "files": files, **own, "carried": carried, "pending": pending}
        (draft / _STATE).write_text(json.dumps(document), encoding="utf-8")
    # Until a new one is marked, the checkpoint marked best stays: the process may end before it comes to that.
    marked = _marked(folder)
    spared = {best, marked.step if marked else None}
    for step, old in sorted(_all(folder).items())[:-KEEP]:
        if step not in spared:
            _remove(old)
    return target


@contextmanager
def _explained(target: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:  # a full disk, as safetensors tells it
        raise CheckpointError(f"{target}: cannot be written ({error}); the checkpoint before it is whole") from error


def mark_best(folder: Path, best: Best) -> None:
    """Say which checkpoint is the best one, all or nothing; it is spared from then on."""
    assert math.isfinite(best.value), f"{best.metric} is {best.value}"
    draft = folder / f".{_BEST}"
    with draft.open("w", encoding="utf-8") as file:
        json.dump(asdict(best), file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / _BEST)


def best(folder: Path) -> Best | None:
    """The checkpoint marked best; a mark whose checkpoint is gone does not count."""
    marked = _marked(folder)
    return marked if marked and marked.step in _all(folder) else None


def newest(folder: Path) -> Path | None:
    found = _all(folder)
    return found[max(found)] if found else None


def parse_which(text: str) -> Which:
    """What a person may name a checkpoint by: best, last, or the number of its step."""
    if text in ("best", "last"):
        return text
    if _STEP.fullmatch(text):
        return int(text)
    raise CheckpointError(f"'{text}' names no checkpoint; expected best, last or the number of a step")


def find(folder: Path, which: Which | None = None) -> Path:
    """The checkpoint of a step, the best or the last one; left open: the best where one is marked, else the last."""
    found, marked = _all(folder), best(folder)
    if not found:
        raise CheckpointError(f"{folder}: there is no checkpoint here")
    if which is None:
        which = "best" if marked else "last"
    step = max(found) if which == "last" else marked.step if which == "best" and marked else which
    if isinstance(step, int) and step in found:
        return found[step]
    there = ", ".join(map(str, sorted(found)))
    missing = "no checkpoint is marked best" if which == "best" else f"there is no checkpoint of step {which}"
    raise CheckpointError(f"{folder}: {missing}; there are checkpoints of the steps {there}")


def read_state(checkpoint: Path) -> TrainerState:
    """The trainer's state, after every file of the checkpoint was found to be what was written."""
    try:
        document = json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
        found = document.pop("format")
        if found != FORMAT:
            raise CheckpointError(f"{checkpoint}: written in format {found}, this version reads format {FORMAT}")
        for name, digest in document.pop("files").items():
            if _digest(checkpoint / name) != digest:
                raise CheckpointError(_damaged(checkpoint, f"{name} is not what was written"))
        carried = [_from_json(group) for group in document.pop("carried")]
        # Checkpoints from before there was an in-flight mode lack it.
        pending = {item["serial"]: _prompt(item["prompt"]) for item in document.pop("pending", ())}
        return TrainerState(**document, carried=carried, pending=pending)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(_damaged(checkpoint, f"{type(error).__name__}: {error}")) from error


def restore(checkpoint: Path, policy: Learner) -> None:
    """Optimiser and adapters; a full model's weights are loaded from the checkpoint directory as from any other."""
    try:
        policy.restore(checkpoint)
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise CheckpointError(_damaged(checkpoint, f"the optimiser's state does not fit: {error}")) from error


def _all(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    names = {path.name.removeprefix("step_"): path for path in folder.glob("step_*") if path.is_dir()}
    return {int(step): path for step, path in names.items() if _STEP.fullmatch(step)}


def _marked(folder: Path) -> Best | None:
    path = folder / _BEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return Best(int(values["step"]), str(values["metric"]), float(values["value"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: expected step, metric and value ({type(error).__name__}: {error}); delete the file to go on "
            "without a best checkpoint"
        ) from error


def _remove(checkpoint: Path) -> None:
    """A process killed halfway leaves a hidden leftover, never a checkpoint that lacks files."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.old")
    checkpoint.rename(hidden)
    shutil.rmtree(hidden)


def _damaged(checkpoint: Path, why: str) -> str:
    return f"{checkpoint}: the checkpoint is damaged ({why}); delete this folder to resume from the one before it"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_json(group: Group) -> dict[str, Any]:
    def lists(values: tuple[np.ndarray, ...] | None) -> list[list[float]] | None:
        return None if values is None else [value.tolist() for value in values]

    return {
        "serial": group.serial,
        "prompt": asdict(group.prompt),
        "rollouts": [
            {**asdict(rollout), "tokens": rollout.tokens.tolist(), "logprobs": rollout.logprobs.tolist()}
            for rollout in group.rollouts
        ],
        "scores": [asdict(score) for score in group.scores],
        "rewards": group.rewards.tolist(),
        "advantages": group.advantages.tolist(),
        "trains": group.trains.tolist(),
        "verdict": group.verdict,
        "ref_logprobs": lists(group.ref_logprobs),
    }


def _prompt(data: Mapping[str, Any]) -> Prompt:
    return Prompt(**{**data, "messages": tuple(data["messages"]), "tokens": tuple(data["tokens"])})


def _rollout(data: Mapping[str, Any]) -> Rollout:
    arrays = {"tokens": np.array(data["tokens"], np.int32), "logprobs": np.array(data["logprobs"], np.float32)}
    return Rollout(**{**data, **arrays, "switches": tuple(data.get("switches", ()))})


def _from_json(data: Mapping[str, Any]) -> Group:
    reference = data["ref_logprobs"]
    return Group(
        serial=data["serial"],
        prompt=_prompt(data["prompt"]),
        rollouts=tuple(map(_rollout, data["rollouts"])),
        scores=tuple(Score(**score) for score in data["scores"]),
        rewards=np.array(data["rewards"], np.float64),
        advantages=np.array(data["advantages"], np.float64),
        trains=np.array(data["trains"], bool),
        verdict=data["verdict"],
        ref_logprobs=None if reference is None else tuple(np.array(row, np.float32) for row in reference),
    )
