"""The result of an ablation: each arm compared with the reference at the end, at equal seconds and at equal tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from dapo.ablation.plan import Plan
from dapo.ablation.records import Evaluation, RunRecord, Status, Training
from dapo.algorithm.crossed import Cells, Contrast, contrast, holm
from dapo.terminal.evaltable import is_rate

Axis = Literal["step", "seconds", "tokens"]
Where = Literal["end", "seconds", "tokens"]  # compared at the last evaluation, at equal seconds, at equal tokens
WHERE: tuple[Where, ...] = ("end", "seconds", "tokens")
LEVEL = 0.05


@dataclass(frozen=True, slots=True)
class Difference:
    """An arm minus the reference: interval, p-value, and the p-value after Holm's correction over all arms."""

    value: float
    low: float
    high: float
    p: float
    seeds: int  # that both arms have
    p_holm: float

    @property
    def verdict(self) -> str:
        if self.seeds == 1:  # nothing is known about how much seeds differ
            return "one seed: no verdict"
        if math.isnan(self.p_holm):
            return "all differences are equal: no test" if self.low == self.high else "too few results"
        if self.p_holm >= LEVEL:
            return "no difference shown"
        return "better" if self.value > 0 else "worse"


@dataclass(frozen=True, slots=True)
class Reached:
    """The number of an arm's runs that reached `level` in an evaluation, and what they had spent by then."""

    level: float
    runs: int
    seconds: float  # mean over the runs; like the tokens, NaN unless all runs reached the level
    tokens: float


@dataclass(frozen=True, slots=True, eq=False)
class ArmResult:
    """One arm on one evaluation set."""

    arm: str
    seeds: list[int]  # of its finished runs, including those that ended early
    base: float  # the metric before the first step; this and the values below are means over seeds
    at: Mapping[str, float]  # the seconds and the tokens at which it is compared with the reference
    values: Mapping[Where, float]
    references: Mapping[Where, float]  # the reference's values at the same points and with the same seeds
    differences: Mapping[Where, Difference]  # empty for the reference
    reached: list[Reached]  # one per level asked for


@dataclass(frozen=True, slots=True, eq=False)
class SetResult:
    """All arms on one evaluation set."""

    name: str
    metric: str
    questions: int
    arms: list[ArmResult]


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    plan: Plan
    runs: list[RunRecord]
    sets: list[SetResult]
    trainings: Mapping[str, Training]  # by arm: means over its finished runs, and the largest of their extremes
    notes: list[str]

    def of_arm(self, arm: str) -> list[RunRecord]:
        """Return the finished runs of an arm."""
        return [run for run in self.runs if run.arm == arm and run.status.is_done]


def compare(plan: Plan, runs: list[RunRecord], levels: Sequence[float] = ()) -> Result:
    """Compare the arms' finished runs, also by what they spent to reach each level (in percent for rates)."""
    done = [run for run in runs if run.status.is_done]
    names = dict.fromkeys(name for run in done for name in run.evaluations)
    sets = [found for name in names if (found := _compare_set(plan, name, done, levels))]
    by_arm = {arm.name: [run.training for run in done if run.arm == arm.name and run.training] for arm in plan.arms}
    trainings = {arm: _mean_training(members) for arm, members in by_arm.items() if members}
    notes = [*_other_metrics(sets, done), *_unjudged(sets, done), *_notes(plan, trainings)]
    return Result(plan, runs, sets, trainings, notes)


