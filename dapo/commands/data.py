"""`dapo data check` and `dapo data prepare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def check(
    path: Annotated[str, typer.Argument(help="A data file, a glob, or a hub id.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Options, for example data.columns='{prompt: question, answer: final}'.")
    ] = None,
    reward: Annotated[
        str, typer.Option("--reward", help="The judge, any value of reward.use: a rule, file.py:function, ...")
    ] = "math",
    template: Annotated[str | None, typer.Option("--template", help="Any value of data.prompt_template.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Show lengths in this model's tokens.")] = None,
) -> None:
    """Count rows, repeats, bad rows and lengths, and try the judge on the gold answers.

    A rule says how many gold answers it can read. Any other judge scores them as if they were responses. Exit with 1 if
    rows are bad, or if the judge can use none of the gold answers.
    """
    from dapo.config import Config
    from dapo.data.check import check_dataset, print_report
    from dapo.evaluation.gold import gold_judge
    from dapo.rewards.judge import check_judges

    values = json.dumps({"model": {"path": "none"}, "data": {"train": "none"}})
    options = Config.from_text(values, "data check", [f"reward.use={reward}", *(overrides or ())])
    check_judges(options.reward)  # before a large file is read
    tokenizer = None
    if model is not None:
        with Console().status("reading the tokenizer"):
            from dapo.model.loading import load_tokenizer

            tokenizer = load_tokenizer(model)
    template = options.data.prompt_template if template is None else template
    report = check_dataset(path, gold_judge(options.reward, tokenizer), template, tokenizer, options.data.columns)
    print_report(Console(), report)
    raise typer.Exit(0 if report.is_good else 1)


def prepare(
    name: Annotated[str, typer.Argument(help="dapo-math-17k, aime-2024, gsm8k or math.")],
    source: Annotated[str | None, typer.Option("--from", help="A local file to read instead of the hub.")] = None,
    to: Annotated[Path, typer.Option("--to", help="Folder for the parquet file.")] = Path("data"),
) -> None:
    """Fetch a dataset, or read a file, and write it as the recipes expect it: each question once, with its answer."""
    from dapo.data.prepare import prepare as prepare_dataset

    for file in prepare_dataset(name, source, to):
        Console().print(str(file), markup=False, highlight=False)
