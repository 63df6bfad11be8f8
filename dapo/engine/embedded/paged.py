"""The decoder for GPUs: it decodes in bursts of steps, and the host looks at the results only between two bursts.

After a burst, finished rows leave the batch and waiting responses take their positions. While a burst runs on the
device, the host turns the results of the last one into rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dapo.engine.embedded.extend import OwnSpan, PagedExtension
from dapo.engine.embedded.pages import PageStore, longest_pages, pages_for
from dapo.engine.embedded.prefill import Prefill
from dapo.engine.embedded.sequence import Finished, Response, SharedPrompt, drawing
from dapo.engine.embedded.step import PADDING_ROW, DecodeStep, RowStatus
from dapo.kernels.piece_attention import PAGE
from dapo.model.forward import head_weight
from dapo.model.meter import head_size, key_heads
from dapo.types import FinishReason, SamplingParams

BURST = 8  # steps per burst: with more, finished rows idle for longer; with fewer, the GPU waits for the host
# Batch sizes that a graph is captured for; a batch is padded to the next one.
_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, *range(1024, 1 << 16, 512))
# A finished row takes part until the burst ends. One that has reached its limit then writes its last token to the
# cache, at index `limit`. If that index begins a page that the row does not have, its table names page 0, which belongs
# to padding.
_REASONS: dict[int, FinishReason] = {1: "stop", 2: "length"}


@dataclass(eq=False, slots=True)
class _Row:
    """Device row and cache pages of one active response."""

    index: int
    pages: list[int]  # of the response alone; the pages of its prompt are shared


class PagedDecoder:
    """Schedules responses on a paged key/value cache: who is in the batch, who has which row and which pages.

    The active responses, oldest first, are the first positions of the batch. The rest of a bucket is padding. A
    finished episode gives its row back but keeps its pages, until it goes on or others need them.
    """

    working_bytes = 0  # that graphs and passes take besides the cache
    burst = BURST

    def __init__(
        self, causal_lm: Any, stop_ids: frozenset[int], max_concurrent: int, max_length: int, pages: int
    ) -> None:
        self.model = causal_lm
        self.max_concurrent = max_concurrent
        self.max_length = max_length
        weight = head_weight(causal_lm)
        self.device = weight.device
        self.store = PageStore(*cache_shape(causal_lm, pages), dtype=weight.dtype, device=self.device)
        self.prefill = Prefill(causal_lm, self.store)
        self.extension = PagedExtension(causal_lm, self.store)
        self.decode_step = DecodeStep(causal_lm, self.store, stop_ids, max_concurrent, max_length)
        self.buckets = [bucket for bucket in _BUCKETS if bucket < max_concurrent] + [max_concurrent]
        rows = max_concurrent + 1  # with the padding row
        self.active: dict[Response, _Row] = {}
        self.parked: dict[Response, list[int]] = {}  # the pages of finished episodes
        self.prompts: dict[SharedPrompt, None] = {}  # that have pages
        self.free_rows = list(range(rows - 1, PADDING_ROW, -1))
        self.preempted: list[Response] = []
        # The host's copy of what the device knows of each row. `status` is refreshed after every burst.
        self.host_table = np.zeros(self.decode_step.table.shape, np.int32)
        self.limits, self.own_pages = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self.searched = np.ones(rows, np.int64)  # own tokens in which no stop string was found
        self.status = RowStatus(rows, self.device)
        # Whether the device's copies of the page table and of the batch are out of date.
        self.table_changed = False
        self.batch_changed = False
        # The batch: the row of each position in use, its padded size, and how its tokens are drawn.
        self.batch_rows = np.zeros(0, np.int32)
        self.bucket, self.params = 0, SamplingParams()
        # The burst in flight: its number of steps, and the own tokens of the batch when it started.
        self.is_computing, self.burst_steps, self.tokens_before = False, 0, 0
        self.ended_tokens = self.ended = 0.0  # the latest responses that finished, and their tokens
        self._reset_counters()

    @property
    def cache_bytes(self) -> int:
        return self.store.storage.nbytes

    def suspend(self) -> None:
        self.decode_step.release()
        self.prefill.release()
        self.extension.release()
        self.store.release()
        if self.device.type == "cuda":  # whole, so that the cache, which is one tensor, finds it whole again
            torch.cuda.empty_cache()

    @torch.no_grad()
    def prepare(self, params: SamplingParams) -> None:
        self.store.restore(longest_pages(self.max_length))
        for bucket in self.buckets:
            self.decode_step.prepare(bucket, params)
        self.batch_changed = True  # capturing has overwritten the batch

    def room(self, waiting: Iterable[Response]) -> int:
        """Count the responses that can start now.

        Each needs a row, pages for its tokens so far and for those that can be expected, and pages for its prompt
        unless that is cached. The pages of finished episodes count as free. Active responses keep back what they are
        still expected to need: one that is preempted for lack of pages has to start again. An idle decoder always
        admits one.
        """
        if not waiting or not self.free_rows:
            return 0
        rows = [row.index for row in self.active.values()]
        missing = np.maximum(1, self._expected_pages(self.limits[rows]) - self.own_pages[rows])
        free_pages = len(self.store.free) + sum(map(len, self.parked.values())) - int(missing.sum())
        seen, count = set[SharedPrompt](), 0
        for response in waiting:
            if count == len(self.free_rows):
                break
            needed = max(pages_for(response.fixed + 1), int(self._expected_pages(response.limit)))
            if response.prompt.cached is None and response.prompt not in seen:
                needed += pages_for(response.prompt.length - 1)
            if needed > free_pages and (self.active or count):
                break
            free_pages -= needed
            seen.add(response.prompt)
            count += 1
        return count

    def _expected_pages(self, limits: Any) -> Any:
        """Return the pages of responses of average length, at most those of their limits.

        The average is over the latest responses. At first it is half of the limit, with the weight of 16 responses.
        """
        mean = (self.ended_tokens + 8 * limits) / (self.ended + 16)
        return np.ceil(np.minimum(mean, limits) / PAGE)

    def start(self, newcomers: Sequence[Response]) -> list[Finished]:
        """Compute the newcomers' prompts and given tokens, add them to the batch, and start the next burst.

        Always returns an empty list: `advance` reports what finished.
        """
        self.store.restore(longest_pages(self.max_length))
        kept = [response for response in newcomers if response in self.parked]
        for response in newcomers:  # active from here on, so that making room does not free its prompt
            length = response.prompt.length + response.limit
            assert length <= self.max_length + 1, f"a sequence of {length} tokens, longer than max_length"
            self.active[response] = _Row(self.free_rows.pop(), self.parked.pop(response, []))
        prompts = [prompt for prompt in dict.fromkeys(r.prompt for r in newcomers) if prompt.cached is None]
        for prompt in prompts:
            prompt.cached = self._take(pages_for(prompt.length - 1))
            self.prompts[prompt] = None
        self.prefill(prompts)
        for response in newcomers:
            pages = self.active[response].pages
            pages += self._take(max(0, pages_for(response.fixed + 1) - len(pages)))
        self._write_rows(newcomers)
        self.extension([self._span(r, is_kept=r in kept) for r in newcomers if r.fixed])
        if self.active and not self.is_computing:
            self._start_burst()
            # While the burst runs, take the pages that the next one needs. `status` may be from before or after the
            # burst in flight: the copy can arrive at any time. Lengths only grow, so at worst a page is taken early.
            self._grow(2 * BURST)
        return []

    def advance(self) -> list[Finished]:
        """Wait for the burst in flight and return the responses that finished in it."""
        self.wait()
        stopped = self._stopped_lengths()
        if not stopped and not self.status.finished[self.batch_rows].any():
            return []
        done = [
            (response, row)
            for response, row in self.active.items()
            if self.status.finished[row.index] or response in stopped
        ]
        if not done:
            return []  # all that finished were canceled
        rows = np.array([row.index for _, row in done])
        lengths = self.status.own_lengths[rows] - 1  # without the last prompt token
        lengths = np.array([stopped.get(response, length) for (response, _), length in zip(done, lengths, strict=True)])
        self.ended, self.ended_tokens = self.ended + len(done), self.ended_tokens + float(lengths.sum())
        index, state = torch.from_numpy(rows).to(self.device), self.decode_step.draw_state
        tokens, logprobs = (
            values[index, 1 : 1 + lengths.max()].cpu().numpy() for values in (state.tokens, state.logprobs)
        )
        finished: list[Finished] = []
        for i, (response, row) in enumerate(done):
            response.tokens = tokens[i, : lengths[i]].copy()
            response.logprobs = logprobs[i, : lengths[i]].copy()
            # The weights may have advanced after its end, before the host looked.
            response.switches = [switch for switch in response.switches if switch < lengths[i]]
            reason = "stop" if response in stopped else _REASONS[int(self.status.finished[row.index])]
            finished.append((response, reason))
            if response.request.turns:
                self.parked[response], row.pages = row.pages, []
        self.remove([response for response, _ in done])
        return finished

    def _stopped_lengths(self) -> dict[Response, int]:
        """Find the responses that a stop string ended since the last look, and their lengths: later tokens are void."""
        watched = [(response, row.index, response.stop) for response, row in self.active.items() if response.stop]
        if not watched:
            return {}
        rows = np.array([row for _, row, _ in watched])
        own, searched = self.status.own_lengths[rows].copy(), self.searched[rows]
        columns = searched[:, None] + np.arange((own - searched).max())
        is_new = columns < own[:, None]
        fresh = self._fetch_tokens(rows[:, None], np.where(is_new, columns, 0))
        hits = np.any([stop.candidates(fresh) for stop in {stop for _, _, stop in watched}], axis=0) & is_new
        self.searched[rows] = own
        chosen = np.flatnonzero(hits.any(axis=1))
        if not len(chosen):
            return {}
        tokens = self._fetch_tokens(rows[chosen, None], np.arange(1, own[chosen].max())[None])
        found: dict[Response, int] = {}
        for k, i in enumerate(chosen):
            response, _, stop = watched[i]
            first = response.turn_start
            if length := stop.length(tokens[k, first : own[i] - 1], searched[i] - 1 - first):
                found[response] = first + length
        return found

    def _fetch_tokens(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        index = [torch.from_numpy(each).to(self.device) for each in (rows, columns)]
        return self.decode_step.draw_state.tokens[index[0], index[1]].cpu().numpy()

    def wait(self) -> None:
        if not self.is_computing:
            return
        self.status.wait()
        self.is_computing = False
        self.steps += self.burst_steps
        self.drawn_tokens += int(self.status.own_lengths[self.batch_rows].sum()) - self.tokens_before

    def tokens_drawn(self, response: Response) -> int:
        return int(self.status.own_lengths[self.active[response].index]) - 1

    def remove(self, responses: Sequence[Response]) -> None:
        for response in responses:
            row = self.active.pop(response)
            self.store.give_back(row.pages)
            self.free_rows.append(row.index)
        self.batch_changed |= bool(responses)

    def unpark(self, responses: Iterable[Response]) -> None:
        for response in filter(self.parked.__contains__, [*responses]):
            self.store.give_back(self.parked.pop(response))
            self._free_unused_prompt(response.prompt)

    def free_prompt(self, prompt: SharedPrompt) -> None:
        self.store.give_back(prompt.cached or ())
        prompt.cached = None
        self.prompts.pop(prompt, None)

    def take_preempted(self) -> list[Response]:
        preempted, self.preempted = self.preempted, []
        return preempted

    def release_idle(self) -> None:
        assert not self.active  # the cache keeps its memory until `suspend`

    def metrics(self) -> dict[str, float]:
        steps = max(self.steps, 1)
        metrics = {
            "engine/decode_steps": float(self.steps),
            "engine/graph_replays": float(self.replays),
            "engine/batch_occupancy": self.drawn_tokens / (steps * self.max_concurrent),
            "engine/kv_occupancy": self.peak_cache_use,
            "engine/restarts": float(self.restarts),
        }
        self._reset_counters()
        self.ended, self.ended_tokens = self.ended / 2, self.ended_tokens / 2  # earlier steps count less and less
        return metrics

    def _reset_counters(self) -> None:
        self.steps = self.replays = self.drawn_tokens = self.restarts = 0
        self.peak_cache_use = 0.0

    def _write_rows(self, newcomers: Sequence[Response]) -> None:
        """Write the initial state of new responses to their rows, on the device and in the host's copies."""
        if not newcomers:
            return
        self.decode_step.write_rows([self.active[response].index for response in newcomers], newcomers)
        for response in newcomers:
            row, own = self.active[response], 1 + response.fixed
            listed = [*response.prompt.cached, *row.pages]
            self.host_table[row.index] = 0
            self.host_table[row.index, : len(listed)] = listed
            self.limits[row.index] = response.limit
            self.own_pages[row.index] = len(row.pages)
            self.status.own_lengths[row.index], self.status.finished[row.index] = own, 0
            self.searched[row.index] = own
        self.table_changed = self.batch_changed = True

    def _span(self, response: Response, *, is_kept: bool) -> OwnSpan:
        """Return the own tokens that are not in the cache: all but the newest, or only those since the last turn.

        Own token i is token i - 1 of the response. The last token of a turn is not in the cache when the turn ends.
        """
        start = response.given[-1][0] if is_kept else 0
        own, pages = [response.prompt.tokens[-1], *response.tokens], self.host_table[self.active[response].index]
        return OwnSpan(own[start : response.fixed], start, response.prompt.length - 1, pages)

    def _make_room(self, count: int) -> None:
        """Let the episodes that finished last give up their pages, until `count` pages are free.

        If that is too little, prompts give theirs up whose responses all wait.
        """
        while count > len(self.store.free) and self.parked:
            self.unpark([next(reversed(self.parked))])
        if count > len(self.store.free):
            for prompt in [*self.prompts]:
                self._free_unused_prompt(prompt)

    def _take(self, count: int) -> list[int]:
        self._make_room(count)
        return self.store.take(count)

    def _start_burst(self) -> None:
        """Launch the next steps without waiting for them. The GPU is idle here, so the host must be quick."""
        if self.batch_changed:
            self._write_batch()
        own, limits = self.status.own_lengths[self.batch_rows], self.limits[self.batch_rows]
        # Own tokens include the last prompt token, so a row draws at most `limits - own + 1` more.
        self.burst_steps = steps = max(1, min(BURST, int((limits - own).max()) + 1))
        self.tokens_before = int(own.sum())
        if self.table_changed:
            self.decode_step.table.copy_(torch.from_numpy(self.host_table))
            self.table_changed = False
        for _ in range(steps):
            self.decode_step.run(self.bucket, self.params)
        self.replays += steps if self.decode_step.can_capture else 0
        self.peak_cache_use = max(self.peak_cache_use, self.store.used)
        self.status.start_copy(self.decode_step.draw_state)
        self.is_computing = True

    def _write_batch(self) -> None:
        """Assign the active responses to the positions of the batch, with pages for the coming burst."""
        self._grow(BURST)  # may preempt, so it comes before the rows are listed
        self.params = drawing(next(iter(self.active)).request.params)
        self.batch_rows = np.array([row.index for row in self.active.values()], np.int32)
        self.bucket = next(size for size in self.buckets if size >= len(self.batch_rows))
        self.decode_step.prepare(self.bucket, self.params)  # may overwrite the batch, so it comes before the copy
        padded = np.full(self.bucket, PADDING_ROW, np.int32)
        padded[: len(self.batch_rows)] = self.batch_rows
        self.decode_step.rows_B[: self.bucket] = torch.from_numpy(padded).to(self.device)
        self.batch_changed = False

    def _grow(self, steps: int) -> None:
        """Give every active response the pages for its next `steps` tokens.

        When pages run out, the youngest responses are preempted and start again later. The oldest always progress.
        """
        rows = np.array([row.index for row in self.active.values()], np.int32)
        # The newest own token is not in the cache yet: step k = 0, 1, ... writes index own - 1 + k, the last step index
        # own + steps - 2. The last token of a response need not be written, so `limits - 1` bounds the index.
        last_written = np.minimum(self.status.own_lengths[rows] + steps - 2, self.limits[rows] - 1)
        missing_pages = last_written // PAGE + 1 - self.own_pages[rows]
        if not (missing_pages > 0).any():
            return
        for response, missing in zip([*self.active], missing_pages.tolist(), strict=True):
            if missing <= 0 or response not in self.active:  # preempted in favor of an older one
                continue
            self._make_room(missing)
            while missing > len(self.store.free) and len(self.active) > 1:
                if self.is_computing:  # no row can be preempted in mid-burst: do it before the next one
                    self.batch_changed = True
                    return
                self._preempt(next(reversed(self.active)))
            if response not in self.active:  # it was itself the youngest
                continue
            row = self.active[response]
            pages = self.store.take(missing)
            start = pages_for(response.prompt.length - 1) + len(row.pages)
            self.host_table[row.index, start : start + missing] = pages
            row.pages += pages
            self.own_pages[row.index] += missing
            self.table_changed = True

    def _preempt(self, response: Response) -> None:
        """Take an active response out of the batch and free its pages. It will start its turn again."""
        self.remove([response])
        self._free_unused_prompt(response.prompt)
        response.restart()
        self.restarts += 1
        self.preempted.insert(0, response)  # the youngest leaves first, so this keeps the oldest in front

    def _free_unused_prompt(self, prompt: SharedPrompt) -> None:
        """Free the cache of a prompt unless a response that is cached needs it. It is prefilled again for others."""
        if not any(other.prompt is prompt for other in (*self.active, *self.parked)):
            self.free_prompt(prompt)


def cache_shape(causal_lm: Any, pages: int) -> tuple[int, int, int, int]:
    """Return layers, pages, key/value heads and head size."""
    config = causal_lm.config.get_text_config()
    return config.num_hidden_layers, pages, key_heads(config), head_size(config)
