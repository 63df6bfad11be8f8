"""Functions of the user that options name: in files, as `path/to/file.py:function`, or given to the trainer."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from dapo.config.base import PYTHON, is_file_function
from dapo.config.sampling_options import TOOLS
from dapo.config.schema import Config
from dapo.errors import ConfigError, DapoError, PartError

# The option of each part, by its field in CustomParts.
PART_OPTIONS = {
    "advantage": "algorithm.advantage",
    "loss": "algorithm.loss",
    "group_filter": "algorithm.filter_groups.function",
    "length_shaping": "reward.length_shaping",
    "lr_schedule": "optim.lr_schedule",
}


@dataclass(frozen=True, slots=True)
class CustomParts:
    """Functions that replace parts of the algorithm; None: as the option says. See docs/how-to/custom-parts.md."""

    advantage: Callable[..., Any] | None = None  # (rewards of a group) -> advantages
    loss: Callable[..., Any] | None = None  # (logprobs, old logprobs, advantages, responses, config) -> loss per token
    group_filter: Callable[..., Any] | None = None  # (group) -> "kept", or the reason why it is dropped
    length_shaping: Callable[..., Any] | None = None  # (reward, length, max_length, is_cut_off) -> added to the reward
    lr_schedule: Callable[..., Any] | None = None  # (step, total steps) -> factor of the learning rate


class UserFunction:
    """A function of the user with the name by which messages refer to it: its option and its place."""

    def __init__(self, option: str, spec: str, function: Callable[..., Any]) -> None:
        self.name = f"{option}: {spec.removeprefix(PYTHON)}"
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self.function(*arguments)
        except Exception as error:
            # A GPU out of memory is not the function's fault: the update retries with smaller micro-batches.
            if isinstance(error, DapoError) or type(error).__name__ == "OutOfMemoryError":
                raise
            raise PartError(f"{self.name} raised {_described(error)}") from error

    def __str__(self) -> str:
        return self.name


def load_parts(config: Config, given: CustomParts | None = None) -> CustomParts:
    """Return the functions of all parts that are not built in: those given as objects, and those in files."""
    found: dict[str, UserFunction] = {}
    for name, spec in _specs(config).items():
        option, function = PART_OPTIONS[name], getattr(given, name, None)
        if function is None and spec.startswith(PYTHON):
            raise PartError(
                f"{option} is '{spec}': this part of the run was a Python object; pass it to Trainer again, or name it "
                "as path/to/file.py:function"
            )
        found[name] = UserFunction(option, spec, function or load_function(spec, option))
    return CustomParts(**found)


def with_objects(config: Config, given: CustomParts) -> Config:
    """Return the configuration with `python:NAME` for each given object, so that the run's records name it."""
    if not isinstance(given, CustomParts):
        raise PartError(f"parts is a {type(given).__name__}; expected dapo.CustomParts(loss=..., ...)")
    changes: dict[str, Any] = {}
    for part in fields(given):
        function = getattr(given, part.name)
        if function is not None and not callable(function):
            raise PartError(f"the part {part.name} is a {type(function).__name__}; expected a function")
        if function is not None:
            changes[PART_OPTIONS[part.name]] = f"{PYTHON}{getattr(function, '__name__', type(function).__name__)}"
    for option, spec in changes.items():
        config = _with_option(config, option.split("."), spec)
    try:
        config.check_rules()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config


def _with_option(section: Any, names: Sequence[str], value: str) -> Any:
    name, *rest = names
    return section.model_copy(update={name: _with_option(getattr(section, name), rest, value) if rest else value})


def objects_for_learners(config: Config, given: CustomParts | None) -> CustomParts | None:
    """Return the parts of an update that are objects and must be sent to other processes; None if there are none."""
    specs = _specs(config)
    names = [name for name in ("loss", "lr_schedule") if specs.get(name, "").startswith(PYTHON)]
    return CustomParts(**{name: getattr(given, name) for name in names}) if names else None


