"""A plan as text and tables that fit 80 columns: one number of GPUs in detail, or a comparison of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from dapo.model.memory import GIB
from dapo.plan.advice import advice
from dapo.plan.estimate import Plan
from dapo.plan.hardware import MEASURED_GPU, NODE
from dapo.plan.memory import DoesNotFit

WIDTH = 100
_MEASURED = (
    "Measured on one H200 (docs/explanation/performance.md): the shares of bandwidth and peak that decoding and "
    "updates reach, the fixed costs of layers and of vLLM's steps; on two CPU cores: the judge. "
    "From data sheets: memory, bandwidth, FLOPS, links."
)


def print_plan(console: Console, name: str, plan: Plan, steps: int | None, assumed: Sequence[str]) -> None:
    """Print one plan of a run of `steps` steps in detail. `assumed`: the assumptions to list at its end."""
    _say(console, f"{name} on {_machines(plan)}: {_roles(plan)}")
    _say(console, _step_line(plan, steps))
    console.print(_phase_table(plan), width=_width(console))
    console.print(_memory_table(plan), width=_width(console))
    for sentence in advice(plan):
        _say(console, f"- {sentence}")
    if plan.layout.gpus > 1:
        _say(console, f"- Options: {_options(plan)}")
    _say(console, _sources(plan, assumed))


def print_comparison(
    console: Console, name: str, found: Mapping[int, Plan | DoesNotFit], assumed: Sequence[str]
) -> None:
    """Print a row for each number of GPUs, and below the table what it is bound by or why it does not fit."""
    plans = [plan for plan in found.values() if isinstance(plan, Plan)]
    table = Table(
        title=f"{name}: a step on N x {plans[0].gpu.name}", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for heading in ("GPUs", "TP", "GiB", "s/step", "sampling", "longest", "update", "sync", "tok/s/GPU"):
        table.add_column(heading, justify="right")
    for count, plan in found.items():
        table.add_row(f"{count:,}", *(_cells(plan) if isinstance(plan, Plan) else ["-"] * 8))
    console.print(table, width=_width(console))
    for count, plan in found.items():
        noun = "GPU" if count == 1 else "GPUs"
        _say(console, f"- {count:,} {noun}: {_bound(plan) if isinstance(plan, Plan) else plan}")
    _say(console, _sources(plans[-1], assumed))


def _cells(plan: Plan) -> list[str]:
    phases = (plan.phases[name] for name in ("sampling", "the longest responses", "update", "weight sync"))
    rate = plan.work.generated_tokens / plan.seconds / plan.layout.gpus
    return [
        str(plan.layout.tensor_parallel), f"{max(plan.memory.peak) / GIB:.0f}", _seconds(plan.seconds),
        *map(_seconds, phases), f"{rate:,.0f}",
    ]  # fmt: skip


def _bound(plan: Plan) -> str:
    why = "" if plan.limit == "empty slots" else f" ({plan.limit})"
    return f"bound by {plan.bottleneck}{why}"


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, width=_width(console))


def _width(console: Console) -> int:
    return min(WIDTH, console.width)


def _sources(plan: Plan, assumed: Sequence[str]) -> str:
    network = [f"{plan.gpu.network / 1e9:g} GB/s per GPU between nodes of {NODE} (--network)", "3 µs per hop"]
    return f"{_MEASURED} Assumed: {', '.join([*assumed, *(network if plan.layout.gpus > NODE else [])])}."


def _machines(plan: Plan) -> str:
    gpus = plan.layout.gpus
    nodes = f" in {-(-gpus // NODE):,} nodes" if gpus > NODE else ""
    return f"{gpus:,} x {plan.gpu.name}{nodes}"


def _roles(plan: Plan) -> str:
    layout = plan.layout
    if layout.gpus == 1:
        return "one process samples and trains"
    engine = "vLLM" if layout.is_vllm else "embedded"
    each = f" of {layout.tensor_parallel} GPUs" if layout.tensor_parallel > 1 else ""
    how = "and" if layout.rollout_gpus else "in turns with"
    return f"{layout.engines:,} {engine} engines{each} {how} {layout.learners:,} learners"


def _options(plan: Plan) -> str:
    """Return the options that give a recipe this layout of more than one GPU."""
    layout = plan.layout
    options = {"cluster.learners": layout.learners, "cluster.rollout_workers": layout.engines}
    if not layout.rollout_gpus:
        del options["cluster.rollout_workers"]
    if layout.is_vllm:
        options["rollout.tensor_parallel"] = layout.tensor_parallel
    if plan.work.looks_ahead:
        options["algorithm.ledger.lookahead"] = 1
    return " ".join(f"{name}={value}" for name, value in options.items())


def _total(steps: int, seconds: float) -> str:
    return f" {steps:,} {_plural(steps, 'step')} {'takes' if steps == 1 else 'take'} about {_duration(seconds)}."


def _step_line(plan: Plan, steps: int | None) -> str:
    work, rounds, updates = plan.work, len(plan.work.rounds), plan.work.updates * plan.work.epochs
    busy = work.generated_tokens / plan.sampling.full
    trained = work.trained_tokens / (plan.reference + plan.learning.seconds)
    about = "" if plan.gpu.name == MEASURED_GPU else "About "
    total = "" if steps is None else _total(steps, steps * plan.seconds)
    return (
        f"{about}{_seconds(plan.seconds)} s per step of {rounds} {_plural(rounds, 'round')} and {updates} "
        f"{_plural(updates, 'update')}: {work.generated_tokens / plan.sampling.seconds:,.0f} tokens/s sampled "
        f"({busy:,.0f} while all slots are busy), {trained:,.0f} tokens/s trained "
        f"(MFU {100 * plan.learning.mfu:.0f}%).{total}"
    )


def _phase_table(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading, justify in (("phase", "left"), ("seconds", "right"), ("share", "right"), ("", "left")):
        table.add_column(heading, justify=justify)  # pyright: ignore[reportArgumentType]
    notes = _phase_notes(plan)
    for name, seconds in plan.phases.items():
        if seconds > 0:
            share = f"{100 * seconds / plan.seconds:.0f}%" if name in plan.critical else "overlapped"
            style = "bold" if name == plan.bottleneck else None
            table.add_row(name, _seconds(seconds), share, notes.get(name, ""), style=style)
    return table


def _phase_notes(plan: Plan) -> dict[str, str]:
    work = plan.work
    return {
        "sampling": f"{sum(work.rounds):,.0f} x {work.n}, by {plan.sampling.limit}",
        "update": f"{work.trained_groups:,.0f} x {work.n}, by {plan.learning.limit}",
        "rewards": f"{work.judges} judges",
    }


def _memory_table(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("GiB on a GPU that")
    for heading in ("samples", "trains"):
        table.add_column(heading, justify="right")
    twice = ", computed twice" if plan.memory.recomputes else ""
    notes = {
        "key/value cache": f" ({plan.memory.slots:,.0f} responses)",
        "activations": f" ({plan.memory.held_tokens:,.0f} tokens){twice}",
    }
    for name, pair in plan.memory.parts.items():
        table.add_row(name + notes.get(name, ""), *(f"{size / GIB:.1f}" if size else "" for size in pair))
    table.add_section()
    total = f"of {plan.gpu.memory / GIB:.0f}"
    table.add_row(total, *(f"{size / GIB:.1f}" for size in plan.memory.peak))
    return table


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"


def _duration(seconds: float) -> str:
    """Return days, hours, minutes or seconds: the largest unit of which there are at least two."""
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{_seconds(seconds)} s"


def _seconds(value: float) -> str:
    if 0 < value < 0.01:
        return "< 0.01"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}" if value else "0"
