"""Stop strings, exact at token level: the response ends with the first token that completes one of them.

The comparison is between bytes, because a token may hold a part of a character. It depends on nothing but the tokens of
the response, so every engine ends a response at the same token, however many tokens it draws before it looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dapo.model.tokens import token_bytes


class StopStrings:
    """Finds the token that completes one of the strings."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self.token_bytes = [*token_bytes(tokenizer), b""]  # the last entry is for ids beyond the vocabulary
        self.ends = tuple(text.encode() for text in texts)
        self.longest = max(map(len, self.ends))
        # A text that ends in a token either lies in it as a whole, or the token begins with the end of the text.
        tails = tuple({end[start:] for end in self.ends for start in range(len(end))})
        self.may_end = np.array(
            [token.startswith(tails) or any(end in token for end in self.ends) for token in self.token_bytes]
        )

    def candidates(self, tokens: np.ndarray) -> np.ndarray:
        """Return which tokens can complete a string after suitable other tokens."""
        return self.may_end[np.minimum(tokens, len(self.may_end) - 1)]

    def length(self, tokens: Sequence[int] | np.ndarray, start: int = 0) -> int | None:
        """Return the length at which the response ends, if one of its tokens from `start` on completes a string."""
        for index in np.flatnonzero(self.candidates(np.asarray(tokens[start:], dtype=np.int64))):
            if self._is_complete(tokens, start + int(index)):
                return start + int(index) + 1
        return None

    def _is_complete(self, tokens: Sequence[int] | np.ndarray, index: int) -> bool:
        """Return whether a string ends in the token at `index`."""
        tail = self._bytes(tokens[index])
        wanted = len(tail) + self.longest - 1
        while len(tail) < wanted and index > 0:
            index -= 1
            tail = self._bytes(tokens[index]) + tail
        return any(end in tail for end in self.ends)

    def _bytes(self, token: int) -> bytes:
        return self.token_bytes[min(int(token), len(self.token_bytes) - 1)]
