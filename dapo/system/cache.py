"""The cache folder for fetched and converted models. Whatever has its final name there is complete."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    if own := os.environ.get("DAPO_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dapo"
