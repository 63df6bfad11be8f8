"""Faults during training: restart after a lost learner; before any other fault ends the run, save what can be saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from dapo.checkpoint import folder as checkpoint
from dapo.errors import ClusterLost, LearnerLost, StorageError
from dapo.types import EventKind

if TYPE_CHECKING:
    from dapo.training.trainer import Trainer


@contextmanager
def faults_handled(trainer: Trainer) -> Iterator[None]:
    """Recover from a lost learner. Before any other fault ends the run, save and record what is possible."""
    try:
        yield
    except LearnerLost as lost:
        _recover(trainer, lost)
    except StorageError as fault:
        with suppress(StorageError):  # the database may be on the same failing disk
            trainer.recorder.event(EventKind.STOPPED, str(fault))
        raise
    except ClusterLost as lost:
        _save_last_step(trainer)
        trainer.recorder.event(EventKind.STOPPED, str(lost))
        raise
    except Exception as error:
        if error is trainer.callbacks.failure:
            _save_last_step(trainer)
            trainer.recorder.event(EventKind.STOPPED, f"a callback raised {type(error).__name__}: {error}")
        raise


def _save_last_step(trainer: Trainer) -> None:
    """Save the last whole step if it is not saved, unless an update has changed the weights since."""
    if trainer.step > trainer.saved_step and trainer.version == trainer.last_state.version:
        with suppress(LearnerLost):
            trainer.save_checkpoint(trainer.last_state)


def _recover(trainer: Trainer, lost: LearnerLost) -> None:
    """Restart all learners and everything else from the newest checkpoint, because the weights are lost."""
    try:
        while (again := _restart_from_checkpoint(trainer, lost)) is not None:
            lost = LearnerLost(f"{lost}; {again} during the restart")
    except ClusterLost as end:
        trainer.recorder.event(EventKind.STOPPED, str(end))
        raise
    undone = trainer.recorder.rewind(trainer.step)
    trainer.evaluator.reports = trainer.evaluator.recorded()  # without the evaluations of the undone steps
    trainer.read_totals()
    message = f"{lost}; all learners start again from step {trainer.step}, {undone} step{'s' * (undone != 1)} undone"
    trainer.recorder.event(EventKind.LEARNERS, message)


def _restart_from_checkpoint(trainer: Trainer, lost: LearnerLost) -> LearnerLost | None:
    """Restart and restore once. If another learner is lost meanwhile, return that error."""
    saved = checkpoint.newest(trainer.directory.checkpoints)
    trainer.parts.restart(lost, saved)  # raises ClusterLost if there were too many losses
    try:
        trainer.restore(saved, checkpoint.read_state(saved) if saved else trainer.first_state)
        trainer.engine.metrics()  # discard the metrics of the undone steps
        trainer.last_state = trainer.state()
    except LearnerLost as again:
        return again
    return None
