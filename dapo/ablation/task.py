"""The messages between `dapo ablate` and the process that trains its runs: tasks, news and outcomes."""

from __future__ import annotations

from dataclasses import dataclass

from dapo.ablation.plan import Budget
from dapo.config import Config
from dapo.terminal.console import Verbosity
from dapo.types import EvalReport


@dataclass(frozen=True, slots=True)
class Base:
    """The evaluation of a run before its first step, which is also that of other runs."""

    name: str  # of the run
    reports: tuple[EvalReport, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """One run to train."""

    config: Config
    budget: Budget
    recipe: str
    resume: bool
    base: Base | None
    keeps_checkpoint: bool
    verbosity: Verbosity
    is_placed: bool = False  # on Ray: what it has to say is sent to the driver, and nothing is printed


@dataclass(frozen=True, slots=True)
class Line:
    """A line for the terminal about a run on Ray."""

    text: str
    style: str  # of rich


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: finished if nothing is set, by a signal, or by a failure described in one sentence."""

    signal: int | None = None
    failure: str | None = None


News = Base | Line | Outcome  # an outcome is the last
