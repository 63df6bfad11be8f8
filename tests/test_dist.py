"""The wheel and the source distribution hold the whole package, and the wheel trains where nothing else is known."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests import runs

ROOT = Path(__file__).parent.parent


def build(source: Path, out: Path, kind: str) -> Path:
    options = [f"--{kind}", "--no-isolation", "--outdir", str(out)]
    subprocess.run([sys.executable, "-m", "build", *options, str(source)], check=True, capture_output=True)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build", reason="distributions are built with the package build")
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_every_file_of_the_package(wheel: Path):
    package = {
        str(path.relative_to(ROOT)): path.read_bytes()
        for path in (ROOT / "dapo").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"dapo/view/page/page.js", "dapo/view/page/page.css", "dapo/view/report.html"} <= package.keys()
    assert {name: data for name, data in contents(wheel).items() if name.startswith("dapo/")} == package


def test_the_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path):
    source = build(ROOT, tmp_path / "sdist", "sdist")
    subprocess.run(["tar", "--extract", "--file", source, "--directory", tmp_path], check=True)
    unpacked = tmp_path / source.name.removesuffix(".tar.gz")
    assert (unpacked / "recipes" / "guess_five.yaml").exists()
    assert contents(build(unpacked, tmp_path / "wheel", "wheel")) == contents(wheel)


@pytest.mark.slow
def test_the_wheel_installed_in_an_environment_of_its_own_trains_and_reports(wheel: Path, tmp_path: Path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    bin = tmp_path / "venv" / "bin"
    (libraries,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # Torch and the rest are taken from here. A path in a .pth file does not bring along an editable install of dapo.
    (libraries / "present.pth").write_text(sysconfig.get_path("purelib"))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "pip", "--python", bin / "python", "install", "--no-index", wheel)
    assert str(libraries) in run(bin / "python", "-c", "import dapo; print(dapo.__file__)")
    recipe = runs.recipe(tmp_path, run={"dir": "runs", "steps": 1})
    assert "the run is in runs/recipe" in run(bin / "dapo", "train", recipe)
    run(bin / "dapo", "report", "runs/recipe", "--out", "report.html")
    assert (tmp_path / "report.html").stat().st_size > 10_000
