"""Find out how this package was installed, for messages that say how to install something more."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

_NAME = "dapo-rl"
_ROOT = Path(__file__).parents[2]


def install_hint(extra: str) -> str:
    """Return the command that installs an optional part, such as `view`: from PyPI, or from the checkout in use."""
    return f"pip install {_source(f'[{extra}]')}"


def _source(extra: str = "") -> str:
    if not (_ROOT / "pyproject.toml").is_file():
        return f"'{_NAME}{extra}'" if extra else _NAME
    folder = "." if Path.cwd() == _ROOT else str(_ROOT)
    return f"-e '{folder}{extra}'"


def other_package() -> str | None:
    """Return a sentence if the unrelated package `dapo` of PyPI, which has the same import name, is installed."""
    for found in metadata.distributions(name="dapo"):
        if found.read_text("direct_url.json") is None:  # a local folder or file has one: an earlier version of this one
            reinstall = f"pip install --force-reinstall --no-deps {_source()}"
            return (
                f"the package dapo {found.version} from PyPI is installed, which has nothing to do with this one and "
                f"overwrites its files; run `pip uninstall dapo`, then `{reinstall}`"
            )
    return None
