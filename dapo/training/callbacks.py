"""Callbacks: the user's functions that a run calls when a group, step, evaluation or checkpoint is done."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.errors import ConfigError
from dapo.types import EvalReport, Group, StepReport

if TYPE_CHECKING:
    from dapo.training.trainer import RunResult, Trainer


class Callback:
    """Base class of callbacks: override the methods of the events that you need.

    All methods are called in the thread that trains, one after the other, and the run waits for them. Each may call
    `trainer.stop()` to end the run after the current step. If one raises, the run saves a checkpoint of its last whole
    step, closes, and raises the same exception.
    """

    def on_group(self, trainer: Trainer, group: Group) -> None:
        """Called when a group has been sampled and judged: `group.verdict` says whether it is kept, or why not."""

    def on_step(self, trainer: Trainer, step: StepReport) -> None:
        """Called after each step, before it is evaluated and saved."""

    def on_evaluation(self, trainer: Trainer, report: EvalReport) -> None:
        """Called after each evaluation, once per evaluation set."""

    def on_save(self, trainer: Trainer, checkpoint: Path) -> None:
        """Called when a checkpoint is complete. It is written in the background, so this can be some steps later.

        `checkpoint` is its folder, a Hugging Face directory.
        """

    def on_end(self, trainer: Trainer, result: RunResult) -> None:
        """Called when the run has ended and is saved and closed, but not after an exception."""


StepFunction = Callable[["Trainer", StepReport], Any]
CallbackLike = Callback | StepFunction


class Callbacks:
    """All callbacks of one trainer. It does not keep the trainer alive."""

    def __init__(self, given: CallbackLike | Iterable[CallbackLike], trainer: Trainer) -> None:
        several = [given] if isinstance(given, Callback) or callable(given) else [*given]
        self.members = [_checked(each) for each in several]
        self.failure: Exception | None = None  # raised by a callback
        self._trainer = weakref.ref(trainer)

    def after(self, report: Callable[[Group], None]) -> Callable[[Group], None]:
        """Return a function that passes a group to `report`, and then to the callbacks."""

        def on_group(group: Group) -> None:
            report(group)
            self._call(lambda callback, trainer: callback.on_group(trainer, group))

        return on_group

    def step(self, step: StepReport) -> None:
        self._call(lambda callback, trainer: callback.on_step(trainer, step))

    def evaluation(self, report: EvalReport) -> None:
        self._call(lambda callback, trainer: callback.on_evaluation(trainer, report))

    def save(self, checkpoint: Path | None) -> None:
        """Report a complete checkpoint; None: there is none to report."""
        if checkpoint is not None:
            self._call(lambda callback, trainer: callback.on_save(trainer, checkpoint))

    def end(self, result: RunResult) -> None:
        self._call(lambda callback, trainer: callback.on_end(trainer, result))

    def _call(self, event: Callable[[Callback, Trainer], None]) -> None:
        trainer = self._trainer()
        assert trainer is not None, "only the trainer calls this"
        for callback in self.members:
            try:
                event(callback, trainer)
            except Exception as error:
                self.failure = error
                raise


class _EveryStep(Callback):
    """A plain function, called after each step."""

    def __init__(self, function: StepFunction) -> None:
        self.function = function

    def on_step(self, trainer: Trainer, step: StepReport) -> None:
        self.function(trainer, step)


def _checked(given: CallbackLike) -> Callback:
    if isinstance(given, Callback):
        return given
    if isinstance(given, type):
        raise ConfigError(f"callbacks: {given.__name__} is a class; give an object of it: {given.__name__}(...)")
    if not callable(given):
        raise ConfigError(
            f"callbacks: {type(given).__name__} is neither a function of (trainer, step) nor a subclass of "
            "dapo.Callback"
        )
    try:
        inspect.signature(given).bind(None, None)
    except TypeError:
        name = getattr(given, "__name__", type(given).__name__)
        raise ConfigError(f"callbacks: {name} must take two arguments, (trainer, step)") from None
    except ValueError:
        pass  # a built-in function whose signature is unknown
    return _EveryStep(given)
