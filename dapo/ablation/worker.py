"""The process that trains the runs of an ablation in turn.

One process for all runs imports torch, starts CUDA and compiles the kernels of each model once. Each run loads the
model from its files again, so that it trains as it would alone, bit for bit. The parent replaces the process after a
run that failed.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from multiprocessing.connection import Connection

import torch

from dapo.ablation.task import Line, News, Outcome, Task
from dapo.ablation.trainer import ArmTrainer, BudgetReporter, LineReporter
from dapo.config import Config, ModelConfig
from dapo.errors import DapoError
from dapo.model.loading import resolve_device
from dapo.system.lifeline import die_with_parent
from dapo.training.trainer import Trainer

_WARM_UP_STEPS = 2


def main(socket: int, lifeline: int) -> None:
    """Serve one task after the other, until the parent closes its end of the socket."""
    for fd in (socket, lifeline):
        os.set_inheritable(fd, False)
    die_with_parent(lifeline)
    connection = Connection(socket)
    warm: list[ModelConfig] = []  # models whose kernels are compiled
    # Another thread sends, because a second Ctrl-C raises in this one and would cut a message off.
    sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="send")

    def send(news: News) -> Future[None]:
        return sender.submit(connection.send, news)

    while True:
        try:
            task: Task = connection.recv()
        except EOFError:
            return
        send(_outcome(task, send, warm)).result()


def _outcome(task: Task, send: Callable[[News], object], warm: list[ModelConfig]) -> Outcome:
    """Train one run, with warm kernels of its model. A model that is new in this process is added to `warm`."""
    try:
        if task.config.model not in warm and _compiles_here(task.config):
            warm.append(task.config.model)
            _warm_up(task)
        return Outcome(signal=_train(task, send))
    except KeyboardInterrupt:
        return Outcome(signal=signal.SIGINT)
    except DapoError as error:
        return Outcome(failure=str(error))
    except Exception as error:
        if task.is_placed:
            send(Line(traceback.format_exc(), "red"))
        else:
            traceback.print_exc(file=sys.stderr)
        return Outcome(failure=f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
    finally:
        _free_memory()


def _compiles_here(config: Config) -> bool:
    """Return whether the kernels of training run on a GPU in this process."""
    is_placed = config.cluster.learners > 1 or config.rollout_engines or config.cluster.reward_workers
    return not is_placed and resolve_device(config.model.device).type == "cuda"


def _train(task: Task, send: Callable[[News], object]) -> int | None:
    if task.is_placed:
        trainer = ArmTrainer(task, LineReporter(send, task.verbosity), on_base=send)
    else:
        trainer = ArmTrainer(task, BudgetReporter(task.budget, task.verbosity))
    with closing(trainer):
        return trainer.train().signal


def _warm_up(task: Task) -> None:
    """Compile the kernels of a model by training a run that is thrown away.

    The seconds of its runs then include no compilation, except of what only the other options of a later arm need.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = task.config.run.model_copy(update={"dir": folder, "trackers": ()})
        trainer = Trainer(task.config.model_copy(update={"run": run}), quiet=True)
        with closing(trainer):
            for _ in range(_WARM_UP_STEPS):
                trainer.train_step()
    del trainer
    _free_memory()


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
