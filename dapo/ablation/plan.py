"""The plan of an ablation: every arm with every seed, checked before the first run starts and kept in ablation.yaml."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from dapo.ablation.arms import Arm, as_overrides, collect_arms
from dapo.config import Config
from dapo.config.loading import Dumper, parse_yaml, read_text
from dapo.errors import CheckpointError, ConfigError, NotReady
from dapo.store.configuration import ABLATION_FILE, ABLATION_RUNS
from dapo.system.files import draft, write_text

_SEEDS = 2**63  # run.seed is below this
_NO_LIMIT = 10**6  # run.steps of a run whose budget is in seconds or tokens
# Options that do not change the evaluation before the first step: two runs of one seed may differ in them and share it.
_AFTER_THE_BASE = (
    "algorithm.", "optim.", "run.", "reward.length_shaping", "reward.target_length", "reward.overlong_buffer.",
    "data.train", "data.gen_batch_size", "rollout.n", "rollout.temperature", "rollout.mode", "eval.every",
)  # fmt: skip

Unit = Literal["steps", "epochs", "seconds", "tokens"]


@dataclass(frozen=True, slots=True)
class Budget:
    """The length of every run. Seconds count training steps only, not evaluation and saving."""

    unit: Unit
    amount: float

    def spent(self, seconds: float, tokens: float) -> float:
        """Return how much of it is spent; 0 for steps and epochs, which the run itself counts."""
        return {"seconds": seconds, "tokens": tokens}.get(self.unit, 0.0)

    def __str__(self) -> str:
        units = self.unit if self.amount != 1 else self.unit.removesuffix("s")
        what = {"seconds": f"{units} of training", "tokens": f"generated {units}"}.get(self.unit, units)
        return f"{self.amount:,.10g} {what}"


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One arm with one seed."""

    arm: str
    seed: int
    config: Config

    @property
    def folder(self) -> Path:
        return self.config.run_dir

    def has_base_of(self, other: PlannedRun) -> bool:
        """Return whether the first evaluation of both runs is the same: equal model, questions and random numbers."""
        differing = self.config.differences(other.config)
        return self.seed == other.seed and all(key.startswith(_AFTER_THE_BASE) for key in differing)


@dataclass(frozen=True, slots=True)
class Plan:
    recipe: str
    config: Config  # of the recipe, before any arm
    budget: Budget
    reference: str  # the arm that the others are compared with
    arms: tuple[Arm, ...]
    runs: tuple[PlannedRun, ...]  # seed by seed, the reference first, so that an unfinished ablation can be compared
    out: Path

    @property
    def seeds(self) -> list[int]:
        return list(dict.fromkeys(run.seed for run in self.runs))

    def options_of(self, arm: Arm) -> list[str]:
        """Return the options by which an arm differs from the recipe: those given, and others that they set."""
        config = next(run.config for run in self.runs if run.arm == arm.name)
        given = tuple(f"{override.partition('=')[0]}." for override in arm.overrides)
        changed = {key: now for key, (_, now) in self.config.differences(config).items()}
        others = {key: now for key, now in changed.items() if not f"{key}.".startswith((*given, "run.", "eval."))}
        return [*arm.overrides, *as_overrides(others, self.config)]

    def values(self) -> dict[str, Any]:
        """Return the content of ablation.yaml."""
        return {
            "recipe": self.recipe,
            "budget": {self.budget.unit: self.budget.amount},
            "reference": self.reference,
            "seeds": self.seeds,
            "arms": {arm.name: list(arm.overrides) for arm in self.arms},
            "config": self.config.model_dump(mode="json"),
        }

    def check_folder(self, *, resume: bool) -> None:
        """Refuse a folder that holds another ablation, or this one without --resume."""
        file = self.out / ABLATION_FILE
        if file.exists():
            self._compare(parse_yaml(read_text(file, "YAML"), str(file)))
            if not resume:
                raise CheckpointError(
                    f"{self.out}: already holds this ablation; continue it with --resume, or choose another --out"
                )
        elif resume:
            raise CheckpointError(f"{self.out}: there is no ablation to resume; leave out --resume to start one")
        elif self.out.exists() and any(path.name != draft(file).name for path in self.out.iterdir()):
            raise CheckpointError(f"{self.out}: holds something else, not an ablation; choose another --out")

    def obstacle(self) -> str | None:
        """Return why the runs cannot start in the folder, and what to do, or None if they can."""
        try:
            self.check_folder(resume=False)
        except (CheckpointError, ConfigError) as error:
            return str(error)
        return None

    def write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        text = yaml.dump(self.values(), Dumper=Dumper, sort_keys=False, allow_unicode=True)
        write_text(self.out / ABLATION_FILE, text)

    def _compare(self, recorded: dict[str, Any]) -> None:
        """Refuse to resume with another recipe, budget or reference, or with recorded arms or seeds left out."""
        now = self.values()
        arms, seeds, budget = recorded.get("arms"), recorded.get("seeds"), recorded.get("budget")
        if (
            not (isinstance(arms, dict) and isinstance(seeds, list) and isinstance(budget, dict))
            or not all(type(seed) is int for seed in seeds)
            or len(budget) != 1
        ):
            raise CheckpointError(f"{self.out / ABLATION_FILE}: is damaged; put it back, or choose another --out")

        def refuse(what: str, was: object, is_now: object) -> None:
            raise CheckpointError(
                f"{self.out}: holds another ablation: {what} {was}, not {is_now}; choose another --out"
            )

        if budget != now["budget"]:
            ((unit, amount),) = budget.items()
            refuse("its budget is", Budget(unit, amount) if isinstance(amount, int | float) else amount, self.budget)
        if recorded.get("reference") != self.reference:
            refuse("its reference is", recorded.get("reference"), self.reference)
        before = Config.parse(recorded.get("config") or {}, source=str(self.out / ABLATION_FILE))
        for key, (was, is_now) in before.differences(self.config).items():
            if not key.startswith("run.") or key == "run.seed":
                refuse(f"its {key} is", was, is_now)
        for name, overrides in arms.items():
            if name not in now["arms"]:
                raise CheckpointError(
                    f"{self.out}: has the arm '{name}', which this command leaves out; name it too, or choose another "
                    "--out"
                )
            if now["arms"][name] != overrides:
                refuse(f"its arm '{name}' has", overrides, now["arms"][name])
        if missing := sorted(set(seeds) - set(now["seeds"])):
            raise CheckpointError(
                f"{self.out}: has the seeds {', '.join(map(str, seeds))}, and this command leaves out "
                f"{', '.join(map(str, missing))}; give --seeds {len(seeds)} or more, or choose another --out"
            )


