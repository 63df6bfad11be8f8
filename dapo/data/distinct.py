"""Deduplication: repeated rows are left out, and so are questions whose rows disagree about the answer."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dapo.errors import counted


def question_key(messages: Iterable[Mapping[str, str]]) -> bytes:
    """Return a key that ignores whitespace and Unicode compatibility forms (NFKC)."""
    return _hash("\n".join(message["content"] for message in messages))


def answer_key(answer: Any) -> bytes:
    """Return a key that is equal for the same answer: 34, 34.0 and " 34" are one."""
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return _hash(answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, sort_keys=True))


def columns_key(data_source: str, extra: Mapping[str, Any], seen: Collection[str] | None) -> bytes:
    """Return a key of the columns that the judge sees (None: all). It is exact, because it may compare any text."""
    columns = {**extra, "data_source": data_source}
    visible = {name: value for name, value in columns.items() if seen is None or name in seen}
    return _digest(json.dumps(visible, ensure_ascii=False, sort_keys=True)) if visible else b""


def _hash(text: str) -> bytes:
    return _digest(" ".join((text if text.isascii() else unicodedata.normalize("NFKC", text)).split()))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Counts of the rows of one source, where rows = distinct - conflicts + duplicates + conflict_rows.

    A conflict is a question whose rows have different answers, in this source or across sources.
    """

    rows: int
    distinct: int  # rows, where those of a conflict count as one
    duplicates: int  # rows without conflict that equal an earlier one
    conflicts: int  # questions
    conflict_rows: int

    def summary(self, noun: str = "row", *, are_left_out: bool = True) -> str:
        parts = [counted(self.rows, noun), f"{self.distinct:,} distinct"]
        outcome = "left out" if are_left_out else "kept"
        if self.duplicates:
            parts.append(f"{counted(self.duplicates, 'duplicate')} {outcome}")
        if self.conflicts:
            questions = counted(self.conflicts, "question")
            parts.append(f"{questions} with conflicting answers {outcome} ({counted(self.conflict_rows, noun)})")
        return ", ".join(parts)


class Distinct:
    """Finds duplicate and conflicting rows. It stores hashes, not texts, so that millions of rows fit in memory."""

    def __init__(self) -> None:
        self._first: dict[bytes, tuple[bytes, bytes, int]] = {}  # question -> answer, columns, source of its first row
        self._later: Counter[tuple[bytes, int]] = Counter()  # (question, source) -> rows after the question's first
        self._variants: dict[tuple[bytes, bytes], int] = {}  # (question, columns) unlike the first row's -> source
        self._conflicts: set[bytes] = set()

    def add(self, question: bytes, answer: bytes, source: int = 0, columns: bytes = b"") -> bool:
        """Add a row; return whether no earlier one has this question and these columns."""
        if question not in self._first:
            self._first[question] = (answer, columns, source)
            return True
        self._later[question, source] += 1
        if self._first[question][0] != answer:
            self._conflicts.add(question)
        is_variant = self.is_variant(question, columns) and (question, columns) not in self._variants
        if is_variant:
            self._variants[question, columns] = source
        return is_variant

    def is_variant(self, question: bytes, columns: bytes) -> bool:
        """Return whether the question's first row has other columns."""
        return self._first[question][1] != columns

    def is_conflict(self, question: bytes) -> bool:
        return question in self._conflicts

    def counts(self, source: int = 0) -> RowCounts:
        """Count the rows of one source, after all sources have been added."""
        firsts = [question for question, (_, _, first) in self._first.items() if first == source]
        later = {question: rows for (question, where), rows in self._later.items() if where == source}
        # A conflicting question counts in every source that has it, also where another has its first row.
        conflicts = {question for question in firsts if question in self._conflicts} | (self._conflicts & later.keys())
        conflict_rows = sum(later.get(q, 0) + (self._first[q][2] == source) for q in conflicts)
        variants = sum(1 for (q, _), where in self._variants.items() if where == source and q not in conflicts)
        rows = len(firsts) + sum(later.values())
        duplicates = sum(count for question, count in later.items() if question not in conflicts) - variants
        distinct = rows - duplicates - conflict_rows + len(conflicts)
        return RowCounts(rows, distinct, duplicates, len(conflicts), conflict_rows)