def with_absolute_files(config: Config) -> Config:
    """Return the configuration with absolute paths of the parts' files, for processes that start elsewhere."""
    for name, spec in _specs(config).items():
        if is_file_function(spec):
            path, _, function = spec.rpartition(":")
            config = _with_option(config, PART_OPTIONS[name].split("."), f"{Path(path).absolute()}:{function}")
    return config


def file_digests(config: Config) -> dict[str, str]:
    """Return, by option, a digest of each file with a function of the user. A resume reports what has changed."""
    use = config.reward.use
    rewards = {"reward.use": use} if isinstance(use, str) else {f"reward.use {judge}": judge for judge in use}
    specs = {PART_OPTIONS[name]: spec for name, spec in _specs(config).items()} | rewards
    environment = (config.environment.use or "").removeprefix(TOOLS)
    specs["environment.use"] = f"{environment}:tools" if environment.endswith(".py") else environment
    return {
        f"file of {option}": _digest(spec.rpartition(":")[0], option)
        for option, spec in specs.items()
        if is_file_function(spec)
    }


def _specs(config: Config) -> dict[str, str]:
    """Return what the options say for the parts that are not built in."""
    values = {name: config.option(option) for name, option in PART_OPTIONS.items()}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, str) and (value.startswith(PYTHON) or is_file_function(value))
    }


def load_function(spec: str, option: str, error: type[DapoError] = PartError) -> Callable[..., Any]:
    """Import the function that `path/to/file.py:function` names; `option` is the one that names it, for messages."""
    path, colon, name = spec.rpartition(":")
    if not colon or not path or not name:
        raise error(f"{option} is '{spec}'; expected path/to/file.py:function")
    module = load_module(path, option, error)
    function = getattr(module, name, None)
    if not callable(function):
        available = ", ".join(key for key, value in vars(module).items() if _is_available(value, module)) or "none"
        raise error(f"{option}: {path} has no function or class '{name}'; available: {available}")
    return function


def _is_available(value: Any, module: ModuleType) -> bool:
    return inspect.isfunction(value) or (inspect.isclass(value) and value.__module__ == module.__name__)


def load_module(path: str, option: str, error: type[DapoError] = PartError) -> ModuleType:
    """Import a file of the user."""
    if not Path(path).is_file():
        raise error(f"{option}: there is no file {path}; relative paths start at the working directory")
    try:
        return _module(str(Path(path).absolute()), _digest(path, option))
    except (Exception, SystemExit) as fault:
        if isinstance(fault, DapoError):
            raise error(str(fault)) from fault
        raise error(f"{option}: {path} cannot be imported ({type(fault).__name__}: {fault})") from fault


@lru_cache
def _module(path: str, digest: str) -> ModuleType:
    """Import a file, once in each process unless its content changes: several options may name functions in it."""
    folder = Path(path).resolve().parent
    _refuse_other_neighbors(folder)
    name = f"dapo_user_{Path(path).stem}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ImportError("it is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    # Import as if the file were run from its own folder. Its functions can import files beside it, now and later, and
    # dataclasses find their module.
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(folder))
    _USER_FOLDERS.add(folder)
    module_spec.loader.exec_module(module)
    return module


_USER_FOLDERS: set[Path] = set()


def _refuse_other_neighbors(folder: Path) -> None:
    """Raise if a file in the folder has the name of a module that a user's file in another folder has imported."""
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "/")
        is_users = file.parent in _USER_FOLDERS - {folder} and name == file.stem
        if is_users and (folder / file.name).is_file():
            raise ImportError(f"{file} is imported already, and {folder / file.name} has the same name; rename one")


def _digest(path: str, option: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise PartError(f"{option}: {path} cannot be read ({error.strerror or error})") from None


def _described(error: Exception) -> str:
    """Return the exception with the file and line that raised it, unless it is the call itself that fails."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    text = " ".join(str(error).split())
    where = f" ({Path(frame.f_code.co_filename).name}:{line})" if frame.f_code.co_filename != __file__ else ""
    return f"{type(error).__name__}: {text}{where}"
