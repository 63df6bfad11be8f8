"""Evaluation during training, and which step was the best so far."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from dapo.checkpoint.state import Best
from dapo.config import Config
from dapo.engine.protocol import Engine
from dapo.errors import ConfigError
from dapo.evaluation.evaluate import Interrupted, evaluate, metric_names, sampling_params
from dapo.rewards.protocol import Judge
from dapo.sampling.accounting import unjudged_message
from dapo.sampling.episodes import Environment
from dapo.training.recorder import Recorder
from dapo.types import EvalReport, EventKind, Prompt


class Evaluator:
    """Evaluates the current weights on every evaluation set, with the engine and the judge of training."""

    def __init__(
        self,
        config: Config,
        sets: Mapping[str, Sequence[Prompt]],
        engine: Engine,
        judge: Judge,
        recorder: Recorder,
        is_stopping: Callable[[], bool],
        environment: Environment | None = None,
    ) -> None:
        self.options, self.sets, self.think_tags = config.eval, sets, config.reward.think_tags
        self.engine, self.judge, self.recorder = engine, judge, recorder
        self.is_stopping, self.environment = is_stopping, environment
        self.params = sampling_params(config)
        self.reports: tuple[EvalReport, ...] = ()  # of the latest evaluation, one per set
        self.best: Best | None = None
        self._best_set, self._best_key = find_metric(config, sets) or (None, "")

    def run(self, step: int) -> None:
        """Evaluate on every set. The engine must be idle: it uses one set of sampling parameters at a time.

        Raise Interrupted if the run is stopping. Nothing is recorded before the last set is evaluated.
        """
        reports = []
        for name, prompts in self.sets.items():

            def show(done: int, total: int, name: str = name) -> None:
                self.recorder.reporter.phase(f"evaluating {name}, {done} of {total} responses")
                if self.is_stopping() and done < total:
                    raise Interrupted

            reports.append(
                evaluate(
                    self.engine, self.judge, prompts, self.options.k, self.params, step, name, show,
                    self.think_tags, self.environment, self.recorder.reporter.phase,
                )
            )  # fmt: skip
        self.engine.metrics()  # discard the evaluation's metrics, so that the next step does not include them
        self.recorder.evaluation(reports)
        self.reports = tuple(reports)
        report = self._best_report()
        if step > 0 and report and self._best_value() is None:
            reasons = Counter(str(sample.score.error) for sample in report.samples if not sample.score.judged)
            message = f"the evaluation has no {self.options.best_metric}, so step {step} cannot become the best"
            self.recorder.event(EventKind.UNJUDGED, f"{message}; {unjudged_message(reasons)}" if reasons else message)

    def recorded(self, step: int | None = None) -> tuple[EvalReport, ...]:
        """Return the recorded evaluation of a step (default: the newest), in the order in which `run` evaluates.

        Sets whose questions have changed since, because a resume changed eval.data, are left out. So are those of
        which no response could be judged: the judge may work again.
        """
        found = {report.name: report for report in self.recorder.evaluations(step) if report.is_judged}
        return tuple(found[name] for name in self.sets if name in found and self._has_questions(found[name]))

    def has_evaluated(self, step: int) -> bool:
        """Return whether the latest evaluation is of `step` and covers every set."""
        return self.sets.keys() <= {report.name for report in self.reports if report.step == step}

    def _has_questions(self, report: EvalReport) -> bool:
        asked = {sample.prompt.uid for sample in report.samples}
        return asked == {prompt.uid for prompt in self.sets[report.name]}

    def is_best(self, step: int) -> bool:
        """Return whether `step` was evaluated and is the best so far by eval.best_metric; if so, remember it."""
        value, metric = self._best_value(), self.options.best_metric
        if value is None or metric is None or not self.has_evaluated(step):
            return False
        # A resume may have changed the metric, and values of two metrics cannot be compared.
        if self.best is not None and self.best.metric == metric and value <= self.best.value:
            return False
        self.best = Best(step, metric, value)
        return True

    def require_best_metric(self) -> None:
        """Raise if the judge does not return what eval.best_metric needs.

        It is called before the first step. In a later evaluation the judge may fail, which must not end the run.
        """
        report = self._best_report()
        if report and self._best_key not in report.metrics and any(sample.score.judged for sample in report.samples):
            raise _no_metric(self.options.best_metric, [f"{report.name}/{key}" for key in report.metrics])

    def _best_value(self) -> float | None:
        """Return eval.best_metric's value in the latest evaluation; None without the option or without a value."""
        report = self._best_report()
        value = report.metrics.get(self._best_key, math.nan) if report else math.nan
        return value if math.isfinite(value) else None

    def _best_report(self) -> EvalReport | None:
        return next((report for report in self.reports if report.name == self._best_set), None)


def find_metric(config: Config, sets: Collection[str]) -> tuple[str, str] | None:
    """Return the set and the metric that eval.best_metric names; raise if there is no such set or metric."""
    name, keys = config.eval.best_metric, metric_names(config.eval.k)
    if name is None:
        return None
    for key in (each for start in keys for each in (start, f"{start}/low", f"{start}/high")):
        if name.endswith(f"/{key}") and name.removesuffix(f"/{key}") in sets:
            return name.removesuffix(f"/{key}"), key
    raise _no_metric(name, [f"{each}/{key}" for each in sets for key in keys])


def _no_metric(name: str | None, names: Sequence[str]) -> ConfigError:
    return ConfigError(f"eval.best_metric: there is no '{name}'; the metrics are: {', '.join(names)}")