def _compare_set(plan: Plan, name: str, runs: Sequence[RunRecord], levels: Sequence[float]) -> SetResult | None:
    members = [run for run in runs if run.evaluations.get(name)]
    if not members:
        return None
    # A judge without `acc` has another main metric. Only runs with the reference's metric are compared.
    metric = next((run for run in members if run.arm == plan.reference), members[0]).metric[name]
    members = [run for run in members if run.metric[name] == metric]
    at = {arm.name: _common(plan, name, members, arm.name) for arm in plan.arms}
    others = [at[run.arm] for run in members if run.arm != plan.reference]
    # The reference itself is shown where it is compared with the arm that spent least.
    at[plan.reference] |= {axis: min(each[axis] for each in others) for axis in at[plan.reference] if others}

    def cells(arm: str, where: Where, of: str) -> Cells:
        """Return the values of an arm at the point at which the arm `of` is compared."""
        return {
            (run.seed, question): value
            for run in members
            if run.arm == arm
            for question, value in values_at(run.evaluations[name], where, at[of].get(where, math.inf)).items()
        }

    own: dict[tuple[str, Where], Cells] = {
        (arm.name, where): cells(arm.name, where, arm.name) for arm in plan.arms for where in WHERE
    }
    against: dict[tuple[str, Where], Cells] = {
        (arm, where): cells(plan.reference, where, arm) for arm, where in own if arm != plan.reference
    }
    found = {(arm, where): contrast(theirs, own[arm, where]) for (arm, where), theirs in against.items()}
    corrected = {
        where: _corrected({arm: each for (arm, place), each in found.items() if place == where}) for where in WHERE
    }
    scale = 100 if is_rate(metric) else 1
    arms = []
    for arm in plan.arms:
        of_arm = [run for run in members if run.arm == arm.name]
        arms.append(
            ArmResult(
                arm.name,
                [run.seed for run in of_arm],
                _mean([run.evaluations[name][0].mean for run in of_arm]),
                at[arm.name] if of_arm else {},
                {where: _mean(list(own[arm.name, where].values())) for where in WHERE},
                {
                    where: _mean([value for cell, value in theirs.items() if cell in own[arm.name, where]])
                    for where in WHERE
                    if (theirs := against.get((arm.name, where)))
                },
                {where: corrected[where][arm.name] for where in WHERE if arm.name in corrected[where]},
                [_reached([run.evaluations[name] for run in of_arm], level / scale) for level in levels],
            )
        )
    questions = {question for run in members for each in run.evaluations[name] for question in each.values}
    return SetResult(name, metric, len(questions), arms)


def _common(plan: Plan, name: str, runs: Sequence[RunRecord], arm: str) -> dict[str, float]:
    """Return the most seconds, and the most tokens, that every run of the arm and of the reference has spent."""
    members = [run for run in runs if run.arm in (arm, plan.reference)]
    # The last evaluation of a run that ended early also stands for every later point, so such a run sets no limit.
    whole = [run for run in members if run.status == Status.FINISHED] or members
    axes: tuple[Axis, ...] = ("seconds", "tokens")
    found: dict[str, float] = {
        axis: min((amount(run.evaluations[name][-1], axis) for run in whole), default=math.nan) for axis in axes
    }
    if plan.budget.unit in found:  # runs overshoot it by part of a step
        found[plan.budget.unit] = min(found[plan.budget.unit], plan.budget.amount)
    return found


def _corrected(found: Mapping[str, Contrast]) -> dict[str, Difference]:
    adjusted = holm([each.p for each in found.values()])
    return {arm: Difference(*each, p) for (arm, each), p in zip(found.items(), adjusted, strict=True)}


def _reached(runs: Sequence[Sequence[Evaluation]], level: float) -> Reached:
    first = [next((each for each in evaluations if each.mean >= level - 1e-9), None) for evaluations in runs]
    found = [each for each in first if each is not None]
    spent = found if len(found) == len(runs) else []
    return Reached(level, len(found), _mean([each.seconds for each in spent]), _mean([each.tokens for each in spent]))


def amount(evaluation: Evaluation, axis: Axis) -> float:
    return float(getattr(evaluation, axis))


