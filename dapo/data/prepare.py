"""Prepare well-known datasets: download, deduplicate, extract the gold answers, and write parquet files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dapo.config import Source
from dapo.data.distinct import Distinct, RowCounts, answer_key, question_key
from dapo.data.encode import progress
from dapo.data.prompt_format import PromptFormat
from dapo.data.readers import read_rows
from dapo.data.rows import Question, read_question
from dapo.errors import DataError, counted

Gold = Callable[[Question, Mapping[str, Any]], Any]  # extracts the gold answer from a question and its row


@dataclass(frozen=True, slots=True)
class PreparedFile:
    path: Path
    row_counts: RowCounts
    questions: int  # written

    def __str__(self) -> str:
        return f"{self.path}: {counted(self.questions, 'question')} ({self.row_counts.summary()})"


@dataclass(frozen=True, slots=True)
class _Known:
    hub_id: str
    data_source: str  # for rows without one; the names that reward functions of other systems use
    gold: Gold
    params: Mapping[str, Any] = field(default_factory=dict)
    has_test: bool = False


def prepare(name: str, source: str | None, to: str | Path) -> list[PreparedFile]:
    """Write NAME.parquet, and NAME-test.parquet if the hub dataset has a test split.

    `source` is a local file to read instead of the hub dataset.
    """
    known = KNOWN.get(name)
    if known is None:
        raise DataError(f"{name}: not a dataset that can be prepared; choose one of {', '.join(KNOWN)}")
    if source is not None:
        jobs = {f"{name}.parquet": Source(path=source)}
    else:
        jobs = {f"{name}.parquet": Source(path=known.hub_id, params={**known.params, "split": "train"})}
        if known.has_test:
            jobs[f"{name}-test.parquet"] = Source(path=known.hub_id, params={**known.params, "split": "test"})
    # Read everything before writing the first file, so that a network error or a bad row changes nothing.
    read = {file: _read(job, known) for file, job in jobs.items()}
    return [
        PreparedFile(_write(Path(to) / file, questions), repeats, len(questions))
        for file, (questions, repeats) in read.items()
    ]


def _read(source: Source, known: _Known) -> tuple[list[Question], RowCounts]:
    distinct = Distinct()
    questions: list[tuple[bytes, Question]] = []
    for where, row in progress(read_rows(source), f"Reading {source.path}"):
        if isinstance(row, DataError):
            raise row
        question = read_question(where, row, PromptFormat())
        gold = known.gold(question, row)
        key = question_key(question.messages)
        if distinct.add(key, answer_key(gold)):
            data_source = question.data_source if row.get("data_source") else known.data_source
            clean = Question(where, question.messages, gold, data_source, {}, question.is_text)
            questions.append((key, clean))
    kept = [question for key, question in questions if not distinct.is_conflict(key)]
    if not kept:
        raise DataError(f"{source.path}: no question is left ({distinct.counts().summary()})")
    return kept, distinct.counts()


def _write(path: Path, questions: Sequence[Question]) -> Path:
    """Write to a temporary name and rename, so that a file of this name is always complete."""
    as_text = all(question.is_text for question in questions)
    table = pa.table(
        {
            "data_source": [question.data_source for question in questions],
            "prompt": [q.messages[-1]["content"] if as_text else [dict(m) for m in q.messages] for q in questions],
            "answer": [str(question.answer) for question in questions],
        }
    )
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            pq.write_table(table, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from None
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _plain_answer(question: Question, row: Mapping[str, Any]) -> Any:
    if question.answer is None:
        raise DataError(f"{question.where}: column 'answer' is missing")
    return question.answer


def _after_hashes(question: Question, row: Mapping[str, Any]) -> str:
    """Return what follows the last "####", without commas: `... #### 1,234` gives 1234. One line needs no "####"."""
    text = str(_plain_answer(question, row))
    _, hashes, answer = text.rpartition("####")
    if not hashes and "\n" in text.strip():
        raise DataError(f"{question.where}: the answer has several lines, but no '####' before the result")
    return answer.strip().replace(",", "")


def _last_box(question: Question, row: Mapping[str, Any]) -> str:
    """Return the content of the last \\boxed{} of the solution. An `answer` column may have no box."""
    text = str(_plain_answer(question, row))
    starts = list(re.finditer(r"\\(?:boxed|fbox)\s*", text))
    if not starts:
        if row.get("answer") is not None:
            return text.strip()
        raise DataError(f"{question.where}: the solution has no \\boxed{{}} with the answer")
    rest = text[starts[-1].end() :]
    if not rest.startswith("{"):
        return re.split(r"[\s$.,]", rest, maxsplit=1)[0]  # `\boxed 5` has no braces
    depth = 0
    # Escaped characters such as \{ match first, and so do not count as braces.
    for brace in re.finditer(r"\\.|[{}]", rest, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return rest[1 : brace.start()].strip()
    raise DataError(f"{question.where}: the last \\boxed{{ of the solution is never closed")


KNOWN = {
    "dapo-math-17k": _Known("BytedTsinghua-SIA/DAPO-Math-17k", "math_dapo", _plain_answer),
    "aime-2024": _Known("BytedTsinghua-SIA/AIME-2024", "aime_2024", _plain_answer),
    "gsm8k": _Known("openai/gsm8k", "openai/gsm8k", _after_hashes, {"name": "main"}, has_test=True),
    "math": _Known(
        "DigitalLearningGmbH/MATH-lighteval", "DigitalLearningGmbH/MATH-lighteval", _last_box, has_test=True
    ),
}
