"""The paged key/value cache: a prompt's pages are shared by its responses, and each response has pages of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dapo.errors import ModelError
from dapo.kernels.decode_attention import PagedState, decode_attention
from dapo.kernels.piece_attention import PAGE
from dapo.model.attention import AttentionPlan

_PROGRAMS = 132  # processors of a large GPU; with fewer programs than that, several share a response


def pages_for(tokens: int) -> int:
    """Return the number of pages that hold this number of tokens."""
    return -(-tokens // PAGE)


def longest_pages(max_length: int) -> int:
    """Return the most pages a sequence can take. Its prompt and its response each begin a page."""
    return 2 + pages_for(max_length)


class PageStore:
    """Keys and values [layers, 2, pages, Hkv, PAGE, D]. Page 0 is never handed out: padding writes there."""

    def __init__(
        self, layers: int, pages: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.storage = torch.zeros(layers, 2, pages, kv_heads, PAGE, head_dim, dtype=dtype, device=device)
        self.free = list(range(pages - 1, 0, -1))

    @staticmethod
    def page_bytes(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return layers * 2 * kv_heads * PAGE * head_dim * dtype.itemsize

    @property
    def used(self) -> float:
        """Fraction of the pages in use."""
        total = self.storage.shape[2] - 1
        return 1 - len(self.free) / total

    def release(self) -> None:
        """Free the memory. CUDA graphs hold its address, so they must be captured again after `restore`."""
        assert len(self.free) == self.storage.shape[2] - 1, "a page is in use"
        self.storage.untyped_storage().resize_(0)

    def restore(self, least: int = 1) -> None:
        """Allocate the memory again after `release`; otherwise do nothing.

        If it has been taken meanwhile, the store gets smaller, down to `least` pages besides page 0.
        """
        if self.storage.untyped_storage().nbytes() > 0:
            return
        layers, _, pages, kv_heads, _, head_dim = self.storage.shape
        while True:
            try:
                self.storage = self.storage.new_zeros(layers, 2, pages, kv_heads, PAGE, head_dim)
                break
            except torch.cuda.OutOfMemoryError as error:
                pages = pages * 3 // 4
                if pages < 1 + least:
                    raise ModelError(
                        f"the GPU has no memory left for a key/value cache of {(1 + least) * PAGE} tokens, which one "
                        "response may need; free some of it, or lower data.max_response_length"
                    ) from error
        self.free = list(range(pages - 1, 0, -1))

    def take(self, count: int) -> list[int]:
        assert count <= len(self.free), "callers check `free` first"
        return [self.free.pop() for _ in range(count)]

    def give_back(self, pages: Sequence[int]) -> None:
        self.free.extend(pages)


class StoringAttention:
    """Attends as `plan` does, and also writes each token's key and value to page `pages_T` at `offsets_T`."""

    applies_rotary = False

    def __init__(self, plan: AttentionPlan, store: PageStore, pages_T: Tensor, offsets_T: Tensor) -> None:
        self.plan = plan
        self.storage = store.storage
        self.pages_T, self.offsets_T = pages_T, offsets_T

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, cos_sin: Tensor | None = None
    ) -> Tensor:
        for part, new in enumerate((key, value)):
            self.storage[layer, part][self.pages_T, :, self.offsets_T] = new[0].transpose(0, 1)
        return self.plan.attend(layer, query, key, value, scale)


class PagedAttention:
    """Attention of one new token per row: stores its key and value in the row's page, then attends to the whole row."""

    applies_rotary = True

    def __init__(self, store: PageStore, state: PagedState) -> None:
        self.storage = store.storage
        self.state = state
        self.split = len(state.rows_B) * self.storage.shape[3] < _PROGRAMS

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, cos_sin: Tensor | None = None
    ) -> Tensor:
        query_B, key_B, value_B = (part[0].transpose(0, 1) for part in (query, key, value))
        keys, values = self.storage[layer]
        output_B = decode_attention(
            query_B, key_B, value_B, keys, values, self.state, scale, cos_sin=cos_sin, split=self.split
        )
        return output_B[None]


class ExtendingAttention:
    """Attention of several new tokens of the same response: stores the keys and values of all, then attends to them.

    In `state`, each token has a row of its own, with the pages of its response and the length up to itself.
    """

    applies_rotary = False

    def __init__(self, store: PageStore, state: PagedState) -> None:
        self.storage, self.state = store.storage, state
        newest_T = state.own_lengths.long() - 1
        columns_T = newest_T // PAGE + (state.prompt_lengths.long() + PAGE - 1) // PAGE
        self.pages_T = state.table.gather(1, columns_T[:, None])[:, 0].long()
        self.offsets_T = newest_T % PAGE

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, cos_sin: Tensor | None = None
    ) -> Tensor:
        query_T, key_T, value_T = (part[0].transpose(0, 1) for part in (query, key, value))
        keys, values = self.storage[layer]
        keys[self.pages_T, :, self.offsets_T] = key_T
        values[self.pages_T, :, self.offsets_T] = value_T
        # It stores each token's key and value once more, with the same bits.
        return decode_attention(query_T, key_T, value_T, keys, values, self.state, scale)[None]
