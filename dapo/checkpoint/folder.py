"""Checkpoints: a Hugging Face directory beside the trainer's state, in safetensors and JSON, written all or nothing.

A checkpoint is written under `checkpoints/.partial`, synced, and renamed to `checkpoints/step_N`. One that is no longer
needed is renamed into `.partial` before its files are deleted. So a folder called step_N is always complete, and
whatever lies in `.partial` was written by this program and may be deleted.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NotRequired, Protocol

import numpy as np
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from typing_extensions import TypedDict

from dapo.errors import CheckpointError, StorageError
from dapo.system.files import fsync, sync_tree
from dapo.types import FinishReason, Group, Prompt, Rollout, Score

FORMAT = 3
KEEP = 2
PARTIAL = ".partial"
_STATE = "trainer/state.json"
_CHECKSUMS = "trainer/SHA256SUMS"
_STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})", re.ASCII)
_OLD_LEFTOVER = re.compile(r"\.step_[0-9]+\.(old|[0-9]+\.[0-9a-f]{8})", re.ASCII)  # as earlier versions named them

Which = int | Literal["best", "last"]


class Savable(Protocol):
    """What holds the weights and the optimizer, in one process or several."""

    @property
    def checkpoint_bytes(self) -> int: ...

    def save(self, folder: Path) -> None: ...

    def restore(self, folder: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class Best:
    """The step that an evaluation found best so far, and the metric that says so."""

    step: int
    metric: str
    value: float


@dataclass(frozen=True, slots=True, eq=False)
class TrainerState:
    """What the next step depends on besides weights and optimizer. All randomness is hashed from these counters."""

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
    pending: Mapping[int, Prompt] = field(default_factory=dict)  # by serial: in flight, to be submitted again
    best: Best | None = None


def save(folder: Path, state: TrainerState, policy: Savable, tokenizer: Any) -> Path:
    """Write checkpoints/step_N, all or nothing; then delete all but the newest two and the best one."""
    target = folder / f"step_{state.step}"
    with _explained(folder, target):
        folder.mkdir(parents=True, exist_ok=True)
        fsync(folder.parent)
        clean(folder)
        _check_space(folder, target, policy)
        draft = folder / PARTIAL / target.name
        (draft / "trainer").mkdir(parents=True)
        try:
            policy.save(draft)
            tokenizer.save_pretrained(draft)
            (draft / _STATE).write_text(json.dumps(_to_document(state)), encoding="utf-8")
            _write_checksums(draft)
            sync_tree(draft)
            if target.exists():  # from a part of the run that was undone
                target.rename(draft.with_name(f"{target.name}.old"))
            draft.rename(target)
            fsync(folder)
        finally:
            clean(folder)
        _remove_old(folder, state.best)
    return target


def clean(folder: Path) -> None:
    """Delete what a killed process left half written or half deleted."""
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)
    for path in folder.glob(".step_*"):
        if _OLD_LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _remove_old(folder: Path, marked: Best | None) -> None:
    for step, old in sorted(_all(folder).items())[:-KEEP]:
        if not (marked and step == marked.step) and (old / _STATE).is_file():
            (folder / PARTIAL).mkdir(exist_ok=True)
            old.rename(folder / PARTIAL / old.name)
    clean(folder)


def _check_space(folder: Path, target: Path, policy: Savable) -> None:
    needed, free = policy.checkpoint_bytes, shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            f"{target}: a checkpoint takes about {needed / 1e9:.2f} GB, but only {free / 1e9:.2f} GB of the disk are "
            f"free; {_remedy(folder)}"
        )


@contextmanager
def _explained(folder: Path, target: Path) -> Iterator[None]:
    """Turn a full or failing disk into one sentence, however each library reports it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{target}: cannot be written ({_reason(error)}); {_remedy(folder)}") from error
    except Exception as error:
        if type(error) is not Exception:  # tokenizers raise a bare Exception where a file cannot be written
            raise
        raise StorageError(f"{target}: cannot be written ({_reason(error)}); {_remedy(folder)}") from error


