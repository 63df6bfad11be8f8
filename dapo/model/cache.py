"""The folder for fetched and converted models: whatever lies there under its final name is complete."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    if own := os.environ.get("DAPO_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dapo"
