"""Evaluation during training, and which step was the best so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from dapo.checkpoint.state import Best
from dapo.config import Config
from dapo.engine.protocol import Engine
from dapo.errors import ConfigError
from dapo.evaluation.evaluate import Interrupted, evaluate
from dapo.rewards.protocol import Judge
from dapo.sampling.episodes import Environment
from dapo.training.recorder import Recorder
from dapo.types import EvalReport, Prompt, SamplingParams


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
        options = config.eval
        limit, stop = config.data.max_response_length, config.rollout.stop
        self.params = SamplingParams(options.temperature, options.top_p, options.top_k, limit, stop)
        self.reports: tuple[EvalReport, ...] = ()  # of the latest evaluation, one per set
        self.best: Best | None = None

    def run(self, step: int) -> None:
        """Evaluate on every set. The engine must be idle: it uses one set of sampling parameters at a time.

        Raise Interrupted if the run is stopping; what was not finished is not recorded.
        """
        reports = []
        for name, prompts in self.sets.items():

            def show(done: int, total: int, name: str = name) -> None:
                self.recorder.reporter.phase(f"evaluating {name}: {done} of {total}")
                if self.is_stopping() and done < total:
                    raise Interrupted

            report = evaluate(
                self.engine,
                self.judge,
                prompts,
                self.options.k,
                self.params,
                step,
                name,
                show,
                self.think_tags,
                self.environment,
                self.recorder.reporter.phase,
            )
            self.recorder.evaluation(report)
            reports.append(report)
        self.engine.metrics()  # discard the evaluation's share, so that the next step does not count it
        self.reports = tuple(reports)
        self._best_value()  # raises at the first evaluation, before hours of training, if there is no such metric

    def is_best(self, step: int) -> bool:
        """Return whether `step` was evaluated and is the best so far by eval.best_metric; if so, remember it."""
        value = self._best_value()
        if value is None or not math.isfinite(value) or self.reports[0].step != step:
            return False
        if self.best is not None and value <= self.best.value:
            return False
        self.best = Best(step, str(self.options.best_metric), value)
        return True

    def _best_value(self) -> float | None:
        """Return the value of eval.best_metric in the latest evaluation; None if the option is not set."""
        name = self.options.best_metric
        if name is None or not self.reports:
            return None
        metrics = {f"{report.name}/{key}": value for report in self.reports for key, value in report.metrics.items()}
        if name not in metrics:
            raise ConfigError(f"eval.best_metric: there is no '{name}'; the metrics are: {', '.join(metrics)}")
        return metrics[name]
