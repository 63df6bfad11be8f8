"""The bytes of each token, and the text of a response."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dapo.errors import ModelError

_SPACE = "▁"  # how SentencePiece writes a space
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_PIECEWISE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}  # decoders of SentencePiece vocabularies


def token_bytes(tokenizer: Any) -> list[bytes]:
    """Return the bytes of each token by its id, special tokens included; an id without a token has none.

    Joined, they are the text of a sequence of tokens, except for a space at its beginning. One token may hold a part of
    a character.
    """
    decoder = getattr(tokenizer.backend_tokenizer, "decoder", None) if getattr(tokenizer, "is_fast", False) else None
    steps = _decoder_steps(json.loads(decoder.__getstate__())) if decoder is not None else []
    kinds = {step["type"] for step in steps}
    to_bytes: Callable[[str], bytes]
    if "ByteLevel" in kinds:
        to_bytes = _from_byte_level
    elif kinds and kinds <= _PIECEWISE:
        to_bytes = _from_piece
    else:
        raise ModelError(
            "rollout.stop: the model's tokenizer is neither a byte-level nor a SentencePiece one, so its tokens cannot "
            "be compared with a string; leave rollout.stop out"
        )
    vocabulary = tokenizer.get_vocab()
    found = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, number in vocabulary.items():
        found[number] = to_bytes(token)
    return found


def _decoder_steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _byte_alphabet() -> dict[str, int]:
    """Return the character that byte-level tokenizers write for each byte, as a table back to the bytes.

    Printable bytes of Latin-1 stand for themselves, and the others are numbered from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _from_byte_level(token: str) -> bytes:
    # An added token is plain text: it may hold characters that are not of the alphabet.
    is_encoded = all(character in _ALPHABET for character in token)
    return bytes(_ALPHABET[character] for character in token) if is_encoded else token.encode("utf-8", "replace")


def _from_piece(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode("utf-8", "replace")


class ResponseTexts:
    """Decodes responses to text without special tokens, except those named in `kept`: the tags of a thought."""

    def __init__(self, tokenizer: Any, kept: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        is_fast = getattr(tokenizer, "is_fast", False)
        is_plain = is_fast and not tokenizer.clean_up_tokenization_spaces
        self.decode_batch = tokenizer.backend_tokenizer.decode_batch if is_plain else None
        added = tokenizer.added_tokens_decoder if is_fast else {}
        special = {number: token.content for number, token in added.items() if token.special}
        has_kept = not set(kept).isdisjoint(special.values())
        # Where no kept text is a special token, the tokenizer itself leaves the special tokens out.
        self.left_out = {number for number, text in special.items() if text not in kept} if has_kept else None

    def __call__(self, responses: Sequence[Sequence[int] | np.ndarray]) -> list[str]:
        """Decode all responses at once, which a fast tokenizer does in its own threads, several times as fast."""
        rows = [np.asarray(tokens).tolist() for tokens in responses]
        skips = self.left_out is None
        if self.left_out is not None:
            rows = [[token for token in row if token not in self.left_out] for row in rows]
        if self.decode_batch is not None:
            return self.decode_batch(rows, skip_special_tokens=skips)
        return [self.tokenizer.decode(row, skip_special_tokens=skips) for row in rows]
