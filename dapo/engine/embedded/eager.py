"""The decoder for CPUs: it decodes step by step, and looks at the results of each step before the next one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dapo.engine.embedded.cache import (
    CachedPrompt,
    CacheSpan,
    DecodeAttention,
    ExtendAttention,
    NativeDecodeAttention,
    PromptStack,
    ResponseCache,
)
from dapo.engine.embedded.sequence import Finished, Response, SharedPrompt
from dapo.kernels import native
from dapo.kernels.sampler import draw, uniforms
from dapo.model.attention import AttentionPlan, Family
from dapo.model.forward import cpu_plan, has_native_attention, head_weight, hidden_states
from dapo.model.meter import head_size, key_heads
from dapo.model.products import wide_product
from dapo.types import FinishReason, SamplingParams

_PREFILL_TOKENS = 8192  # at most, in one forward pass


class EagerDecoder:
    """Decodes the active responses together. Response `active[i]` has slot i of the cache."""

    cache_bytes = working_bytes = 0  # nothing is held permanently
    burst = 1

    def __init__(self, causal_lm: Any, stop_ids: frozenset[int], max_concurrent: int) -> None:
        self.model = causal_lm
        self.stop_ids = stop_ids
        self.max_concurrent = max_concurrent
        self.active: list[Response] = []
        self.parked: dict[Response, Tensor] = {}  # keys and values of finished episodes, without the last token's
        self.given: dict[Response, int] = {}  # episodes that go on in the next step: how many tokens are cached
        self.stacked: PromptStack | None = None
        config = causal_lm.config.get_text_config()
        weight = head_weight(causal_lm)
        self.device, self.dtype = weight.device, weight.dtype
        self.is_native = has_native_attention(causal_lm)
        shape = config.num_hidden_layers, key_heads(config), head_size(config)
        self.cache = ResponseCache(*shape, self.dtype, self.device)
        self.steps, self.occupied = 0, 0  # `occupied`: active responses, summed over the steps

    def suspend(self) -> None:
        pass

    def prepare(self, params: SamplingParams) -> None:
        pass

    def room(self, waiting: Iterable[Response]) -> int:
        return min(self.max_concurrent - len(self.active), sum(1 for _ in waiting))

    def start(self, newcomers: Sequence[Response]) -> list[Finished]:
        """Prefill prompts, and draw the first token of each newcomer from its prompt's last hidden state.

        An episode that goes on draws its next token in the next step, from its last given token.
        """
        if not newcomers:
            return []
        prompts = list(dict.fromkeys(response.prompt for response in newcomers))
        self._prefill([prompt for prompt in prompts if prompt.cached is None])
        self._continue([response for response in newcomers if response.fixed])
        newcomers = [response for response in newcomers if not response.fixed]
        if newcomers:
            prompts = list(dict.fromkeys(response.prompt for response in newcomers))
            row = {prompt: i for i, prompt in enumerate(prompts)}
            rows = torch.tensor([row[response.prompt] for response in newcomers], device=self.device)
            hidden = torch.stack([prompt.cached.last_hidden for prompt in prompts])
            self._draw(newcomers, wide_product(hidden, head_weight(self.model).t())[rows])
            self.active += newcomers
        return self._collect(newcomers)

    def advance(self) -> list[Finished]:
        if not self.active:
            return []
        self.steps += 1
        self.occupied += len(self.active)
        lengths = [len(response.tokens) - 1 for response in self.active]  # the newest token is not in the cache yet
        self.cache.reserve(len(self.active), max(lengths) + 1)
        stack = self._stack()
        hidden = self._hidden(stack, lengths)
        self._draw(self.active, wide_product(hidden, head_weight(self.model).t()))
        return self._collect(self.active)

    def _hidden(self, stack: PromptStack, lengths: Sequence[int]) -> Tensor:
        """Return the hidden states of the newest tokens.

        Tokens that environments gave are computed along with them: a pass of their own would read all weights again.
        """
        spans = [
            CacheSpan(response.prompt.cached, slot, self.given[response], length)
            for slot, (response, length) in enumerate(zip(self.active, lengths, strict=True))
            if response in self.given
        ]
        parts = [(slot, length, length + 1) for slot, length in enumerate(lengths)]
        parts += [(span.slot, span.start, span.end) for span in spans]
        tokens = [token for slot, start, end in parts for token in self.active[slot].tokens[start:end]]
        positions = [self.active[slot].prompt.length + i for slot, start, end in parts for i in range(start, end)]
        self.given.clear()
        tokens_T, positions_T = (torch.tensor(values, device=self.device) for values in (tokens, positions))
        attention = self._attention(stack, lengths, spans)
        return hidden_states(self.model, tokens_T, positions_T, attention)[: len(lengths)]

    def _attention(self, stack: PromptStack, lengths: Sequence[int], spans: Sequence[CacheSpan]) -> AttentionPlan:
        index = {prompt: i for i, prompt in enumerate(stack.prompts)}
        prompts = [index[response.prompt] for response in self.active]
        if self.is_native:
            tokens = [*enumerate(lengths), *((span.slot, i) for span in spans for i in range(span.start, span.end))]
            return NativeDecodeAttention(self.cache, stack, tokens, prompts)
        plan = DecodeAttention(self.cache, stack, torch.tensor(lengths, device=self.device), prompts)
        return ExtendAttention(plan, spans) if spans else plan

    def wait(self) -> None:
        pass

    def tokens_drawn(self, response: Response) -> int:
        return len(response.tokens)

    def remove(self, responses: Sequence[Response]) -> None:
        """Remove responses and move the last ones into the gaps, so that the active ones stay in the first slots."""
        gone = set(responses)
        for row in reversed(range(len(self.active))):
            if self.active[row] in gone:
                last = self.active.pop()
                if row < len(self.active):
                    self.cache.move(len(self.active), row, len(last.tokens) - 1)
                    self.active[row] = last

    def unpark(self, responses: Iterable[Response]) -> None:
        for response in responses:
            self.parked.pop(response, None)

    def free_prompt(self, prompt: SharedPrompt) -> None:
        prompt.cached = None

    def take_preempted(self) -> list[Response]:
        return []

    def release_idle(self) -> None:
        self.cache.release()
        self.stacked = None

    def metrics(self) -> dict[str, float]:
        metrics = {"engine/decode_steps": float(self.steps)}
        if self.steps:
            metrics["engine/batch_occupancy"] = self.occupied / (self.steps * self.max_concurrent)
        self.steps, self.occupied = 0, 0
        return metrics

    def _prefill(self, prompts: list[SharedPrompt]) -> None:
        batch: list[SharedPrompt] = []
        for prompt in prompts:
            if batch and sum(p.length for p in batch) + prompt.length > _PREFILL_TOKENS:
                self._prefill_packed(batch)
                batch = []
            batch.append(prompt)
        if batch:
            self._prefill_packed(batch)

    def _prefill_packed(self, prompts: list[SharedPrompt]) -> None:
        tokens_T = torch.tensor([token for prompt in prompts for token in prompt.tokens], device=self.device)
        positions_T = torch.cat([torch.arange(prompt.length) for prompt in prompts]).to(self.device)
        starts = list(accumulate((prompt.length for prompt in prompts[:-1]), initial=0))
        families = [Family((start, prompt.length)) for start, prompt in zip(starts, prompts, strict=True)]
        plan = cpu_plan(self.model, families, positions_T, capture=True)
        hidden = hidden_states(self.model, tokens_T, positions_T, plan)
        assert plan.captured is not None
        for start, prompt in zip(starts, prompts, strict=True):
            end = start + prompt.length
            prompt.cached = CachedPrompt(
                keys=[keys[:, start:end].clone() for keys, _ in plan.captured],
                values=[values[:, start:end].clone() for _, values in plan.captured],
                last_hidden=hidden[end - 1].clone(),
            )

    def _continue(self, responses: Sequence[Response]) -> None:
        """Add episodes that continue, with the cache of their earlier turns. The next step computes the rest."""
        if not responses:
            return
        first = len(self.active)
        self.active += responses
        self.cache.reserve(len(self.active), max(len(response.tokens) for response in responses))
        for slot, response in enumerate(responses, start=first):
            cached = self.parked.pop(response, None)
            self.given[response] = 0 if cached is None else cached.shape[3]
            if cached is not None:
                self.cache.storage[:, :, slot, :, : cached.shape[3]] = cached

    def _stack(self) -> PromptStack:
        """Return the prompts of the active responses, stacked.

        The stack is rebuilt only if a prompt is missing from it, or if at least half of its prompts are unused.
        """
        needed = dict.fromkeys(response.prompt for response in self.active)
        stacked = self.stacked.prompts if self.stacked is not None else ()
        if self.stacked is None or not needed.keys() <= set(stacked) or 2 * len(needed) <= len(stacked):
            # Attention scores and sums are at least float32, as in the training kernels.
            dtype = self.dtype if self.is_native else torch.promote_types(self.dtype, torch.float32)
            self.stacked = PromptStack([*needed], dtype)
        return self.stacked

    def _draw(self, responses: Sequence[Response], logits_BV: Tensor) -> None:
        keys_B = torch.tensor([response.key for response in responses], device=self.device)
        positions_B = torch.tensor([len(response.tokens) for response in responses], device=self.device)
        params = responses[0].request.params
        is_plain = params.temperature > 0 and params.top_p == 1 and params.top_k <= 0
        if self.is_native and is_plain:
            tokens_B, logprobs_B = native.draw(logits_BV, uniforms(keys_B, positions_B), params.temperature)
        else:
            tokens_B, logprobs_B = draw(logits_BV, uniforms(keys_B, positions_B), params)
        for response, token, logprob in zip(responses, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
            assert isinstance(response.tokens, list) and isinstance(response.logprobs, list)
            response.tokens.append(token)
            response.logprobs.append(logprob)

    def _collect(self, drawn: Sequence[Response]) -> list[Finished]:
        """Take the finished ones of the responses that have a new token out of the active rows; park episodes."""
        finished: list[Finished] = []
        for response in drawn:
            if reason := self._finish_reason(response):
                finished.append((response, reason))
        slots = {response: slot for slot, response in enumerate(self.active)}
        for response, _ in finished:
            if response.request.turns:
                self.parked[response] = self.cache.copy(slots[response], len(response.tokens) - 1)
        self.remove([response for response, _ in finished])
        return finished

    def _finish_reason(self, response: Response) -> FinishReason | None:
        if response.tokens[-1] in self.stop_ids:
            return "stop"
        if response.stop is not None:
            turn = response.tokens[response.turn_start :]
            if response.stop.length(turn, len(turn) - 1):
                return "stop"
        return "length" if len(response.tokens) >= response.limit else None