def make_plan(
    recipe: Path,
    overrides: Sequence[str],
    *,
    families: Sequence[str],
    arms: Sequence[str],
    seeds: int,
    budget: Budget | None,
    out: Path,
) -> Plan:
    """Resolve every run; raise with one sentence for each arm that cannot load."""
    for override in overrides:
        if override.startswith(("run.dir=", "run.name=")):
            raise ConfigError(f"override '{override}': runs are named by their arms; choose their folder with --out")
        if budget is not None and override.startswith(("run.steps=", "run.epochs=")):
            raise ConfigError(f"override '{override}': the budget of a run is {budget} already; give only one of them")
    config = Config.load(recipe, overrides)
    if budget is None:
        steps, epochs = config.run.steps, config.run.epochs
        budget = Budget("steps", steps) if steps is not None else Budget("epochs", epochs or 0.0)
    if config.eval.data is None or config.eval.k == 0:
        missing = "eval.data" if config.eval.data is None else "eval.k"
        raise ConfigError(
            f"{recipe}: {missing} is missing; arms are compared on held-out questions, so set eval.data to them and "
            "eval.k to the samples per question"
        )
    if config.run.seed + seeds > _SEEDS:
        raise ConfigError(
            f"run.seed is {config.run.seed}, but the last of --seeds {seeds} would exceed the greatest seed, "
            f"{_SEEDS - 1}; lower run.seed"
        )
    chosen, reference = collect_arms(config, families, arms)
    problems: dict[str, list[str]] = {}
    by_arm = {}
    for arm in chosen:
        try:
            shared = [*overrides, *arm.overrides]
            by_arm[arm.name] = [_run(recipe, shared, arm.name, config.run.seed + i, budget, out) for i in range(seeds)]
        except ConfigError as error:
            problems.setdefault(str(error), []).append(arm.name)
    if problems:
        raise NotReady(by_arms(problems, len(chosen)))
    order = sorted(by_arm, key=lambda arm: arm != reference)  # a stable sort: the others stay as they are
    runs = tuple(by_arm[arm][i] for i in range(seeds) for arm in order)
    return Plan(recipe.stem, config, budget, reference, tuple(chosen), runs, out)


def by_arms(problems: Mapping[str, Sequence[str]], count: int) -> list[str]:
    """Return each sentence once, after the names of its arms, unless it applies to all `count` arms."""
    return [
        sentence if len(arms) == count else f"arm{'s' * (len(arms) > 1)} {str(list(arms))[1:-1]}: {sentence}"
        for sentence, arms in problems.items()
    ]


def _run(recipe: Path, overrides: Sequence[str], arm: str, seed: int, budget: Budget, out: Path) -> PlannedRun:
    fixed: dict[str, Any] = {
        "run.dir": str(out / ABLATION_RUNS),
        "run.name": f"{arm}-s{seed}",
        "run.seed": seed,
        "eval.best_metric": None,  # no checkpoint is kept for it
    }
    if budget.unit != "epochs":
        fixed |= {"run.epochs": None, "run.steps": int(budget.amount) if budget.unit == "steps" else _NO_LIMIT}
    config = Config.load(recipe, [*overrides, *(f"{key}={json.dumps(value)}" for key, value in fixed.items())])
    if budget.unit in ("seconds", "tokens") and config.optim.lr_schedule != "constant":
        raise ConfigError(
            f"--{budget.unit}: optim.lr_schedule {config.optim.lr_schedule} needs to know the number of steps; give "
            "--steps, or set optim.lr_schedule to constant"
        )
    return PlannedRun(arm, seed, config)
