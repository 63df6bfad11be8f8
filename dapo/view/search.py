"""Looking for a text in prompts and responses, many groups at a time."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from dapo.store.encoding import messages_from_json


class TextSearch:
    """Upper and lower case are alike.

    In Python, because SQLite's LIKE is hardly quicker, ends at a NUL, knows case only in ASCII, and sees prompts as
    escaped JSON. A full-text index would be larger than the text, and slow down the training.
    """

    def __init__(self, database: sqlite3.Connection, text: str) -> None:
        self.database = database
        self.needle = text.lower()
        self.by_prompt: dict[str, bool] = {}

    def hits(self, chunk: Sequence[sqlite3.Row]) -> set[int]:
        """The serials of those groups that have the text."""
        if not self.needle:
            return {row["serial"] for row in chunk}
        for uid, messages in self._each("uid, messages FROM prompts WHERE uid", self._unknown(chunk)):
            contents = (str(message.get("content", "")) for message in messages_from_json(messages))
            self.by_prompt[uid] = any(self.needle in content.lower() for content in contents)
        in_prompt = {row["serial"] for row in chunk if self.by_prompt.get(row["prompt_uid"])}
        others = [row["serial"] for row in chunk if row["serial"] not in in_prompt]
        responses = self._each("serial, text FROM rollouts WHERE serial", others)
        return in_prompt | {serial for serial, text in responses if self.needle in text.lower()}

    def _unknown(self, chunk: Sequence[sqlite3.Row]) -> list[str]:
        return [uid for uid in {row["prompt_uid"] for row in chunk} if uid not in self.by_prompt]

    def _each(self, what: str, keys: Sequence[Any]) -> sqlite3.Cursor:
        return self.database.execute(f"SELECT {what} IN ({', '.join('?' * len(keys))})", keys)
