"""Decoding in bursts, as on a GPU: one step, from embedding to drawn token, is one captured graph.

All state of a response lives on the device in its *row*: tokens, log-probabilities, lengths, pages, whether it has
finished. A step reads and advances it there; the host looks only after a burst of steps, takes finished rows out and
gives their places to waiting responses. While a burst runs, the host turns the last one's results into rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapo.engine.embedded.pages import PagedAttention, PageStore, longest_pages, pages_for
from dapo.engine.embedded.prefill import Prefill
from dapo.engine.embedded.sequence import Finished, Response, SharedPrompt
from dapo.errors import ModelError
from dapo.kernels.decode_attention import PagedState
from dapo.kernels.draw import DrawState, draw_and_advance
from dapo.kernels.piece_attention import PAGE
from dapo.model.forward import free_memory, head_weight, hidden_states
from dapo.model.graphs import GraphPool
from dapo.model.meter import head_size, key_heads
from dapo.model.products import wide_product
from dapo.types import FinishReason, SamplingParams

BURST = 8  # steps without looking: more leave finished rows idle for longer, fewer make the GPU wait for the host
MAX_CONCURRENT = 1024
_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, *range(1024, 1 << 16, 512))
_TRUNCATED_ROWS = 128  # sorted at once: all at once would take gigabytes that a graph keeps for good
assert PAGE % BURST == 0  # a row that ends with a page ends with a burst, and has no page beyond
_PADDING_ROW = 0
_REASONS: dict[int, FinishReason] = {1: "stop", 2: "length"}


@dataclass(eq=False, slots=True)
class _Row:
    """Where an active response lives."""

    row: int
    pages: list[int]


class PagedDecoder:
    """The active responses, oldest first, are the first places of the batch; `rows_B` names the row of each place."""

    def __init__(
        self, causal_lm: Any, stop_ids: frozenset[int], max_concurrent: int, max_length: int, pages: int
    ) -> None:
        self.model = causal_lm
        self.max_concurrent = max_concurrent
        self.max_length = max_length
        self.weight = weight = head_weight(causal_lm)
        self.device = device = weight.device
        self.store = PageStore(*_cache_shape(causal_lm, pages), dtype=weight.dtype, device=device)
        self.prefill = Prefill(causal_lm, self.store)
        rows, integers = max_concurrent + 1, {"dtype": torch.int32, "device": device}
        self.buckets = [bucket for bucket in _BUCKETS if bucket < max_concurrent] + [max_concurrent]
        self.rows_B = torch.zeros(max_concurrent, **integers)
        self.table = torch.zeros(rows, longest_pages(max_length), **integers)
        self.prompt_lengths = torch.zeros(rows, **integers)
        self.draw_state = DrawState(
            keys=torch.zeros(rows, dtype=torch.int64, device=device),
            own_lengths=torch.ones(rows, **integers),
            limits=torch.ones(rows, **integers),
            tokens=torch.zeros(rows, max_length + 1, **integers),
            logprobs=torch.zeros(rows, max_length + 1, dtype=torch.float32, device=device),
            finished=torch.ones(rows, **integers),  # the padding row stays so
            stop_ids=torch.tensor(sorted(stop_ids), **integers),
        )
        self.active: dict[Response, _Row] = {}
        self.free_rows = list(range(rows - 1, _PADDING_ROW, -1))
        self.host_table = np.zeros(self.table.shape, np.int32)
        self.table_changed = False
        self.places_changed = False
        # What the host knows of each row; the others are in `looks`.
        self.limits, self.own_pages = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self.rows = np.zeros(0, np.int32)  # of the places in use
        self.bucket, self.params = 0, SamplingParams()
        self.is_computing, self.burst, self.drawn_before = False, 0, 0
        self.can_capture = _can_capture(causal_lm)
        self.graphs: dict[tuple[int, SamplingParams | None], tuple[torch.cuda.CUDAGraph, Tensor | None]] = {}
        self.kept_logits: Tensor | None = None
        self.pool = GraphPool()
        self.pushed_out: list[Response] = []
        self.looks = _Looks(rows, device)
        self._reset_figures()

    @classmethod
    def sized(
        cls, causal_lm: Any, stop_ids: frozenset[int], max_concurrent: int, max_length: int, fraction: float,
        reserved: int,
    ) -> PagedDecoder:  # fmt: skip
        """With a cache for `max_concurrent` of the longest responses, or what the memory allows."""
        weight = head_weight(causal_lm)
        layers, _, kv_heads, head_dim = _cache_shape(causal_lm, 0)
        longest = longest_pages(max_length)
        max_concurrent = max_concurrent or MAX_CONCURRENT
        room = int(fraction * max(0, free_memory(weight.device) - reserved))
        pages = min(
            1 + max_concurrent * longest, room // PageStore.page_bytes(layers, kv_heads, head_dim, weight.dtype)
        )
        if pages < 1 + longest:
            raise ModelError(
                f"the key/value cache would hold {max(0, pages - 1) * PAGE} tokens, fewer than one sequence of "
                f"{max_length}; raise rollout.kv_memory_fraction, or lower data.max_response_length"
            )
        return cls(causal_lm, stop_ids, max_concurrent, max_length, pages)

    @property
    def cache_bytes(self) -> int:
        return self.store.storage.nbytes

    def release_cache(self) -> None:
        self.graphs.clear()
        self.prefill.captured.clear()
        self.pool, self.prefill.pool = GraphPool(), GraphPool()
        self.store.release()

    @torch.no_grad()
    def prepare(self, params: SamplingParams) -> None:
        self.store.restore()
        for bucket in self.buckets:
            self._graph(bucket, params)
        self.places_changed = True

    def room(self, waiting: Iterable[Response]) -> int:
        """A place, and pages for the prompt and the first tokens; a page for each active response is left over."""
        free_pages, free_rows = len(self.store.free) - len(self.active), len(self.free_rows)
        seen: set[SharedPrompt] = set()
        count = 0
        for response in waiting:
            needed = 1
            if response.prompt.cached is None and response.prompt not in seen:
                needed += pages_for(response.prompt.length - 1)
            if count == free_rows or (needed > free_pages and (self.active or count)):
                break
            free_pages -= needed
            seen.add(response.prompt)
            count += 1
        return count

    def start(self, newcomers: Sequence[Response]) -> list[Finished]:
        """Newcomers enter, and the next burst starts."""
        self.store.restore()
        prompts = [prompt for prompt in dict.fromkeys(r.prompt for r in newcomers) if prompt.cached is None]
        for prompt in prompts:
            prompt.cached = self.store.take(pages_for(prompt.length - 1))
        self.prefill(prompts)
        for response in newcomers:
            length = response.prompt.length + response.request.params.max_tokens
            assert length <= self.max_length + 1, f"a sequence of {length} tokens, longer than max_length"
            self.active[response] = _Row(self.free_rows.pop(), self.store.take(1))
        self._write_rows(newcomers)
        if self.active and not self.is_computing:
            self._burst()
            self._grow(2 * BURST)  # while the burst runs: what the next one will need
        return []

    def advance(self) -> list[Finished]:
        self.settle()
        if not self.looks.finished[self.rows].any():
            return []
        done = [(r, place) for r, place in self.active.items() if self.looks.finished[place.row]]
        if not done:  # those were cancelled
            return []
        rows = np.array([place.row for _, place in done])
        lengths = self.looks.own_lengths[rows] - 1  # without the last prompt token
        index = torch.from_numpy(rows).to(self.device)
        tokens, logprobs = (
            values[index, 1 : 1 + lengths.max()].cpu().numpy()
            for values in (self.draw_state.tokens, self.draw_state.logprobs)
        )
        finished: list[Finished] = []
        for i, (response, place) in enumerate(done):
            response.tokens = tokens[i, : lengths[i]].copy()
            response.logprobs = logprobs[i, : lengths[i]].copy()
            finished.append((response, _REASONS[int(self.looks.finished[place.row])]))
        self.remove([response for response, _ in done])
        return finished

    def settle(self) -> None:
        if not self.is_computing:
            return
        self.looks.wait()
        self.is_computing = False
        self.steps += self.burst
        self.drawn_tokens += int(self.looks.own_lengths[self.rows].sum()) - self.drawn_before

    def drawn(self, response: Response) -> int:
        return int(self.looks.own_lengths[self.active[response].row]) - 1

    def remove(self, responses: Sequence[Response]) -> None:
        for response in responses:
            place = self.active.pop(response)
            self.store.give_back(place.pages)
            self.free_rows.append(place.row)
        self.places_changed |= bool(responses)

    def forget(self, prompt: SharedPrompt) -> None:
        self.store.give_back(prompt.cached or ())
        prompt.cached = None

    def displaced(self) -> list[Response]:
        pushed_out, self.pushed_out = self.pushed_out, []
        return pushed_out

    def release(self) -> None:
        assert not self.active

    def figures(self) -> dict[str, float]:
        steps = max(self.steps, 1)
        figures = {
            "engine/decode_steps": float(self.steps),
            "engine/graph_replays": float(self.replays),
            "engine/batch_occupancy": self.drawn_tokens / (steps * self.max_concurrent),
            "engine/kv_occupancy": self.most_used,
            "engine/restarts": float(self.restarts),
        }
        self._reset_figures()
        return figures

    def _reset_figures(self) -> None:
        self.steps = self.replays = self.drawn_tokens = self.restarts = 0
        self.most_used = 0.0

    def _write_rows(self, newcomers: Sequence[Response]) -> None:
        """What the device needs to know of new responses."""
        if not newcomers:
            return
        places = [self.active[response] for response in newcomers]
        rows = torch.tensor([place.row for place in places], device=self.device)
        state = self.draw_state
        columns: tuple[tuple[Tensor, list[int]], ...] = (
            (self.prompt_lengths, [response.prompt.length - 1 for response in newcomers]),
            (state.own_lengths, [1] * len(newcomers)),
            (state.limits, [response.request.params.max_tokens for response in newcomers]),
            (state.finished, [0] * len(newcomers)),
            (state.keys, [response.key for response in newcomers]),
        )
        for column, values in columns:
            column[rows] = torch.tensor(values, dtype=column.dtype, device=self.device)
        last = torch.tensor([response.prompt.tokens[-1] for response in newcomers], dtype=torch.int32)
        state.tokens[rows, 0] = last.to(self.device)
        for response, place in zip(newcomers, places, strict=True):
            listed = [*response.prompt.cached, *place.pages]
            self.host_table[place.row] = 0
            self.host_table[place.row, : len(listed)] = listed
            self.limits[place.row] = response.request.params.max_tokens
            self.own_pages[place.row] = len(place.pages)
            self.looks.own_lengths[place.row], self.looks.finished[place.row] = 1, 0
        self.table_changed = self.places_changed = True

    def _burst(self) -> None:
        """Start the next steps: nothing between two bursts may take the host long."""
        if self.places_changed:
            self._place_rows()
        own, limits = self.looks.own_lengths[self.rows], self.limits[self.rows]
        self.burst = steps = max(1, min(BURST, int((limits - own).max()) + 1))
        self.drawn_before = int(own.sum())
        if self.table_changed:
            self.table.copy_(torch.from_numpy(self.host_table))
            self.table_changed = False
        for _ in range(steps):
            self._run_step()
        self.replays += steps if self.can_capture else 0
        self.most_used = max(self.most_used, self.store.used)
        self.looks.request(self.draw_state)
        self.is_computing = True

    def _place_rows(self) -> None:
        """Who is in which place of the batch. Those that may lack pages for the coming burst get them here."""
        self._grow(BURST)
        self.params = replace(next(iter(self.active)).request.params, max_tokens=1)
        self.rows = np.array([place.row for place in self.active.values()], np.int32)
        self.bucket = next(size for size in self.buckets if size >= len(self.rows))
        self._graph(self.bucket, self.params)  # captured on padding rows, so before the rows are there
        padded = np.full(self.bucket, _PADDING_ROW, np.int32)
        padded[: len(self.rows)] = self.rows
        self.rows_B[: self.bucket] = torch.from_numpy(padded).to(self.device)
        self.places_changed = False

    def _grow(self, steps: int) -> None:
        """Pages for the coming steps; where they run out, the youngest responses make room and start again later."""
        rows = np.array([place.row for place in self.active.values()], np.int32)
        last = np.minimum(self.looks.own_lengths[rows] + steps - 2, self.limits[rows] - 1)
        short = last // PAGE + 1 > self.own_pages[rows]
        if not short.any():
            return
        for response in [r for r, is_short in zip([*self.active], short, strict=True) if is_short]:
            if response not in self.active:
                continue
            place = self.active[response]
            own = int(self.looks.own_lengths[place.row])
            missing = min(own + steps - 2, self.limits[place.row] - 1) // PAGE + 1 - len(place.pages)
            while missing > len(self.store.free) and len(self.active) > 1:
                youngest = next(reversed(self.active))
                if self.is_computing:  # it is still at work: before the next burst somebody has to go
                    self.places_changed = True
                    return
                self._push_out(youngest)
            if response not in self.active:
                continue
            new = self.store.take(missing)
            start = pages_for(response.prompt.length - 1) + len(place.pages)
            self.host_table[place.row, start : start + missing] = new
            place.pages += new
            self.own_pages[place.row] += missing
            self.table_changed = True

    def _push_out(self, response: Response) -> None:
        self.remove([response])
        if not any(other.prompt is response.prompt for other in self.active):
            self.forget(response.prompt)  # it will be computed again
        response.switches.clear()
        self.restarts += 1
        self.pushed_out.insert(0, response)

    def _graph(self, bucket: int, params: SamplingParams) -> tuple[torch.cuda.CUDAGraph, Tensor | None] | None:
        """Of one step, without the drawing where it is truncated: then with the logits to draw from.

        Captured on padding rows, which draw nothing, when a size is first needed.
        """
        if not self.can_capture:
            return None
        key = bucket, None if _is_truncated(params) else params
        if key not in self.graphs:
            self.rows_B.zero_()
            run = self._kept_logits if _is_truncated(params) else self._step
            self.graphs[key] = self.pool.capture(lambda: run(bucket, params))
        return self.graphs[key]

    def _run_step(self) -> None:
        graph = self._graph(self.bucket, self.params)
        if graph is None:
            self._step(self.bucket, self.params)
            return
        graph[0].replay()
        if graph[1] is not None:
            self._draw(graph[1], self.params)

    @torch.no_grad()
    def _step(self, bucket: int, params: SamplingParams) -> None:
        self._draw(self._logits(bucket), params)

    def _kept_logits(self, bucket: int, params: SamplingParams) -> Tensor:
        """Where all sizes of graphs put them, as each would otherwise keep its own."""
        if self.kept_logits is None:
            shape = self.max_concurrent, len(self.weight)
            self.kept_logits = torch.empty(shape, dtype=torch.float32, device=self.device)
        return self.kept_logits[:bucket].copy_(self._logits(bucket))

    def _logits(self, bucket: int) -> Tensor:
        state, rows_B = self.draw_state, self.rows_B[:bucket]
        index = rows_B.long()
        own_B = state.own_lengths[index].long()
        tokens_B = state.tokens[index, own_B - 1].long()
        positions_B = self.prompt_lengths[index] + own_B - 1
        paged = PagedState(rows_B, self.table, self.prompt_lengths, state.own_lengths)
        hidden_B = hidden_states(self.model, tokens_B, positions_B, PagedAttention(self.store, paged))
        return wide_product(hidden_B, self.weight.t())

    def _draw(self, logits_BV: Tensor, params: SamplingParams) -> None:
        bucket = len(logits_BV)
        size = _TRUNCATED_ROWS if _is_truncated(params) else bucket
        for start in range(0, bucket, size):
            rows = slice(start, start + size)
            draw_and_advance(logits_BV[rows], self.rows_B[:bucket][rows], self.draw_state, params)


def _is_truncated(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_p < 1 or params.top_k > 0)


def _can_capture(causal_lm: Any) -> bool:
    """Not where transformers looks at the positions in every step to choose the angles of a rotation."""
    kinds = [getattr(module, "rope_type", None) for module in causal_lm.modules()]
    named = {name for kind in kinds for name in (kind.values() if isinstance(kind, dict) else [kind])}
    return head_weight(causal_lm).is_cuda and not named & {"dynamic", "longrope"}


class _Looks:
    """What the host learns after a burst: for each row its length and whether it has finished."""

    def __init__(self, rows: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.own, self.done = (torch.zeros(rows, dtype=torch.int32, pin_memory=is_cuda) for _ in range(2))
        self.own_lengths, self.finished = self.own.numpy(), self.done.numpy()
        self.event = torch.cuda.Event() if is_cuda else None

    def request(self, state: DrawState) -> None:
        self.own.copy_(state.own_lengths, non_blocking=True)
        self.done.copy_(state.finished, non_blocking=True)
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


def _cache_shape(causal_lm: Any, pages: int) -> tuple[int, int, int, int]:
    config = causal_lm.config.get_text_config()
    return config.num_hidden_layers, pages, key_heads(config), head_size(config)