def values_at(evaluations: Sequence[Evaluation], axis: Where, at: float) -> Mapping[str, float]:
    """Return each question's value at a point of an axis, interpolated between the evaluations before and after it.

    After the last evaluation, the values stay constant.
    """
    if axis == "end":
        return evaluations[-1].values
    after = next((i for i, each in enumerate(evaluations) if amount(each, axis) >= at), len(evaluations) - 1)
    last, first = evaluations[after], evaluations[max(after - 1, 0)]
    reach = amount(last, axis) - amount(first, axis)
    share = min((at - amount(first, axis)) / reach, 1.0) if reach > 0 else 1.0
    if share == 1.0:
        return last.values
    # In this form equal values stay as they are: rounding must not make a difference between two arms.
    return {
        key: first.values[key] + share * (value - first.values[key])
        for key, value in last.values.items()
        if key in first.values
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _mean_training(members: Sequence[Training]) -> Training:
    # A run whose batches were all empty has no entropy; the mean is then that of the other seeds.
    columns = {name: [value for each in members if not math.isnan(value := getattr(each, name))]
               for name in asdict(members[0])}  # fmt: skip
    extremes = ("longest", "clipped", "flat_groups")
    return Training(**{name: max(values) if name in extremes else _mean(values) for name, values in columns.items()})


def _other_metrics(sets: Sequence[SetResult], runs: Sequence[RunRecord]) -> Iterator[str]:
    """Yield a note for each set in which runs are left out because their main metric is another one."""
    for found in sets:
        for other in sorted({run.metric.get(found.name, found.metric) for run in runs} - {found.metric}):
            names = [run.name for run in runs if run.metric.get(found.name) == other]
            yield f"{found.name}: {', '.join(names)} left out, with {other} in place of {found.metric}"


def _unjudged(sets: Sequence[SetResult], runs: Sequence[RunRecord]) -> Iterator[str]:
    """Yield a note for each set with the arms of whose last responses some could not be judged."""
    for found in sets:
        last = {run: evaluations[-1] for run in runs if (evaluations := run.evaluations.get(found.name))}
        shares = {
            arm.arm: _mean([each.unjudged for run, each in last.items() if run.arm == arm.arm]) for arm in found.arms
        }
        if parts := [f"{100 * share:.1f}% of {arm}" for arm, share in shares.items() if share > 0]:
            yield (
                f"{found.name}: responses that could not be judged are left out; in the last evaluations these were "
                f"{', '.join(parts)}"
            )


def _notes(plan: Plan, trainings: Mapping[str, Training]) -> Iterator[str]:
    """Yield a note for each technique that had no effect in these runs, whatever the table says about its arm."""
    limit = plan.config.data.max_response_length
    everywhere = list(trainings.values())
    if not everywhere:
        return
    configs = {run.arm: run.config for run in plan.runs}
    filters = {configs[arm].algorithm.overlong_filter for arm in trainings}
    if len(filters) > 1 and all(each.cut_off == 0 for each in everywhere):
        yield f"no response was cut off at {limit:,} tokens, so overlong filtering had nothing to act on"
    shapes = {configs[arm].reward.length_shaping for arm in trainings}
    starts = [
        configs[arm].data.max_response_length - configs[arm].reward.overlong_buffer.len
        for arm in trainings
        if configs[arm].reward.length_shaping == "buffer"
    ]
    longest = max(each.longest for each in everywhere)
    if len(shapes) > 1 and starts and longest <= min(starts):
        yield (
            f"the longest response has {longest:,.0f} tokens and the overlong penalty starts above {min(starts):,}, so "
            "soft overlong punishment had nothing to act on"
        )
    clips = {arm: configs[arm].algorithm.clip_ratio_high for arm in trainings}
    if len(set(clips.values())) > 1 and all(each.clipped == 0 for each in everywhere):
        yield (
            f"no token reached the upper clip of {min(clips.values())}, so clip-higher had nothing to act on; more "
            "updates per batch (optim.ppo_mini_batch_size, optim.ppo_epochs) or a higher optim.lr move ratios further"
        )
    sampling = [trainings[arm].flat_groups for arm in trainings if configs[arm].algorithm.filter_groups.enable]
    if len(sampling) < len(trainings) and sampling and max(sampling) == 0:
        others = any(each.dropped > 0 for each in everywhere)
        yield (
            "no group was dropped because its responses were all right, all wrong or scored alike, so dynamic sampling "
            "had nothing to act on"
            + ("; the dropped tokens are of groups that were cut off, unjudged, stale or left over" if others else "")
        )
