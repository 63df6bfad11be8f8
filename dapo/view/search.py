"""Search prompts and responses for a text, many groups at a time."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from dapo.store.encoding import messages_from_json


class TextSearch:
    """A case-insensitive substring search.

    It runs in Python: SQLite's LIKE is hardly faster, stops at a NUL, ignores case only in ASCII, and would see prompts
    as escaped JSON. A full-text index would be larger than the text and slow down training.
    """

    def __init__(self, database: sqlite3.Connection, text: str) -> None:
        self.database = database
        self.needle = text.lower()
        self.by_prompt: dict[str, bool] = {}  # whether the prompt has the text, by its uid

    def hits(self, chunk: Sequence[sqlite3.Row]) -> set[int]:
        """Return the serials of the groups in `chunk` that have the text."""
        if not self.needle:
            return {row["serial"] for row in chunk}
        for uid, messages in self._select("uid, messages FROM prompts WHERE uid", self._unsearched(chunk)):
            contents = (str(message.get("content", "")) for message in messages_from_json(messages))
            self.by_prompt[uid] = any(self.needle in content.lower() for content in contents)
        in_prompt = {row["serial"] for row in chunk if self.by_prompt.get(row["prompt_uid"])}
        others = [row["serial"] for row in chunk if row["serial"] not in in_prompt]
        responses = self._select("serial, text FROM rollouts WHERE serial", others)
        return in_prompt | {serial for serial, text in responses if self.needle in text.lower()}

    def _unsearched(self, chunk: Sequence[sqlite3.Row]) -> list[str]:
        return [uid for uid in {row["prompt_uid"] for row in chunk} if uid not in self.by_prompt]

    def _select(self, columns: str, keys: Sequence[Any]) -> sqlite3.Cursor:
        return self.database.execute(f"SELECT {columns} IN ({', '.join('?' * len(keys))})", keys)
