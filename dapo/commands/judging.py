"""`dapo eval` and `dapo judge`: measure models, and try a judge."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dapo.errors import ConfigError


def evaluate(
    models: Annotated[
        list[str], typer.Argument(help="Runs (RUN, RUN@STEP, RUN@best, RUN@last) or models, then KEY=VALUE options.")
    ],
    data: Annotated[str | None, typer.Option("--data", help="Questions: any value of eval.data.")] = None,
    k: Annotated[int | None, typer.Option("--k", min=1, help="Samples per question.")] = None,
    preset: Annotated[str | None, typer.Option("--preset", help="aime: 32 samples, temperature 1, top_p 0.7.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Also write all metrics to this file.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for samples; default: runs/eval-SET-TIME.")] = None,
) -> None:
    """Evaluate runs or models: avg@k, pass@k, maj@k with 95% intervals, and the differences from the first one."""
    if as_json is not None and not as_json.parent.is_dir():
        raise ConfigError(f"--json {as_json}: there is no folder {as_json.parent}")
    console = Console()
    with console.status("starting"):
        from dapo.evaluation.compare import comparison_json, evaluate_models, print_comparison
        from dapo.evaluation.subjects import split_arguments
        from dapo.system.files import write_text
    named, overrides = split_arguments(models)
    found = evaluate_models(named, overrides, data=data, k=k, preset=preset, out=out, console=console)
    print_comparison(console, found)
    if as_json is not None:
        write_text(as_json, comparison_json(found))


def judge(
    response: Annotated[str, typer.Argument(help="A response; or a data file of rows with a column `completion`.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Options to change, for example reward.timeout=60.")
    ] = None,
    use: Annotated[str, typer.Option("--use", help="The judge, any value of reward.use.")] = "auto",
    answer: Annotated[
        str | None,
        typer.Option(
            "--answer",
            help="The gold answer of rows that have none. Rules get it as text, other judges as JSON if it is valid "
            "JSON (7, true, [1, 2]; '\"7\"' is text).",
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="The question, for judges that read it.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model whose tokenizer makes completion_ids.")] = None,
) -> None:
    """Judge a response, or a file of responses, without a run: score, verdict, extracted answer and reason."""
    from dapo.data.formats import SUFFIXES
    from dapo.evaluation import judging

    response, overrides = judging.split_arguments([response, *(overrides or ())])
    options = judging.reward_options({}, [f"reward.use={use}", *overrides])
    gold = judging.read_answer(answer, options)
    if gold != answer:
        typer.echo(f"{'answer:':<12}{judging.typed(gold)}")
    # A response may end with a file's name, but the name of a file hardly holds a space.
    is_file = response.lower().endswith(SUFFIXES) and (Path(response).exists() or " " not in response)
    if is_file:
        places, responses = judging.read_responses(response, gold)
    else:
        places, responses = [""], [judging.response_to(response, prompt, gold)]
        options = options.model_copy(update={"workers": 1})
    if model is not None:
        from dapo.model.loading import load_tokenizer

        tokenizer = load_tokenizer(model)
        responses = [r._replace(tokens=r.tokens or tokenizer(r.text)["input_ids"]) for r in responses]
    judgments = []
    for where, given, found in zip(places, responses, judging.judge_all(responses, options), strict=True):
        judgments.append(found)
        shown = judging.describe(found, given.prompt.answer)
        if is_file:
            typer.echo(f"{where}: " + ", ".join(f"{name} {text}" for name, text in shown.items()))
        else:
            typer.echo("\n".join(f"{name + ':':<12}{text}" for name, text in shown.items()))
    if is_file:
        typer.echo(judging.summary(judgments))
