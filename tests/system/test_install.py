"""Hints on how to install something name a command that works where they are printed."""

from __future__ import annotations

import sys
from pathlib import Path

from dapo import doctor
from dapo.system import install
from dapo.system.install import install_hint, other_package

ROOT = Path(__file__).parents[2]


def test_a_checkout_is_installed_from_its_folder_and_a_package_from_the_index(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert install_hint("view") == "pip install -e '.[view]'"
    monkeypatch.chdir(tmp_path)
    assert install_hint("view") == f"pip install -e '{ROOT}[view]'"
    monkeypatch.setattr(install, "_ROOT", tmp_path)  # as in site-packages, where there is no pyproject.toml
    assert install_hint("view") == "pip install 'dapo-rl[view]'"


def installed(folder: Path, *files: tuple[str, str]) -> None:
    record = folder / "dapo-3.1.dist-info"
    record.mkdir(parents=True)
    for name, text in (("METADATA", "Metadata-Version: 2.1\nName: dapo\nVersion: 3.1\n"), *files):
        (record / name).write_text(text)


def test_the_other_package_of_this_name_is_reported_with_the_remedy(tmp_path, monkeypatch):
    installed(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor, "_index_answers", lambda: True)
    sentence = other_package() or ""
    assert sentence.startswith("the package dapo 3.1 from PyPI is installed")
    assert "`pip uninstall dapo`" in sentence and "\n" not in sentence
    assert any(finding.detail == sentence for finding in doctor.check(tmp_path))


def test_an_earlier_version_of_this_package_is_not_taken_for_the_other_one(tmp_path, monkeypatch):
    installed(tmp_path, ("direct_url.json", '{"url": "file:///somewhere", "dir_info": {"editable": true}}'))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert other_package() is None
