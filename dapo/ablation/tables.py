"""The result of an ablation in the terminal and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dapo.ablation.plan import Plan
from dapo.ablation.records import RunRecord, Status
from dapo.ablation.results import WHERE, ArmResult, Axis, Difference, Result, SetResult, Where
from dapo.terminal.evaltable import in_color, is_rate, number
from dapo.terminal.output import json_text, print_table


def plan_table(plan: Plan) -> Table:
    """Show each arm with the options by which it differs from the recipe."""
    seeds = len(plan.seeds)
    table = _table(f"{len(plan.arms)} arms x {seeds} seed{'s' * (seeds != 1)}, {plan.budget} each")
    table.add_column("options that differ from the recipe", overflow="fold")
    for arm in plan.arms:
        mark = " *" if arm.name == plan.reference else ""
        table.add_row(escape(arm.name) + mark, escape(" ".join(plan.options_of(arm))) or "[dim]none[/]")
    table.caption = "* the other arms are compared with this one"
    return table


def print_result(console: Console, result: Result) -> None:
    for found in result.sets:
        print_table(console, result_table(result, found))
        if any(arm.reached for arm in found.arms):
            print_table(console, reached_table(found))
    if result.trainings:
        print_table(console, training_table(result))
    if not result.sets:
        console.print("no run has finished yet")
    for sentence in (*explanation(result), *(f"note: {note}" for note in (*result.notes, *ended_early(result.runs)))):
        console.print(sentence, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def columns(result: Result, found: SetResult) -> list[tuple[Where, str]]:
    """Return the points at which arms are compared, with headings.

    With a budget in seconds or tokens, there is no column for the end: it is the one of the budget's unit.
    """
    headings: dict[Where, str] = {"end": f"after {result.plan.budget}"}
    for axis in ("seconds", "tokens"):
        amounts = _amounts(found, axis)
        headings[axis] = f"at {amounts.pop()}" if len(amounts) == 1 else f"at equal {axis}"
    unit = result.plan.budget.unit
    return [(where, headings[where]) for where in WHERE if not (where == "end" and unit in ("seconds", "tokens"))]


def value_text(found: SetResult, arm: ArmResult, where: Where) -> str:
    """Format the value of an arm. If the arms are compared at different points, add the point and the reference there.

    Nothing is shown for the reference itself then.
    """
    text = number(found.metric, arm.values[where])
    if where == "end" or not arm.seeds or len(_amounts(found, where)) <= 1:
        return text
    if not arm.differences:
        return ""
    there = arm.references.get(where, math.nan)
    against = "" if math.isnan(there) else f" against {number(found.metric, there)}"
    return f"{text}{against}\nat {_amount(arm, where)}"


def _amounts(found: SetResult, axis: Axis) -> set[str]:
    """Return the points at which arms are compared with the reference."""
    return {_amount(arm, axis) for arm in found.arms if arm.differences and arm.seeds}


def _amount(arm: ArmResult, axis: Axis) -> str:
    return f"{arm.at[axis]:,.4g} s" if axis == "seconds" else f"{amount_text(arm.at[axis])} tokens"


def result_table(result: Result, found: SetResult) -> Table:
    unit = " in %" if is_rate(found.metric) else ""
    table = _table(f"{found.name}: {found.metric}{unit}, {found.questions} questions; differences from "
                   f"{result.plan.reference} [95%]")  # fmt: skip
    table.add_column("seeds", justify="right")
    places = columns(result, found)
    for _, heading in places:
        table.add_column(heading, justify="right")
    for arm in found.arms:
        cells = []
        for where, _ in places:
            text = value_text(found, arm, where)
            if difference := arm.differences.get(where):
                text += f"\n{escape(difference_text(found.metric, difference))}\n{in_color(difference.verdict)}"
            cells.append(text)
        table.add_row(escape(arm.arm), str(len(arm.seeds)), *cells)
    return table


def difference_text(metric: str, difference: Difference) -> str:
    """Format a difference with its interval, such as `-4.5 [-6.9, -2.1]`; rates are in points."""
    scale, digits = (100, 1) if is_rate(metric) else (1, 3)
    if math.isnan(difference.value):
        return "-"
    reach = 1.0 if is_rate(metric) else math.inf  # with few seeds, an interval can be wider than rates can differ
    ends = max(difference.low, -reach), min(difference.high, reach)
    # Adding 0.0 makes a zero of -0.0.
    value, low, high = (f"{round(scale * each, digits) + 0.0:+.{digits}f}" for each in (difference.value, *ends))
    return value if math.isnan(difference.low) else f"{value} [{low}, {high}]"


def reached_headings(found: SetResult) -> list[str]:
    return [number(found.metric, each.level) + "%" * is_rate(found.metric) for each in found.arms[0].reached]


def reached_rows(found: SetResult) -> Iterator[list[str]]:
    """Yield the rows that show what each arm had spent when it first reached each level, as means over its seeds."""
    for arm in found.arms:
        cells = [arm.arm]
        for each in arm.reached:
            if not arm.seeds:
                cells.append("-")
            elif math.isnan(each.seconds):
                cells.append(f"{each.runs} of {len(arm.seeds)} seeds" if each.runs else "not reached")
            else:
                cells.append(f"{each.seconds:,.4g} s, {amount_text(each.tokens)} tokens")
        yield cells


def reached_table(found: SetResult) -> Table:
    table = _table(f"{found.name}: training until an evaluation first had at least")
    for heading in reached_headings(found):
        table.add_column(heading, justify="right")
    for name, *cells in reached_rows(found):
        table.add_row(escape(name), *cells)
    return table


TRAINING_HEADINGS = ("steps", "seconds", "tokens", "entropy", "length", "dropped", "cut off")


def training_rows(result: Result) -> Iterator[list[str]]:
    """Yield the rows that show how each arm trained, as means over its seeds."""
    for arm, each in result.trainings.items():
        yield [
            arm, f"{each.steps:,.4g}", f"{each.seconds:,.4g}", amount_text(each.tokens),
            "-" if math.isnan(each.entropy) else f"{each.entropy:.3f}",
            "-" if math.isnan(each.length) else f"{each.length:,.1f}",
            f"{100 * each.dropped:.1f}%", f"{100 * each.cut_off:.1f}%",
        ]  # fmt: skip


def training_table(result: Result) -> Table:
    table = _table("training, mean over the seeds; entropy and length of the last tenth of the steps")
    for heading in TRAINING_HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, *cells in training_rows(result):
        table.add_row(escape(name), *cells)
    return table


def explanation(result: Result) -> list[str]:
    """Return sentences on how the comparison was made and what it leaves out."""
    if not result.sets:
        return []
    plan = result.plan
    count = _comparisons(result)
    verdicts = (
        " The verdicts are stricter, because few seeds can agree by chance, and they apply Holm's correction over the "
        f"arms in a column (here {count}), not over the columns. So an interval may leave out 0 where no difference is "
        "shown."
    )
    lines = [
        "Each interval is for one comparison, paired by question and seed." + verdicts * (count != "0"),
        f"At equal seconds or tokens, an arm is compared with {plan.reference} at the largest amount that every run of "
        "both arms reached. Between two evaluations a straight line is assumed. Seconds are those of training steps, "
        "without evaluation and saving.",
    ]
    if plan.config.rollout.mode == "inflight":
        lines.append("Finishing the responses in flight before an evaluation is not counted in the seconds.")
    for found in result.sets:
        asked = {(run.arm, frozenset(last.values)) for run in result.runs if run.status.is_done
                 for last in run.evaluations.get(found.name, ())[-1:] if last.unjudged == 0}  # fmt: skip
        if len(asked) > len({arm for arm, _ in asked}):
            lines.append(f"{found.name}: the questions differ between seeds; {found.questions} counts all of them.")
    for found in result.sets:
        seeds = {arm.arm: set(arm.seeds) for arm in found.arms}
        lines += [
            f"{found.name}: {arm.arm} and {plan.reference} have no judged question in common, so they cannot be "
            "compared."
            for arm in found.arms
            if (each := arm.differences.get("end")) and math.isnan(each.value)
            and seeds[arm.arm] & seeds[plan.reference]
        ]  # fmt: skip
    if len(plan.seeds) > 1:
        lines += [
            f"{found.name}: {arm.arm} and {plan.reference} have results of only one seed in common: the interval "
            "covers the choice of questions, not the differences between seeds, so there is no verdict."
            for found in result.sets
            for arm in found.arms
            if (each := arm.differences.get("end")) and each.seeds == 1
        ]
    else:
        lines.append(
            "With one seed there are no verdicts: the intervals cover the choice of questions, not the differences "
            "between seeds."
        )
    return lines


def _comparisons(result: Result) -> str:
    """Return how many comparisons Holm's correction is over; columns may differ in that."""
    counts = {
        sum(not math.isnan(each.p_holm) for arm in found.arms if (each := arm.differences.get(where)))
        for found in result.sets
        for where, _ in columns(result, found)
    }
    return " to ".join(str(count) for count in sorted({min(counts, default=0), max(counts, default=0)}))


