"""The texts of single tokens, by the tokenizer of the run's newest checkpoint, or that of the model it started from."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from dapo.view.source import Run, configuration

Decode = Callable[[int], str]
FindModel = Callable[[str], Path | None]  # from `model.path` to the folder of the model, where it is on this machine


def decoder(root: Path, find_model: FindModel, run: Run) -> Decode:
    """Where there is no tokenizer, tokens are shown by their numbers."""
    file = _newest_saved(root, run) or _of_model(find_model, run)
    return _by_number if file is None else _decoding(file, os.path.getmtime(file))


def _newest_saved(root: Path, run: Run) -> str | None:
    home = Path(os.path.realpath(root))
    saved = map(os.path.realpath, run.path.parent.glob("checkpoints/*/tokenizer.json"))
    # Links that lead out of the folder are not followed, as with databases.
    within = (path for path in saved if Path(path).is_relative_to(home) and os.path.isfile(path))
    return max(within, key=os.path.getmtime, default=None)


def _of_model(find_model: FindModel, run: Run) -> str | None:
    path = str(configuration(run).get("model.path", ""))
    try:
        folder = find_model(path)
        file = None if folder is None else folder / "tokenizer.json"
        return str(file) if file is not None and file.is_file() else None
    except (OSError, ValueError):  # no path that there could be
        return None


def _by_number(token: int) -> str:
    return f"⟨{token}⟩"


@lru_cache(maxsize=4)
def _decoding(path: str, changed: float) -> Decode:
    """`changed` is there so that a file that was written anew is read anew."""
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception:  # the library raises nothing narrower; a broken file must not keep the numbers from being shown
        return _by_number

    def decode(token: int) -> str:
        piece = tokenizer.decode([token], skip_special_tokens=False)
        # Alone, a word of SentencePiece loses the space in front of it.
        has_space = (tokenizer.id_to_token(token) or "").startswith("▁")
        return f" {piece}" if has_space and not piece.startswith(" ") else piece

    return decode
