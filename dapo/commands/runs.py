"""`dapo metrics`, `view`, `report`, `export`: what a run that exists can show."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dapo.errors import ConfigError, ModelError
from dapo.system.install import install_hint


def metrics(
    run: Annotated[Path, typer.Argument(help="A run directory, for example runs/guess_five.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per step.")] = False,
) -> None:
    """Print the metrics of every step of a run, its evaluations and its newest events."""
    from dapo.store.configuration import check_is_run
    from dapo.terminal.history import json_lines, print_history

    check_is_run(run)
    if as_json:
        for line in json_lines(run):
            sys.stdout.write(line + "\n")
    else:
        print_history(Console(), run)


def view(
    runs: Annotated[
        Path, typer.Argument(help="A folder of runs, one run directory, or the folder of an ablation.")
    ] = Path("runs"),
    host: Annotated[str, typer.Option("--host", help="Address to listen on; other machines need a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free port.")] = 8080,
    token: Annotated[
        str | None,
        typer.Option("--token", envvar="DAPO_VIEW_TOKEN", help="Token that visitors need; default: random."),
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
) -> None:
    """Show runs in the browser, even while they train: curves, groups, tokens, prompts, warnings."""
    try:
        from dapo.view.page.server import address, serve
    except ModuleNotFoundError as error:
        if error.name != "nicegui":
            raise
        raise ConfigError(f"the page needs NiceGUI: {install_hint('view')}") from None
    where = address(host, port, token)
    serve(
        runs,
        where,
        opens=not no_open,
        find_model=_model_folder,
        ready=lambda: typer.echo(f"{runs} is shown at {where.url} (Ctrl-C to stop)"),
    )


def report(
    run: Annotated[Path, typer.Argument(help="A run directory, for example runs/guess_five.")],
    out: Annotated[Path | None, typer.Option("--out", help="The file to write; default: RUN-report.html here.")] = None,
) -> None:
    """Write a run as one HTML file that needs no server: curves, evaluations, groups, events and options."""
    from dapo.view.report import write_report

    file = out or Path(f"{run.resolve().name}-report.html")
    write_report(run, file)
    typer.echo(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB)")


def export(
    run: Annotated[Path, typer.Argument(help="A run directory, for example runs/guess_five.")],
    to: Annotated[Path, typer.Option("--to", help="Where to write the Hugging Face directory.")],
    which: Annotated[
        str | None, typer.Option("--which", help="best, last or a step; default: best if one is marked, else last.")
    ] = None,
    adapters: Annotated[bool, typer.Option("--adapters", help="Write the LoRA adapters alone, not merged.")] = False,
) -> None:
    """Write a checkpoint's model with a model card as a plain Hugging Face directory."""
    with Console().status("exporting"):
        from dapo.checkpoint.export import export_run
        from dapo.model.gguf import is_converted
        from dapo.store.configuration import recorded_config

        saved = export_run(run, to, which, adapters=adapters)
    Console().print(f"{saved} exported to {to}")
    if adapters and is_converted(recorded_config(run).model.path):
        Console().print(
            f"The base model is converted from a .gguf file; {to / 'README.md'} says how to load it with PEFT"
        )


@cache
def _model_folder(path: str) -> Path | None:
    """Return the local folder of a run's model; None if it is gone or damaged."""
    from dapo.model.gguf import find_local

    try:
        return find_local(path)
    except ModelError:
        return None