def unfinished(runs: Sequence[RunRecord]) -> list[str]:
    """Return a line for each run that is not part of the result."""
    return [
        f"{run.name}: {run.status}" + (f": {run.reason}" if run.reason else "")
        for run in runs
        if not run.status.is_done
    ]


def ended_early(runs: Sequence[RunRecord]) -> list[str]:
    """Return a line for each run that found nothing left to learn."""
    return [
        f"{run.name}: ended early after step {run.training.steps:.0f}, and its last evaluation is carried forward to "
        f"the end of the budget: {run.reason}"
        for run in runs
        if run.status == Status.ENDED_EARLY and run.training
    ]


def result_json(result: Result) -> str:
    """Return what the report shows as JSON: the plan, values and differences, curves, and the sentences about them."""
    runs = [
        {
            "name": run.name,
            "arm": run.arm,
            "seed": run.seed,
            "status": run.status,
            "failure": run.reason if run.status == Status.FAILED else None,
            "ended_early": run.reason if run.status == Status.ENDED_EARLY else None,
            "training": None if run.training is None else asdict(run.training),
            "evaluations": {
                name: [{"step": e.step, "seconds": e.seconds, "tokens": e.tokens, "mean": e.mean} for e in found]
                for name, found in run.evaluations.items()
            },
            "curves": {name: values.tolist() for name, values in run.curves.items()},
        }
        for run in result.runs
    ]
    sets = {
        found.name: {
            "metric": found.metric,
            "questions": found.questions,
            "arms": {
                arm.arm: {
                    "seeds": arm.seeds,
                    "base": arm.base,
                    "at": arm.at,
                    "reached": [asdict(each) for each in arm.reached],
                    "values": arm.values,
                    "reference_values": arm.references,
                    "differences": {
                        where: {**asdict(each), "verdict": each.verdict} for where, each in arm.differences.items()
                    },
                }
                for arm in found.arms
            },
        }
        for found in result.sets
    }
    plan = result.plan
    document = {
        **{key: value for key, value in plan.values().items() if key != "config"},
        "model": plan.config.model.path,
        "arms": {arm.name: plan.options_of(arm) for arm in plan.arms},
        "sets": sets,
        "training": {arm: asdict(each) for arm, each in result.trainings.items()},
        "runs": runs,
        "explanation": explanation(result),
        "notes": result.notes,
    }
    return json_text(document)


def amount_text(tokens: float) -> str:
    return (
        f"{tokens / 1e6:,.3g} M" if tokens >= 1e6 else f"{tokens / 1e3:,.3g} k" if tokens >= 1e4 else f"{tokens:,.0f}"
    )


def _table(title: str) -> Table:
    table = Table(title=escape(title), box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), caption_justify="left")
    table.add_column("arm", overflow="fold")
    return table
