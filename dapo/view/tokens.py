"""Per-token data of one response: its text, what was recorded for each token, and which tokens the loss clipped."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from dapo.algorithm.ratio import LossConfig, clip_marks, importance_ratio, surrogates
from dapo.errors import CheckpointError
from dapo.store.encoding import FLOATS, TOKENS, given_from_json, switches_from_json
from dapo.types import token_versions
from dapo.view.source import Run, configuration, number_option, read_configuration

Clip = Literal["low", "high", "dual"]
Decode = Callable[[int], str]
FindModel = Callable[[str], Path | None]  # from `model.path` to the model's folder, or None if it is not local


@dataclass(frozen=True, slots=True, eq=False)
class ResponseTokens:
    """A slice of a response's tokens. Values of its first update are None if it was not trained on."""

    start: int  # position of the first token in the response
    length: int  # tokens in the whole response
    ids: np.ndarray  # int32 [count]
    pieces: tuple[str, ...]
    given: np.ndarray  # bool [count], whether an environment gave the token: the values below mean nothing there
    versions: np.ndarray  # int64 [count], version of the weights that sampled each token
    sampler_logprobs: np.ndarray  # float32 [count]
    advantage: float | None
    # At the first update of the group:
    policy_logprobs: np.ndarray | None  # float32 [count]
    ratio: np.ndarray | None  # float32 [count]
    entropy: np.ndarray | None  # float32 [count]
    clips: tuple[Clip | None, ...] | None  # [count]; None also if the loss does not clip each token's ratio


def tokens(
    run: Run, serial: int, sample: int, decode: Decode, start: int = 0, limit: int = 4096
) -> ResponseTokens | None:
    """Return up to `limit` tokens of a response from `start` on, or None if they were not stored.

    `run.store_tokens` decides whose tokens are stored.
    """
    with run.snapshot() as database:
        row = database.execute(
            "SELECT weight_version, switches, given, advantage, tokens, sampler_logprobs, policy_logprobs, entropy"
            " FROM rollouts LEFT JOIN rollout_tokens USING (serial, sample) WHERE serial = ? AND sample = ?",
            (serial, sample),
        ).fetchone()
        if row is None:
            raise CheckpointError(
                f"{run.path}: there is no response {sample} of a group {serial} (it may have been undone by a resume)"
            )
        if row["tokens"] is None:
            return None
        config = _clip_options(read_configuration(database, run.path))
        return _tokens(row, config, decode, slice(start, start + limit))


def clips(ratio_T: np.ndarray, advantage: float, config: LossConfig) -> tuple[Clip | None, ...]:
    """Return which clip bounded the loss of each token, computed as in training: in float32."""
    advantage_32 = np.full_like(ratio_T, advantage)
    marks = clip_marks(*surrogates(ratio_T, advantage_32, config), advantage_32, config)
    found = np.full(len(ratio_T), None)
    for name, mark in marks.items():  # the dual clip comes last, because it overrides the lower one
        found[mark] = name
    return tuple(found)


def _tokens(row: sqlite3.Row, config: LossConfig | None, decode: Decode, part: slice) -> ResponseTokens:
    ids_T = np.frombuffer(row["tokens"], TOKENS)[part]
    sampler_T = np.frombuffer(row["sampler_logprobs"], FLOATS)[part]
    policy_T, entropy_T = (
        None if row[name] is None else np.frombuffer(row[name], FLOATS)[part] for name in ("policy_logprobs", "entropy")
    )
    ratio_T = None
    if policy_T is not None:
        ratio_T = importance_ratio(policy_T, sampler_T)
    arrays = [each for each in (sampler_T, policy_T, entropy_T) if each is not None]
    if any(len(each) != len(ids_T) for each in arrays) or np.any(ids_T < 0):
        raise ValueError("a response's token ids and log-probabilities do not match")
    switches = switches_from_json(row["switches"])
    positions_T = np.arange(part.start, part.start + len(ids_T))
    given_T = np.zeros(len(ids_T), bool)
    for first, end in given_from_json(row["given"]):
        given_T |= (positions_T >= first) & (positions_T < end)
    return ResponseTokens(
        start=part.start,
        length=len(row["tokens"]) // np.dtype(TOKENS).itemsize,  # the column counts only what the model sampled
        ids=ids_T,
        pieces=tuple(decode(int(token)) for token in ids_T),
        given=given_T,
        versions=token_versions(row["weight_version"], switches, positions_T),
        sampler_logprobs=sampler_T,
        advantage=row["advantage"],
        policy_logprobs=policy_T,
        ratio=ratio_T,
        entropy=entropy_T,
        clips=None if ratio_T is None or config is None else clips(ratio_T, row["advantage"] or 0.0, config),
    )


def _clip_options(options: Mapping[str, Any]) -> LossConfig | None:
    """Return the bounds of the clip, or None if the loss is not one that clips the ratio of trainer to sampler."""
    uses_vllm = options.get("rollout.engine") == "vllm" or "cluster.rollout_workers.vllm" in options
    corrections = ("none",) if uses_vllm else ("auto", "none")
    if (
        options.get("algorithm.loss", "dapo") not in ("dapo", "grpo", "dr_grpo")
        or options.get("algorithm.importance_correction", "none") not in corrections
    ):
        return None
    prefix = "algorithm.clip_ratio_"
    low, high, dual = (number_option(options, f"{prefix}{name}") for name in ("low", "high", "c"))
    if low is None or high is None:
        raise ValueError(f"the configuration has no {prefix}low or {prefix}high")
    return LossConfig(low, high, dual)


def decoder(root: Path, find_model: FindModel, run: Run) -> Decode:
    """Return a function from token id to text, or to the id in brackets if there is no tokenizer.

    It is that of the run's newest checkpoint, or else of the model that the run started from.
    """
    file = _checkpoint_tokenizer(root, run) or _model_tokenizer(find_model, run)
    return _show_id if file is None else _load_decoder(file, os.path.getmtime(file))


def _checkpoint_tokenizer(root: Path, run: Run) -> str | None:
    home = Path(os.path.realpath(root))
    saved = map(os.path.realpath, run.path.parent.glob("checkpoints/*/tokenizer.json"))
    # Links that lead out of the folder are not followed, as for databases.
    within = (path for path in saved if Path(path).is_relative_to(home) and os.path.isfile(path))
    return max(within, key=os.path.getmtime, default=None)


def _model_tokenizer(find_model: FindModel, run: Run) -> str | None:
    path = str(configuration(run).get("model.path", ""))
    try:
        folder = find_model(path)
        file = None if folder is None else folder / "tokenizer.json"
        return str(file) if file is not None and file.is_file() else None
    except (OSError, ValueError):  # not a valid path
        return None


def _show_id(token: int) -> str:
    return f"⟨{token}⟩"


@lru_cache(maxsize=4)
def _load_decoder(path: str, changed: float) -> Decode:
    """Load a tokenizer file. `changed` is part of the cache key, so a file that was rewritten is loaded again."""
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception:  # the library raises nothing narrower; with a broken file the view still shows token ids
        return _show_id

    def decode(token: int) -> str:
        piece = tokenizer.decode([token], skip_special_tokens=False)
        # Decoding a SentencePiece word alone drops its leading space.
        has_space = (tokenizer.id_to_token(token) or "").startswith("▁")
        return f" {piece}" if has_space and not piece.startswith(" ") else piece

    return decode
