"""The check of a dataset before a run: duplicates, bad rows, prompt lengths, and how many answers a judge can read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dapo.config import Source
from dapo.data.distinct import Distinct, RowCounts, answer_key, question_key
from dapo.data.encode import encode, progress
from dapo.data.prompt_format import PromptFormat
from dapo.data.readers import GYM, read_rows
from dapo.data.rows import Question, layout_of, read_question
from dapo.errors import DataError, counted

SHOWN = 10  # examples of bad rows and of unreadable answers
_BINS = 12
_BAR_WIDTH = 40


@dataclass(frozen=True, slots=True)
class JudgeReport:
    """Result of judging the gold answers."""

    summary: str
    failures: tuple[str, ...] = ()  # one sentence per answer that it could not read, or per reason
    warning: str = ""
    is_good: bool = True  # False: it could use none of the answers


Judge = Callable[[Sequence[Question]], JudgeReport | None]  # None: no question has an answer, and it needs none


@dataclass(frozen=True, slots=True)
class CheckReport:
    name: str
    rows: int
    row_counts: RowCounts  # of the readable rows
    layouts: dict[str, int]
    bad_rows: int
    first_bad: tuple[str, ...]  # error messages
    length_unit: str  # tokens or words
    lengths: tuple[int, ...]  # prompt lengths of the distinct questions
    without_answer: int
    judged: JudgeReport | None  # None: no judge, or no gold answers

    @property
    def is_good(self) -> bool:
        return self.rows > 0 and self.bad_rows == 0 and (self.judged is None or self.judged.is_good)


def check_dataset(
    path: str,
    judge: Judge | None = None,
    template: str | None = None,
    tokenizer: Any = None,
    columns: Mapping[str, str] | None = None,
) -> CheckReport:
    """Read the whole dataset, continuing past bad rows. Lengths are in tokens with a tokenizer, else in words."""
    if path.startswith(GYM):
        raise DataError(
            f"{path}: reasoning-gym generates its questions as they are drawn, so there is no file to check"
        )
    source, prompt_format = Source(path=path), PromptFormat.of(template, None)
    distinct, layouts, rows, bad_rows = Distinct(), Counter(), 0, 0
    bad: list[str] = []
    questions: list[Question] = []
    for where, row in progress(read_rows(source, columns=columns), f"Reading {path}"):
        rows += 1
        try:
            if isinstance(row, DataError):
                raise row
            question = read_question(where, row, prompt_format)
        except DataError as error:
            bad_rows += 1
            bad += [str(error)] if len(bad) < SHOWN else []
            continue
        layouts[layout_of(row)] += 1
        if distinct.add(question_key(question.messages), answer_key(question.answer)):
            questions.append(question)
    return CheckReport(
        name=path,
        rows=rows,
        row_counts=distinct.counts(),
        layouts=dict(layouts),
        bad_rows=bad_rows,
        first_bad=tuple(bad),
        length_unit="words" if tokenizer is None else "tokens",
        lengths=_lengths(questions, tokenizer),
        without_answer=sum(question.answer is None for question in questions),
        judged=judge(questions) if judge is not None and questions else None,
    )


def print_report(console: Console, report: CheckReport) -> None:
    if report.rows == 0:
        console.print(f"{escape(report.name)}: no rows")
        return
    layouts = ", ".join(f"{name} ({rows:,})" for name, rows in report.layouts.items())
    console.print(f"[bold]{escape(report.name)}[/]: {report.row_counts.summary()}")
    console.print(f"layout: {layouts or 'none recognized'}")
    if report.without_answer:
        console.print(f"{counted(report.without_answer, 'question')} without an answer")
    if report.lengths:
        console.print(_histogram(report.lengths, report.length_unit))
    if report.judged is not None:
        color = "" if report.judged.is_good else "red"
        console.print(escape(report.judged.summary), style=color, soft_wrap=True)
        _print_first(console, report.judged.failures[:SHOWN], len(report.judged.failures))
        if report.judged.warning:
            console.print(f"[yellow]warning: {escape(report.judged.warning)}[/]", soft_wrap=True)
    if report.bad_rows:
        console.print(f"[red]{counted(report.bad_rows, 'row')} cannot be used:[/]")
        _print_first(console, report.first_bad, report.bad_rows)


def _print_first(console: Console, sentences: Sequence[str], count: int) -> None:
    for sentence in sentences:
        console.print(f"  {escape(sentence)}", soft_wrap=True)
    if count > len(sentences):
        console.print(f"  and {count - len(sentences):,} more")


def _lengths(questions: Sequence[Question], tokenizer: Any) -> tuple[int, ...]:
    if tokenizer is not None:
        return tuple(len(prompt.tokens) for prompt in encode(questions, tokenizer))
    return tuple(sum(len(message["content"].split()) for message in question.messages) for question in questions)


def _histogram(lengths: Sequence[int], unit: str) -> Table:
    """Draw a histogram with bins of equal width, without the empty ones."""
    width = max(1, -(-(max(lengths) + 1) // _BINS))  # rounded up
    bins = Counter(length // width for length in lengths)
    tallest = max(bins.values())
    table = Table("", "prompts", "", title=f"prompt length in {unit}, longest {max(lengths):,}", box=None)
    table.columns[0].justify = table.columns[1].justify = "right"
    for place in sorted(bins):
        bar = "█" * -(-bins[place] * _BAR_WIDTH // tallest)
        table.add_row(f"{place * width:,}-{(place + 1) * width - 1:,}", f"{bins[place]:,}", bar)
    return table
