"""Deduplication: repeated questions are left out, and so are questions whose rows disagree about the answer."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


def question_key(messages: Iterable[Mapping[str, str]]) -> bytes:
    """Return a key that ignores white space and Unicode compatibility forms (NFKC)."""
    return _hash("\n".join(message["content"] for message in messages))


def answer_key(answer: Any) -> bytes:
    """Return a key that is equal for the same answer: 34, 34.0 and " 34" are one."""
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return _hash(answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, sort_keys=True))


def _hash(text: str) -> bytes:
    normal = " ".join((text if text.isascii() else unicodedata.normalize("NFKC", text)).split())
    return hashlib.blake2b(normal.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Counts of the rows of one source, where rows = distinct - conflicts + duplicates + conflict_rows.

    A conflict is a question whose rows have different answers, in this source or across sources.
    """

    rows: int
    distinct: int  # questions, conflicts included
    duplicates: int  # rows after the first of a question without conflict
    conflicts: int  # questions
    conflict_rows: int

    def summary(self, noun: str = "row") -> str:
        parts = [counted(self.rows, noun), f"{self.distinct:,} distinct"]
        if self.duplicates:
            parts.append(f"{counted(self.duplicates, 'duplicate')} left out")
        if self.conflicts:
            questions = counted(self.conflicts, "question")
            parts.append(f"{questions} with conflicting answers left out ({counted(self.conflict_rows, noun)})")
        return ", ".join(parts)


class Distinct:
    """Finds duplicate and conflicting rows. It stores hashes, not texts, so that millions of rows fit in memory."""

    def __init__(self) -> None:
        self._first: dict[bytes, tuple[bytes, int]] = {}  # question -> answer and source of its first row
        self._later: Counter[tuple[bytes, int]] = Counter()  # (question, source) -> rows after the first
        self._conflicts: set[bytes] = set()

    def add(self, question: bytes, answer: bytes, source: int = 0) -> bool:
        """Add a row; return whether it is the first one of its question."""
        known = self._first.get(question)
        if known is None:
            self._first[question] = (answer, source)
            return True
        self._later[question, source] += 1
        if known[0] != answer:
            self._conflicts.add(question)
        return False

    def is_conflict(self, question: bytes) -> bool:
        return question in self._conflicts

    def counts(self, source: int = 0) -> RowCounts:
        """Count the rows of one source, after all sources have been added."""
        firsts = [question for question, (_, first) in self._first.items() if first == source]
        later = {question: rows for (question, where), rows in self._later.items() if where == source}
        conflicts = {question for question in firsts if question in self._conflicts} | (self._conflicts & later.keys())
        in_conflict = sum(later.get(question, 0) for question in conflicts)
        # A conflicting question counts as distinct in every source that has it, also where another has its first row.
        return RowCounts(
            rows=len(firsts) + sum(later.values()),
            distinct=len(firsts) + sum(1 for question in conflicts if self._first[question][1] != source),
            duplicates=sum(later.values()) - in_conflict,
            conflicts=len(conflicts),
            conflict_rows=in_conflict + sum(1 for question in conflicts if self._first[question][1] == source),
        )


def counted(count: int, noun: str) -> str:
    """Return "1 row" or "2 rows"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
