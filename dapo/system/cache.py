"""The cache folder for models and compiled kernels. Whatever has its final name there is complete."""

from __future__ import annotations

import os
from pathlib import Path

from dapo.errors import ConfigError


def cache_dir() -> Path:
    own = os.environ.get("DAPO_CACHE")
    path = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "dapo"
    try:
        return path.expanduser()
    except RuntimeError:  # as in a container whose user has no name, where HOME is not set either
        sentence = f"{path}: the home folder is not known; set DAPO_CACHE to a folder that can be written"
        raise ConfigError(sentence) from None
