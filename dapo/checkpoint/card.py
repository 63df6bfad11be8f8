"""The model card (README.md) of an exported model: its base model and data, the recipe, and the run's results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dapo import __version__
from dapo.checkpoint import folder as checkpoint
from dapo.config import Config, Source
from dapo.model.gguf import is_converted
from dapo.store.configuration import CHECKPOINTS, DATABASE_FILE, recorded_config
from dapo.store.database import RunDatabase
from dapo.store.encoding import visible
from dapo.terminal.evaltable import heading, with_interval

_CURVES = {
    "reward/mean": "reward", "acc/mean": "accuracy", "response_length/mean": "response length, tokens",
    "entropy": "entropy, nats",
}  # fmt: skip
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 40
_COUNTS = ("problems", "problems/unjudged", "unjudged")


def model_card(run: Path, saved: Path, *, adapters: bool) -> str:
    """Write the card from the run's configuration and its database up to the step of the checkpoint `saved`."""
    config = recorded_config(run)
    step = int(saved.name.removeprefix("step_"))
    with RunDatabase.open_readonly(run / DATABASE_FILE) as database:
        steps = [metrics for metrics in database.steps() if metrics["step"] <= step]
        evals = [evaluation for evaluation in database.evals() if evaluation["step"] <= step]
        meta = database.meta()
    parts = [
        _front_matter(adapters),
        f"# {config.run.name}\n",
        _facts(config, run, step, steps, adapters),
        *([_loading(config.model.path)] if adapters and is_converted(config.model.path) else []),
        "## Evaluations\n",
        _evaluations(evals),
        "## Training\n",
        _curves(steps),
        f"<details><summary>The recipe</summary>\n\n{_fenced(config.to_yaml(), 'yaml')}\n</details>\n",
        _versions(meta),
    ]
    return "\n".join(parts)


def sparkline(values: Sequence[float]) -> str:
    """Draw at most `_WIDTH` bars, each the mean of an equal share of the values, scaled from lowest to highest."""
    finite = np.array([value for value in values if np.isfinite(value)], dtype=np.float64)
    if len(finite) == 0:
        return ""
    bars = np.array([part.mean() for part in np.array_split(finite, min(_WIDTH, len(finite)))])
    low, high = bars.min(), bars.max()
    heights = np.zeros(len(bars)) if high == low else (bars - low) / (high - low)
    return "".join(_BARS[round(height * (len(_BARS) - 1))] for height in heights)


def _front_matter(adapters: bool) -> str:
    return f"---\nlibrary_name: {'peft' if adapters else 'transformers'}\ntags:\n- dapo\n---\n"


def _facts(config: Config, run: Path, step: int, steps: Sequence[Mapping[str, float]], adapters: bool) -> str:
    lora = config.model.lora
    trained = f"LoRA adapters of rank {lora.rank}" if lora.rank else "all weights"
    if lora.rank:
        trained += ", not merged: load them on the base model with PEFT" if adapters else ", merged here"
    marked = checkpoint.best(run / CHECKPOINTS)
    planned = config.run.steps
    reached = str(step) if planned is None else f"{step} of {planned}"
    if marked is not None and marked.step == step:
        reached += f", chosen by {marked.metric} ({marked.value:.4g}), which makes that value optimistic"
    use = config.reward.use
    rows = {
        "base model": f"`{config.model.path}`",
        "trained": trained,
        "method": "DAPO, reinforcement learning from verifiable rewards",
        "data": ", ".join(map(_source, config.data.train)),
        "reward": f"`{use}`" if isinstance(use, str) else ", ".join(f"{w:g} × `{name}`" for name, w in use.items()),
        "steps": reached,
        "responses per prompt": str(config.rollout.n),
        "response tokens": f"{_total(steps, 'tokens/generated'):,}, {_total(steps, 'tokens/trained'):,} trained on",
    }
    return _table(("", ""), list(rows.items()))


