"""`dapo data check` and `dapo data prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def check(
    path: Annotated[str, typer.Argument(help="A JSONL or parquet file, a glob, or a hub id.")],
    reward: Annotated[str, typer.Option("--reward", help="The rule that has to read the gold answers.")] = "math",
    template: Annotated[str | None, typer.Option("--template", help="As data.prompt_template.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Count tokens as this model does, not words.")] = None,
) -> None:
    """Count rows, repeats, bad rows and lengths, and gold answers that the reward can read. Exit code 1: bad rows."""
    from dapo.config import RewardConfig
    from dapo.data.check import check_dataset, print_report
    from dapo.rewards.rules import can_read_gold

    options = RewardConfig()
    can_read_gold(reward, "0", options)  # raises for an unknown rule before a large file is read
    tokenizer = None
    if model is not None:
        with Console().status("reading the tokenizer"):
            from dapo.model.loading import load_tokenizer

            tokenizer = load_tokenizer(model)
    report = check_dataset(path, lambda answer: can_read_gold(reward, answer, options), template, tokenizer)
    print_report(Console(), report)
    raise typer.Exit(0 if report.is_good else 1)


def prepare(
    name: Annotated[str, typer.Argument(help="dapo-math-17k, aime-2024, gsm8k or math.")],
    source: Annotated[str | None, typer.Option("--from", help="A local file instead of the hub.")] = None,
    to: Annotated[Path, typer.Option("--to", help="The folder that the parquet file is written to.")] = Path("data"),
) -> None:
    """Fetch a dataset, or read a file, and write it as the recipes expect it: each question once, with its answer."""
    from dapo.data.prepare import prepare as prepare_dataset

    for sentence in prepare_dataset(name, source, to).sentences():
        Console().print(sentence, markup=False, highlight=False)