def _reason(error: Exception) -> str:
    """What the operating system said; the libraries that are written in Rust wrap it into words of their own."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    found = re.search(r"([^:]*) \(os error \d+\)", text)
    return found[1].strip() if found else text


def _remedy(folder: Path) -> str:
    found = _all(folder)
    from_where = (
        f"which continues after step {max(found)}" if found else "which starts from step 0: nothing was saved yet"
    )
    return f"free some space or repair the disk, then run the same command with --resume, {from_where}"


def best(folder: Path) -> Best | None:
    """Return the best checkpoint so far, as the newest one recorded it; None where its folder is gone."""
    found = _all(folder)
    if not found:
        return None
    document = _read_json(found[max(found)])
    marked = _best_from(document["best"]) if "best" in document else _marked_in_format_2(folder)
    return marked if marked and marked.step in found else None


def _best_from(values: Any) -> Best | None:
    return None if values is None else Best(int(values["step"]), str(values["metric"]), float(values["value"]))


def steps(folder: Path) -> list[int]:
    """The steps of all complete checkpoints, oldest first."""
    return sorted(_all(folder))


def newest(folder: Path) -> Path | None:
    found = _all(folder)
    return found[max(found)] if found else None


def parse_which(text: str) -> Which:
    """What a person may name a checkpoint by: best, last, or the number of its step."""
    if text in ("best", "last"):
        return text
    if _STEP.fullmatch(f"step_{text}"):
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
    """Return the trainer's state, after checking that every file of the checkpoint is what was written."""
    try:
        has_checksums = (checkpoint / _CHECKSUMS).is_file()
        if has_checksums:
            _verify(checkpoint)
        document = _read_json(checkpoint)
        found = document.pop("format", None)
        if found == 2:  # holds the checksums of all files but itself
            _compare(checkpoint, document.pop("files"))
        elif found != FORMAT:
            raise CheckpointError(
                f"{checkpoint}: written in format {found}, this version reads formats 2 and {FORMAT}; use the version "
                "of dapo that wrote it"
            )
        elif not has_checksums:
            raise CheckpointError(_damaged(checkpoint, f"{_CHECKSUMS} is missing"))
        return _from_document(document)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(_damaged(checkpoint, f"{type(error).__name__}: {error}")) from error


