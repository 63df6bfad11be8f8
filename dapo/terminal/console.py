"""The terminal output of `dapo train`: one line of metrics per step, a progress bar, and a before-and-after table."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from dapo.config import Config
from dapo.terminal.evaltable import DifferenceRow, heading, summary, with_interval, with_sign
from dapo.terminal.notebook import NotebookProgress
from dapo.terminal.samples import choose, sample_lines, sample_style
from dapo.types import TERM, EvalReport, Event, Group, StepReport, Verdict, event_severity

Verbosity = Literal["quiet", "normal", "verbose"]
SILENCE = 60.0  # seconds without a line after which one says what the run is doing, where there is no progress bar
STYLES = {"info": "dim", "warning": "yellow", "error": "red"}  # by severity


class Reporter:
    """Observes a run, without changing it. This base class is silent: everything is in the run database."""

    def training(self, config: Config, first_step: int) -> AbstractContextManager[None]:
        return nullcontext()

    def phase(self, name: str) -> None: ...
    def responses(self, done: int, total: int) -> None: ...
    def group(self, group: Group) -> None: ...
    def step(self, report: StepReport) -> None: ...
    def evaluation(self, report: EvalReport) -> None: ...
    def event(self, event: Event) -> None: ...
    def stopping(self) -> None: ...


class ConsoleReporter(Reporter):
    """Prints one line per step above a progress bar that shows the current phase.

    Quiet, it prints only warnings and errors. Verbose, it adds the timings of each step. In a file there is no bar;
    after a minute without a line, one says what the bar would show.
    """

    def __init__(
        self,
        console: Console | None = None,
        verbosity: Verbosity = "normal",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console()
        self.verbosity: Verbosity = verbosity
        self.show_samples = 0
        self.clock, self._last_line = clock, clock()
        show_progress = NotebookProgress if self.console.is_jupyter else Progress
        self.progress = show_progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.10g}/{task.total:.10g}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(elapsed_when_finished=False),
            TextColumn("[dim]{task.fields[now]}"),
            console=self.console,
            # Steps are few and long, so estimate the speed from the whole run so far.
            speed_estimate_period=3600,
            disable=verbosity == "quiet" or not (self.console.is_terminal or self.console.is_jupyter),
        )
        self.task = self.progress.add_task("steps", total=0, now="")
        self.verdicts: Counter[str] = Counter()
        self.batch_size = 0
        self.epochs: float | None = None

    @contextmanager
    def training(self, config: Config, first_step: int) -> Iterator[None]:
        self.batch_size, self.show_samples = config.data.train_batch_size, config.run.show_samples
        self.epochs = config.run.epochs
        # The clock starts now: in a notebook, the cells that made the trainer may be hours old.
        self.reset_bar(config, first_step)
        self.verdicts.clear()  # an earlier `train` can have been interrupted in the middle of a step
        self.phase("sampling")
        self._print(_header())
        # A bar in a notebook has no thread of its own, and would show an old phase until the next one begins.
        renew, seconds = (self.progress.refresh, 0.5) if self.console.is_jupyter else (self.show_life, SILENCE / 12)
        with self.progress, _repeated(renew, seconds):
            yield
            self.phase("")

    def reset_bar(self, config: Config, first_step: int) -> None:
        if self.epochs is None:
            self.progress.reset(self.task, total=config.run.steps, completed=first_step)
        else:
            self.progress.reset(self.task, description="epochs", total=self.epochs)

    def phase(self, name: str) -> None:
        self.progress.update(self.task, now=name)

    def show_life(self) -> None:
        """Print what the progress bar would show, if there is none and nothing was printed for a minute."""
        if self.clock() - self._last_line < SILENCE or not self.progress.disable:
            return
        (bar,) = self.progress.tasks
        self._print(f"{bar.completed:.10g} of {bar.total:.10g} {bar.description} done: {escape(bar.fields['now'])}")

    def responses(self, done: int, total: int) -> None:
        self.phase(f"sampling, {done} of {total} responses{self._groups_so_far()}")

    def group(self, group: Group) -> None:
        self.verdicts[group.verdict] += 1
        self.phase("sampling" + self._groups_so_far())

    def _groups_so_far(self) -> str:
        if not self.verdicts:
            return ""
        kept = self.verdicts[Verdict.KEPT]
        dropped = _reasons({v: n for v, n in self.verdicts.items() if v != Verdict.KEPT})
        return f", kept {kept} of {self.batch_size}" + (f", dropped {dropped}" if dropped else "")

    def step(self, report: StepReport) -> None:
        self.verdicts.clear()
        self._print(_line(report))
        if self.verbosity == "verbose":
            self._print(f"[dim]{_timings(report)}[/]")
        for group, index in choose(report.groups, self.show_samples):
            head, *lines = map(escape, sample_lines(group, index, self.console.width))
            self._print("\n".join([f"[{sample_style(group.scores[index])}]{head}[/]", *lines]))
        for event in report.events:
            self.event(event)
        done = report.step if self.epochs is None else round(report.metrics["epoch"], 2)
        self.progress.update(self.task, completed=done, now="sampling")

    def evaluation(self, report: EvalReport) -> None:
        text = f"of {escape(report.name)} at step {report.step}: {escape(summary(report.metrics))}"
        self._print(f"[cyan]evaluation[/] {text}")

    def event(self, event: Event) -> None:
        severity = event_severity(event.kind)
        self._print(f"[{STYLES[severity]}]{escape(event.kind)}: {escape(event.message)}[/]", severity != "info")

    def stopping(self) -> None:
        self._print("[yellow]stopping after this step, then saving; press again to stop at once[/]", True)

    def _print(self, text: str, is_important: bool = False) -> None:
        if self.verbosity == "quiet" and not is_important:
            return
        self._last_line = self.clock()
        # Wrap in a terminal only; in a file every message stays one line.
        self.console.print(text, highlight=False, soft_wrap=not self.console.is_terminal)


@contextmanager
def _repeated(call: Callable[[], object], seconds: float) -> Iterator[None]:
    """Call a function every so many seconds during the block, in a thread of its own."""
    has_ended = threading.Event()

    def repeat() -> None:
        while not has_ended.wait(seconds):
            call()

    thread = threading.Thread(target=repeat, name="dapo-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


# Heading, width, metric and format of each column.
_COLUMNS = (
    ("score", 7, "score/mean", ".3f"),
    ("reward", 7, "reward/mean", ".3f"),
    ("length", 7, "response_length/mean", ".1f"),
    ("entropy", 8, "entropy", ".3f"),
    ("grad", 7, "grad_norm", ".2f"),
    ("gap", 8, "logprob_gap/mean", ".1e"),
    ("s/step", 7, "timing_s/step", ".1f"),
)


_MAX_COMPONENTS = 4  # of the score; a line has no room for more


def _header() -> str:
    return "[bold] step" + "".join(f"{heading:>{width}}" for heading, width, _, _ in _COLUMNS) + "  groups[/]"


def _line(report: StepReport) -> str:
    m = report.metrics
    cells = "".join(
        f"{_fitted(m[name], form, width) if name in m else '-':>{width}}" for _, width, name, form in _COLUMNS
    )
    prefix = "groups/dropped/"
    reasons = {name.removeprefix(prefix): int(n) for name, n in m.items() if name.startswith(prefix)}
    groups = f"[green]{int(m['groups/kept'])} kept[/]"
    if reasons:
        groups += f", [dim]{_reasons(reasons)} dropped[/]"
    for name in (Verdict.CARRIED, Verdict.STALE):
        if m[f"groups/{name}"]:
            groups += f", {int(m[f'groups/{name}'])} {name}"
    parts = {name[len(TERM) : -len("/mean")]: v for name, v in m.items() if re.fullmatch(f"{TERM}.+/mean", name)}
    groups += "".join(f", {escape(name)} {value:.3g}" for name, value in [*parts.items()][:_MAX_COMPONENTS])
    return f"{report.step:>5}{cells}  {groups}"


def _fitted(value: float, form: str, width: int) -> str:
    """Format a value with fewer digits if its column would touch the one before it."""
    texts = (format(value, each) for each in (form, ".0f", ".1e", ".0e"))
    return next((text for text in texts if len(text) < width), f" {value:.0e}")


def _timings(report: StepReport) -> str:
    m = report.metrics
    spent = ", ".join(f"{name} {m[f'timing_s/{name}']:.2f} s" for name in ("generate", "reward", "train"))
    rates = ", ".join(
        f"{m[f'throughput/{name}_tokens_per_s']:,.0f} tokens/s {name}" for name in ("generated", "trained")
    )
    return f"      {spent}; {rates}"


def _reasons(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in sorted(counts.items()))


def before_after_table(before: EvalReport, after: EvalReport, differences: Sequence[DifferenceRow]) -> Table:
    """Show the metrics before and after with their paired differences; for a single question also the top answers."""
    problems = {sample.prompt.uid for sample in after.samples}
    each = len(after.samples) // max(len(problems), 1)
    asked = "1 question" if len(problems) == 1 else f"{len(problems)} questions"
    table = Table(title=f"{escape(after.name)}: {asked} x {each} fresh samples, before and after")
    for column in ("", "before", "after", "difference [95%]"):
        table.add_column(column)
    by_metric = {row.figure: row for row in differences}
    for name in dict.fromkeys(["reward/mean", *by_metric, "response_length/mean"]):
        cells = (escape(with_interval(report.metrics, name)) for report in (before, after))
        table.add_row(heading(name), *cells, escape(with_sign(by_metric[name])) if name in by_metric else "")
    in_common = min((row.problems for row in differences), default=len(problems))
    if in_common < len(problems):  # some question was unjudged before or after
        table.caption = f"differences: question by question, over the {in_common} that were judged both times"
    if len(problems) > 1:
        return table
    answers = [Counter(sample.rollout.text for sample in report.samples).most_common(5) for report in (before, after)]
    for place in range(5):
        cells = [_answer(*common[place]) if place < len(common) else "" for common in answers]
        table.add_row(f"answer {place + 1}", *cells)
    return table


def _answer(text: str, count: int) -> str:
    shown = " ".join(text.split())
    shown = shown if len(shown) <= 32 else shown[:31] + "…"
    return escape(f"{count:3d} × {shown!r}")