def _loading(base: str) -> str:
    """Show how to load adapters whose base is neither on the hub nor a Hugging Face directory."""
    code = (
        "from dapo.model.loading import resolve_path\n"
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM\n\n"
        f"base = AutoModelForCausalLM.from_pretrained(resolve_path({base!r}))\n"
        'model = PeftModel.from_pretrained(base, "adapters")  # this directory\n'
    )
    why = "PEFT's Auto classes cannot find this base model, because dapo converts it from a .gguf file. Load it with:"
    return f"## Use\n\n{why}\n\n{_fenced(code, 'python')}"


def _source(source: Source) -> str:
    rows = f" ({source.size} questions)" if source.size else ""
    return f"`{source.path}`{rows}" + (f" at weight {source.weight:g}" if source.weight != 1 else "")


def _total(steps: Sequence[Mapping[str, float]], name: str) -> int:
    total = sum(step.get(name, 0) for step in steps)
    return int(total) if np.isfinite(total) else 0


def _evaluations(evals: Sequence[Mapping[str, Any]]) -> str:
    """Show the first and the last evaluation of each set."""
    if not evals:
        return "This run was not evaluated.\n"
    parts = []
    for name in dict.fromkeys(evaluation["name"] for evaluation in evals):
        own = [evaluation for evaluation in evals if evaluation["name"] == name]
        shown = [own[0], own[-1]] if len(own) > 1 else own
        named = dict.fromkeys(metric for evaluation in shown for metric in evaluation["metrics"])
        metrics = [n for n in named if not n.endswith(("/low", "/high")) and n not in _COUNTS and n != "pass@1"]
        rows = []
        for metric in metrics:
            title = f"`{metric}`" if "@" in metric else heading(metric)
            rows.append((title, *(with_interval(evaluation["metrics"], metric) for evaluation in shown)))
        problems = shown[-1]["metrics"].get("problems")
        title = f"`{_cell(name)}`" + (f", {problems:.0f} questions" if problems else "")
        columns = ["before training" if e["step"] == 0 else f"after step {e['step']}" for e in shown]
        unjudged = sum(e["metrics"].get("unjudged", 0) for e in shown)
        note = f"\n{unjudged:.0f} responses could not be judged and are left out.\n" if unjudged else ""
        parts.append(f"{title}:\n\n{_table(('metric', *columns), rows)}{note}")
    return "\n".join(parts) + "\nIn brackets: 95% bootstrap intervals over the questions.\n"


def _curves(steps: Sequence[Mapping[str, float]]) -> str:
    rows = []
    for name, title in _CURVES.items():
        values = [step[name] for step in steps if name in step and np.isfinite(step[name])]
        if values:
            rows.append((title, f"{values[0]:.4g}", f"`{sparkline(values)}`", f"{values[-1]:.4g}"))
    if not rows:
        return "No step was recorded.\n"
    return _table(("per step", "first", "", "last"), rows) + "\nMeasured on the responses sampled for training.\n"


def _versions(meta: Mapping[str, str]) -> str:
    known = {key: value for key, value in meta.items() if key not in ("config", "created", "recipe")}
    versions = ", ".join(f"{key} {value}" for key, value in sorted(known.items()))
    started = meta.get("created", "at an unknown time")
    return visible(f"Trained with {versions}, started {started}; exported by dapo {__version__}.\n")


def _fenced(text: str, language: str) -> str:
    """Put text into a code fence longer than any fence in it: a prompt template may contain one."""
    fence = "`" * (1 + max((len(ticks) for ticks in re.findall("`+", text)), default=2))
    return f"{fence}{language}\n{text}{fence}\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(map(_cell, line)) + " |\n" for line in lines)


def _cell(text: str) -> str:
    """Return text that cannot break out of its table cell: names come from other people's data."""
    return " ".join(visible(text).split()).replace("|", "\\|")
