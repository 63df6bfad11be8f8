"""The place of the cache folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapo.errors import ConfigError
from dapo.system.cache import cache_dir


def test_environment_variables_move_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAPO_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_dir() == Path("/a")
    monkeypatch.delenv("DAPO_CACHE")
    assert cache_dir() == Path("/b/dapo")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "dapo"


@pytest.mark.usefixtures("no_home")
def test_a_user_without_a_home_folder_is_told_to_name_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"~/\.cache/dapo: the home folder is not known; set DAPO_CACHE"):
        cache_dir()
    monkeypatch.setenv("DAPO_CACHE", "/a")
    assert cache_dir() == Path("/a")
