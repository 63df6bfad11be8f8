"""The messages between `dapo ablate` and the process that trains its runs."""

from __future__ import annotations

from dataclasses import dataclass

from dapo.ablation.plan import Budget
from dapo.config import Config
from dapo.terminal.console import Verbosity
from dapo.types import EvalReport


@dataclass(frozen=True, slots=True)
class Base:
    """The evaluation of a run before its first step, which other runs can share."""

    name: str  # the run that was evaluated
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
    is_placed: bool = False  # on Ray: messages are sent to the driver instead of being printed


@dataclass(frozen=True, slots=True)
class Line:
    """A line for the terminal about a run on Ray."""

    text: str
    style: str  # a style of rich


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run: finished if nothing is set, else by a signal, or by a failure described in one sentence."""

    signal: int | None = None
    failure: str | None = None


News = Base | Line | Outcome  # messages of the process; the outcome is the last
