"""The command line: the list of commands, and errors as one sentence."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
import typer.core
from rich.console import Console

from dapo import __version__
from dapo.commands import ablate, convert, data, judging, runs, training
from dapo.config import option_names
from dapo.errors import DISK_FAULTS, ConfigError, DapoError, NotReady, StorageError, did_you_mean

_LONG_OPTION = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)


class Command(typer.core.TyperCommand):
    """A command that refuses an unknown --option with the option of a run that may be meant: --steps is run.steps."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        given = args[: args.index("--")] if "--" in args else args
        for argument, following in zip(given, [*given[1:], ""], strict=True):
            found = _LONG_OPTION.fullmatch(argument)
            if found and f"--{found[1]}" not in known:
                raise ConfigError(_unknown_option(ctx.command_path, found[1], found[2] or following, known))
        return super().parse_args(ctx, args)


def _unknown_option(command: str, name: str, value: str, known: set[str]) -> str:
    sentence = f"--{name} is not an option of {command}"
    last = name.replace("-", "_")
    meant = [option for option in option_names() if f".{option}".endswith(f".{last}")]
    if not meant and (hint := did_you_mean(f"--{name}", known)):
        return sentence + hint
    value = "..." if value.startswith("-") or "=" in value or not value else value
    examples = " or ".join(f"{option}={value}" for option in meant[:3]) or "for example optim.lr=1e-5"
    return f"{sentence}; options of a run are given without dashes: {examples}"


_SETTINGS = {"help_option_names": ["-h", "--help"]}  # subcommands inherit it
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, context_settings=_SETTINGS)
app.command(cls=Command)(training.train)
app.command("resume", cls=Command)(training.resume_run)
app.command(cls=Command)(runs.metrics)
app.command(cls=Command)(runs.view)
app.command(cls=Command)(runs.report)
app.command("eval", cls=Command)(judging.evaluate)
app.command(cls=Command, context_settings={"ignore_unknown_options": True})(judging.judge)  # a response may be -5
app.command(cls=Command)(ablate.ablate)
app.command(cls=Command)(training.plan)
app.command(cls=Command)(training.profile)
app.command(cls=Command)(runs.export)
app.command(cls=Command)(convert.convert)
data_app = typer.Typer(no_args_is_help=True, help="Check a dataset, or write a well-known one.")
app.add_typer(data_app, name="data")
data_app.command(cls=Command)(data.check)
data_app.command(cls=Command)(data.prepare)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dapo {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train language models by reinforcement learning from verifiable rewards, with DAPO."""


@app.command()
def doctor() -> None:
    """Check what this machine has and what is missing."""
    from dapo.doctor import check, is_usable, print_table

    findings = check()
    print_table(Console(), findings)
    raise typer.Exit(0 if is_usable(findings) else 1)


@contextmanager
def sentences() -> Iterator[None]:
    """Turn what the user can fix into one sentence on standard error and an exit code, without a traceback."""
    try:
        yield
    except NotReady as error:
        for sentence in error.sentences[:-1]:
            _print_error(sentence)
        _fail(error.sentences[-1], error.exit_code)
    except DapoError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        # No permission, no space, a file instead of a folder: the user can fix it if the error names the file.
        if error.filename is None and error.errno not in DISK_FAULTS:
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        is_disk = error.errno in DISK_FAULTS
        _fail(f"{where}{error.strerror}", StorageError.exit_code if is_disk else DapoError.exit_code)
    except MemoryError:
        _fail("this machine has too little memory; lower the batch sizes or lengths, or use a smaller model", 3)
    except KeyboardInterrupt:
        sys.exit(130)


def main() -> None:
    """Run the command line."""
    with sentences():
        app()


_MAX_SHOWN = 1000


def _fail(sentence: str, exit_code: int) -> NoReturn:
    _print_error(sentence)
    sys.exit(exit_code)


def _print_error(sentence: str) -> None:
    # File names can contain newlines, escape sequences, and bytes that are not text.
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in sentence)
    if len(shown) > 2 * _MAX_SHOWN:
        shown = f"{shown[:_MAX_SHOWN]} ... {shown[-_MAX_SHOWN:]}"
    Console(stderr=True, soft_wrap=True).print(f"error: {shown}", style="red", markup=False, highlight=False)
