"""Decode single tokens with the tokenizer of the run's newest checkpoint, or else of the model it started from."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from dapo.view.source import Run, configuration

Decode = Callable[[int], str]
FindModel = Callable[[str], Path | None]  # from `model.path` to the model's folder, or None if it is not local


def decoder(root: Path, find_model: FindModel, run: Run) -> Decode:
    """Return a function from token id to text. Without a tokenizer it returns the id in brackets."""
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
