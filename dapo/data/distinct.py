"""Every question once: repeated rows are left out, and so are questions whose rows disagree about the answer."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


def question_key(messages: Iterable[Mapping[str, str]]) -> bytes:
    """The same for all spellings of a question that differ in white space or in Unicode compatibility alone."""
    return _hash("\n".join(message["content"] for message in messages))


def answer_key(answer: Any) -> bytes:
    """34, 34.0 and " 34" are one answer."""
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return _hash(answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, sort_keys=True))


def _hash(text: str) -> bytes:
    normal = " ".join((text if text.isascii() else unicodedata.normalize("NFKC", text)).split())
    return hashlib.blake2b(normal.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Repeats:
    """Rows of one source, by what became of them: rows = distinct - conflicts + duplicates + conflict_rows."""

    rows: int
    distinct: int
    duplicates: int
    conflicts: int
    conflict_rows: int

    def sentence(self, noun: str = "row") -> str:
        parts = [counted(self.rows, noun), f"{self.distinct:,} distinct"]
        if self.duplicates:
            parts.append(f"{counted(self.duplicates, 'duplicate')} left out")
        if self.conflicts:
            questions = counted(self.conflicts, "question")
            parts.append(f"{questions} with conflicting answers left out ({counted(self.conflict_rows, noun)})")
        return ", ".join(parts)


class Distinct:
    """Remembers hashes, not texts: millions of repeated rows cost little memory."""

    def __init__(self) -> None:
        self._first: dict[bytes, tuple[bytes, int]] = {}  # question -> the answer and the source of its first row
        self._later: Counter[tuple[bytes, int]] = Counter()  # question and source -> rows after the first
        self._conflicts: set[bytes] = set()

    def add(self, question: bytes, answer: bytes, source: int = 0) -> bool:
        """Whether this is the first row of its question."""
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

    def repeats(self, source: int = 0) -> Repeats:
        firsts = [question for question, (_, first) in self._first.items() if first == source]
        later = {question: rows for (question, where), rows in self._later.items() if where == source}
        conflicts = {question for question in firsts if question in self._conflicts} | (self._conflicts & later.keys())
        in_conflict = sum(later.get(question, 0) for question in conflicts)
        return Repeats(
            rows=len(firsts) + sum(later.values()),
            distinct=len(firsts) + sum(1 for question in conflicts if self._first[question][1] != source),
            duplicates=sum(later.values()) - in_conflict,
            conflicts=len(conflicts),
            conflict_rows=in_conflict + sum(1 for question in conflicts if self._first[question][1] == source),
        )


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
