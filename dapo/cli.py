"""The command line: dapo train | metrics | export | doctor."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dapo.config import Config
from dapo.errors import CheckpointError, DapoError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@app.callback()
def _root() -> None:
    """Reinforcement learning of language models from verifiable rewards with DAPO."""


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A YAML file, for example recipes/guess_five.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Options to change, for example optim.lr=1e-5.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of this run.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and the plan, and exit.")
    ] = False,
) -> None:
    """Train a model as a recipe says."""
    config = Config.load(recipe, overrides or ())
    console = Console()
    if dry_run:
        from dapo.plan import plan_text

        typer.echo(config.to_yaml())
        typer.echo(plan_text(config))
        return
    # torch and transformers take seconds to import: only the commands that need them do.
    with console.status("starting"):
        from dapo.store.console import ConsoleReporter, before_after_table
        from dapo.trainer import Trainer
    trainer = Trainer(config, resume=resume, reporter=ConsoleReporter(console))
    try:
        result = trainer.run()
    finally:
        trainer.close()
    if result.before and result.after and result.after.step > result.before.step:
        console.print(before_after_table(result.before, result.after))
    console.print(f"{result.steps} steps, {result.seconds:.0f} s of training; the run is in {result.run_dir}")
    if result.signal is not None:
        raise typer.Exit(128 + result.signal)


@app.command()
def metrics(
    run: Annotated[Path, typer.Argument(help="A run directory, for example runs/guess_five.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per step and line.")] = False,
) -> None:
    """Print the figures of every step of a run."""
    from dapo.store.database import RunDatabase

    with RunDatabase.open_readonly(run / "run.db") as database:
        steps = list(database.steps())
    if as_json:
        for step in steps:
            # JSON has no NaN: a figure that does not exist is null.
            finite = {name: value if math.isfinite(value) else None for name, value in step.items()}
            sys.stdout.write(json.dumps(finite) + "\n")
        return
    columns = {heading: name for heading, name in _COLUMNS.items() if any(name in step for step in steps)}
    table = Table(title=str(run), box=box.SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
    for heading in ("step", *columns):
        table.add_column(heading, justify="right")
    for step in steps:
        table.add_row(str(step["step"]), *(_cell(step.get(name)) for name in columns.values()))
    Console().print(table)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run directory, for example runs/guess_five.")],
    to: Annotated[Path, typer.Option("--to", help="Where to write the Hugging Face directory.")],
) -> None:
    """Write the newest checkpoint's model, adapters merged, as a plain Hugging Face directory."""
    from dapo.policy import checkpoint

    saved = checkpoint.newest(run / "checkpoints")
    if saved is None:
        raise CheckpointError(f"{run}: has no checkpoint to export")
    if to.exists():
        raise CheckpointError(f"{to}: exists already; name a new folder")
    with Console().status(f"copying {saved}"):
        checkpoint.export(saved, to)
    Console().print(f"{saved} exported to {to}")


@app.command()
def doctor() -> None:
    """Check what this machine has, and what each part of dapo would need."""
    from dapo.doctor import check, is_usable, print_table

    findings = check()
    print_table(Console(), findings)
    raise typer.Exit(0 if is_usable(findings) else 1)


_COLUMNS = {
    "score": "score/mean",
    "reward": "reward/mean",
    "acc": "acc/mean",
    "length": "response_length/mean",
    "entropy": "entropy",
    "kept": "groups/kept",
    "dropped": "groups/dropped",
    "tokens": "tokens/generated",
    "s/step": "timing_s/step",
}


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def main() -> None:
    """The console script: a user's mistake is one sentence on standard error, never a traceback."""
    try:
        app()
    except DapoError as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        sys.exit(error.exit_code)
    except OSError as error:
        # No permission, no space, a file where a folder should be: the user's to mend, and it names the file.
        if error.filename is None:
            raise
        Console(stderr=True, soft_wrap=True).print(
            f"error: {error.filename}: {error.strerror}", style="red", markup=False
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
