"""Short hashes of text."""

import hashlib


def text_digest(text: str) -> str:
    """Return a hash of 16 hexadecimal digits, the same on every machine; the text may hold lone surrogates."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
