"""The commands `dapo train` and `dapo resume`: the options and the name of a run, and what is printed at its end."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dapo.config import Config
from dapo.evaluation.evaluate import differences
from dapo.store.configuration import is_run, recorded_config
from dapo.terminal.console import ConsoleReporter, Verbosity, before_after_table
from dapo.training.run_directory import shown
from dapo.training.trainer import Trainer


def start_training(
    console: Console, config: Config, overrides: Sequence[str], recipe: str, verbosity: Verbosity = "normal"
) -> int | None:
    """Train a new run. If its folder holds another run, take the next free name, unless the name is an override."""
    _print_options(console, config, verbosity)
    has_given_name = any(override.startswith("run.name=") for override in overrides)
    reporter = ConsoleReporter(console, verbosity)
    trainer = Trainer(config, reporter=reporter, recipe=recipe, next_name=not has_given_name)
    return _run(console, trainer)


def resume_training(
    console: Console,
    config: Config,
    overrides: Sequence[str],
    recipe: str | None = None,
    verbosity: Verbosity = "normal",
) -> int | None:
    """Continue the run in `config.run_dir` with its own options, changed only by `overrides`.

    If `config` is from a recipe, the options in which it differs from the run are listed.
    """
    if is_run(config.run_dir):  # otherwise the trainer reports what is wrong
        own = recorded_config(config.run_dir, overrides).renamed(config.run.name, config.run.dir)
        for key, (ours, theirs) in own.differences(config).items():
            line = f"{key} stays {shown(ours)}, as in the run so far; the recipe has {shown(theirs)}"
            console.print(f"{line}: give {key}=... to change it", style="yellow", markup=False, soft_wrap=True)
        config = own
    _print_options(console, config, verbosity)
    return _run(console, Trainer(config, resume=True, reporter=ConsoleReporter(console, verbosity), recipe=recipe))


def _print_options(console: Console, config: Config, verbosity: Verbosity) -> None:
    if verbosity == "verbose":
        console.print(config.to_yaml().rstrip(), style="dim", markup=False, highlight=False, soft_wrap=True)


def _run(console: Console, trainer: Trainer) -> int | None:
    """Train, print the result, and return the signal that ended the run early."""
    try:
        result = trainer.train()
    finally:
        trainer.close()
    config = trainer.config
    after = {report.name: report for report in result.after}
    for before in result.before:
        if before.name in after:
            console.print(before_after_table(before, after[before.name], differences(before, after[before.name])))
    lines = [
        f"{result.steps} step{'s' * (result.steps != 1)}, {result.seconds:.0f} s of training; the run is in "
        f"{result.run_dir}",
        f"{_program()} view {config.run.dir} shows it in the browser, at http://127.0.0.1:8080/",
    ]
    if result.signal is not None:
        lines.append(f"to continue: {_program()} resume {result.run_dir}")
    console.print(*lines, sep="\n", soft_wrap=True, markup=False)
    return result.signal


def _program() -> str:
    """Return what a user types to start this program: its path, if the shell finds no or another `dapo`."""
    program = sys.argv[0]
    return program if Path(program).name == "dapo" and program != shutil.which("dapo") else "dapo"
