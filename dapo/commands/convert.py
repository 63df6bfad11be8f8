"""`dapo convert`: a recipe from a script or configuration of verl or TRL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def convert(
    source: Annotated[Path, typer.Argument(help="A verl script (.sh) or YAML file, or a TRL YAML, JSON or .py file.")],
    to: Annotated[Path | None, typer.Option("--to", help="The recipe to write; default: print it.")] = None,
) -> None:
    """Write a recipe from a verl or TRL configuration, and list what differs and what has no counterpart.

    Nothing is run. Variables that a script does not set are taken from the environment.
    """
    from dapo.config.migration.recipe import convert as convert_settings
    from dapo.config.migration.sources import read_settings
    from dapo.system.files import write_text

    recipe = convert_settings(read_settings(source, os.environ))
    text = recipe.text(source.name)
    if to is None:
        typer.echo(text, nl=False)
        return
    write_text(to, text)
    problem = recipe.problem()
    typer.echo(f"wrote {to}: {len(recipe.options)} options" + (f"; it does not load yet: {problem}" if problem else ""))
    for line in recipe.report():
        typer.echo(line)
