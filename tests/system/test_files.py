"""Tests of atomic files and folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapo.system.files import atomic_folder, write_text


def test_a_place_that_cannot_be_written_is_named_and_not_the_hidden_temporary_one():
    final = Path("/proc/model")  # where nobody can create a file, not even root
    with pytest.raises(OSError, match="/proc/model") as of_folder, atomic_folder(final):
        pass
    with pytest.raises(OSError, match="/proc/model") as of_file:
        write_text(final, "text")
    assert of_folder.value.filename == of_file.value.filename == str(final)