def _write_checksums(draft: Path) -> None:
    """In the format of sha256sum, so that `sha256sum --check trainer/SHA256SUMS` works."""
    lines = [f"{_digest(path)}  {path.relative_to(draft)}\n" for path in _files(draft)]
    (draft / _CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def _files(checkpoint: Path) -> list[Path]:
    """All files but the checksums and hidden ones, which file systems and desktops leave behind."""
    found = (path for path in checkpoint.rglob("*") if path.is_file() and not path.name.startswith("."))
    return sorted(path for path in found if path != checkpoint / _CHECKSUMS)


def _verify(checkpoint: Path) -> None:
    """A file that is not listed counts as damage: transformers reads files by name, whoever put them there."""
    lines = (checkpoint / _CHECKSUMS).read_text(encoding="utf-8").splitlines()
    written = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    _compare(checkpoint, written)
    there = {str(path.relative_to(checkpoint)) for path in _files(checkpoint)}
    if unknown := sorted(there - written.keys()):
        raise CheckpointError(
            f"{checkpoint}: holds files that do not belong to the checkpoint ({', '.join(unknown[:3])}); move them away"
        )


def _compare(checkpoint: Path, written: Mapping[str, str]) -> None:
    for name, digest in written.items():
        if _digest(checkpoint / name) != digest:
            raise CheckpointError(_damaged(checkpoint, f"{name} is not what was written"))


def _read_json(checkpoint: Path) -> dict[str, Any]:
    try:
        document = json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise TypeError(f"{_STATE} holds a {type(document).__name__}")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(_damaged(checkpoint, f"{type(error).__name__}: {error}")) from error
    return document


def restore(checkpoint: Path, policy: Savable) -> None:
    """Optimizer and adapters; a full model's weights are loaded from the checkpoint directory as from any other."""
    try:
        policy.restore(checkpoint)
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise CheckpointError(_damaged(checkpoint, f"the optimizer's state does not fit: {error}")) from error


def _all(folder: Path) -> dict[int, Path]:
    """Complete checkpoints by step."""
    if not folder.is_dir():
        return {}
    matches = ((_STEP.fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in matches if match and path.is_dir()}


def _marked_in_format_2(folder: Path) -> Best | None:
    """Checkpoints of format 2 had the mark in a file of its own."""
    path = folder / "best.json"
    try:
        return _best_from(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: expected step, metric and value ({type(error).__name__}: {error}); delete the file to continue "
            "without a best checkpoint"
        ) from error


def _damaged(checkpoint: Path, why: str) -> str:
    others = sorted(step for step, path in _all(checkpoint.parent).items() if path != checkpoint)
    remedy = (
        f"delete this folder to resume from step {others[-1]}"
        if others
        else "there is no other one: restore it from a copy, or start again under another run.name"
    )
    return f"{checkpoint}: the checkpoint is damaged ({why}); {remedy}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _PromptData(TypedDict):
    uid: str
    messages: list[dict[str, Any]]
    tokens: list[int]
    answer: Any
    data_source: str
    extra: dict[str, Any]
    is_text: bool


class _RolloutData(TypedDict):
    serial: int
    index: int
    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_version: int
    text: str
    switches: NotRequired[list[int]]  # absent from checkpoints that were written before there was an in-flight mode


class _ScoreData(TypedDict):
    value: float | None
    acc: bool | None
    error: str | None
    extras: dict[str, Any]


class _GroupData(TypedDict):
    serial: int
    prompt: _PromptData
    rollouts: list[_RolloutData]
    scores: list[_ScoreData]
    rewards: list[float]
    advantages: list[float]
    trains: list[bool]
    verdict: str
    ref_logprobs: list[list[float]] | None


class _PendingData(TypedDict):
    serial: int
    prompt: _PromptData


class _BestData(TypedDict):
    step: int
    metric: str
    value: float


class _StateData(TypedDict):
    """The types of state.json, checked strictly when it is read."""

    step: int
    version: int
    positions: list[int]
    data_digest: str
    next_serial: int
    recent: list[bool]
    empty_in_a_row: int
    non_finite_in_a_row: int
    considered: int
    ledger: dict[str, list[int]]
    carried: list[_GroupData]
    pending: NotRequired[list[_PendingData]]
    best: NotRequired[_BestData | None]


_STATE_TYPES = TypeAdapter(_StateData)


def _to_document(state: TrainerState) -> dict[str, Any]:
    own = {f.name: getattr(state, f.name) for f in fields(state) if f.name not in ("carried", "pending", "best")}
    return {
        "format": FORMAT,
        **own,
        "carried": [_to_json(group) for group in state.carried],
        "pending": [{"serial": serial, "prompt": asdict(prompt)} for serial, prompt in state.pending.items()],
        "best": asdict(state.best) if state.best else None,
    }


def _from_document(document: dict[str, Any]) -> TrainerState:
    try:
        _STATE_TYPES.validate_python(document, strict=True, extra="forbid")
    except ValidationError as error:
        fault = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, fault['loc']))} in {_STATE}: {fault['msg']}") from None
    carried = [_from_json(group) for group in document.pop("carried")]
    pending = {item["serial"]: _prompt(item["prompt"]) for item in document.pop("pending", ())}
    marked = _best_from(document.pop("best", None))
    return TrainerState(**document, carried=carried, pending=pending, best=marked)


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
