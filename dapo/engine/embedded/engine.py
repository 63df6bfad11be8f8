"""The embedded engine: continuous batching on the very module that is being trained."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapo.engine.embedded.cache import DecodeAttention, PromptStack, ResponseCache, SharedPrompt
from dapo.engine.embedded.sampler import draw, row_key, uniforms
from dapo.model.attention import Family, PackedAttention
from dapo.model.forward import head_weight, hidden_states, key_heads, query_groups, wide_product
from dapo.types import FinishReason, Request, Rollout, SamplingParams

_PREFILL_TOKENS = 8192


@dataclass(eq=False, slots=True)
class _Sequence:
    """A response in the making."""

    request: Request
    prompt: SharedPrompt
    index: int
    key: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class EmbeddedEngine:
    """Samples from `causal_lm` as it is: finished responses leave, waiting ones enter, a prompt is prefilled once."""

    def __init__(
        self, causal_lm: Any, tokenizer: Any, stop_ids: frozenset[int], seed: int, max_concurrent: int
    ) -> None:
        self.model = causal_lm
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.seed = seed
        self.max_concurrent = max_concurrent
        self.version = 0
        self.waiting: deque[_Sequence] = deque()
        self.active: list[_Sequence] = []
        self.prompts: dict[tuple[int, ...], SharedPrompt] = {}
        self.stacked: PromptStack | None = None
        config = causal_lm.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        weight = head_weight(causal_lm)
        self.device, self.dtype = weight.device, weight.dtype
        self.cache = ResponseCache(config.num_hidden_layers, key_heads(config), head_dim, self.dtype, self.device)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            prompt = self.prompts.setdefault(request.prompt, SharedPrompt(request.prompt))
            prompt.users += request.n
            for index in range(request.n):
                key = row_key(self.seed, request.phase, request.serial, index)
                self.waiting.append(_Sequence(request, prompt, index, key))
        kinds = {_kind(seq.request.params) for seq in [*self.waiting, *self.active]}
        assert len(kinds) <= 1, "all groups in flight are drawn with the same temperature and truncation"

    @torch.no_grad()
    def poll(self) -> list[Rollout]:
        finished: list[Rollout] = []
        while not finished and (self.active or self.waiting):
            finished += self._decode() if self.active else []
            finished += self._admit()
        if not self.active and not self.waiting:
            self._release()
        return finished

    def cancel(self, serials: Iterable[int]) -> int:
        gone = set(serials)
        rows = [i for i, seq in enumerate(self.active) if seq.request.serial in gone]
        tokens = sum(len(self.active[i].tokens) for i in rows)
        for seq in [seq for seq in self.waiting if seq.request.serial in gone]:
            self.waiting.remove(seq)
            self._leave_prompt(seq.prompt)
        self._remove(rows)
        return tokens

    def sync_weights(self, version: int) -> None:
        assert not self.active and not self.waiting, "strict mode: rounds are drained before the weights change"
        self.version = version

    def close(self) -> None:
        self.cancel({seq.request.serial for seq in [*self.active, *self.waiting]})
        self._release()

    def _release(self) -> None:
        self.cache.release()
        self.stacked = None

    def _admit(self) -> list[Rollout]:
        """Fill the free slots; the first token of each newcomer follows from its prompt's last hidden state."""
        free = self.max_concurrent - len(self.active)
        newcomers = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        if not newcomers:
            return []
        prompts = list(dict.fromkeys(seq.prompt for seq in newcomers))
        self._prefill([prompt for prompt in prompts if prompt.last_hidden is None])
        place = {prompt: i for i, prompt in enumerate(prompts)}
        rows = torch.tensor([place[seq.prompt] for seq in newcomers], device=self.device)
        hidden = torch.stack([prompt.last_hidden for prompt in prompts if prompt.last_hidden is not None])
        self._draw(newcomers, wide_product(hidden, head_weight(self.model).t())[rows])
        self.active += newcomers
        return self._collect()

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
        plan = PackedAttention(families, positions_T, query_groups(self.model), self.dtype, capture=True)
        hidden = hidden_states(self.model, tokens_T, positions_T, plan)
        assert plan.captured is not None
        for start, prompt in zip(starts, prompts, strict=True):
            end = start + prompt.length
            prompt.keys = [keys[:, start:end].clone() for keys, _ in plan.captured]
            prompt.values = [values[:, start:end].clone() for _, values in plan.captured]
            prompt.last_hidden = hidden[end - 1].clone()

    def _decode(self) -> list[Rollout]:
        lengths = [len(seq.tokens) - 1 for seq in self.active]  # the newest token is not in the cache yet
        self.cache.reserve(len(self.active), max(lengths) + 1)
        stack = self._stack()
        places = {prompt: place for place, prompt in enumerate(stack.prompts)}
        lengths_B = torch.tensor(lengths, device=self.device)
        tokens_B = torch.tensor([seq.tokens[-1] for seq in self.active], device=self.device)
        positions_B = lengths_B + torch.tensor([seq.prompt.length for seq in self.active], device=self.device)
        plan = DecodeAttention(self.cache, stack, lengths_B, [places[seq.prompt] for seq in self.active])
        hidden = hidden_states(self.model, tokens_B, positions_B, plan)
        self._draw(self.active, wide_product(hidden, head_weight(self.model).t()))
        return self._collect()

    def _stack(self) -> PromptStack:
        """The prompts of the active responses; made anew only when one is missing, or most are no longer needed."""
        needed = dict.fromkeys(seq.prompt for seq in self.active)
        there = self.stacked.prompts if self.stacked is not None else ()
        if self.stacked is None or not needed.keys() <= set(there) or 2 * len(needed) <= len(there):
            # Scores and sums in float32 at least, as the training kernels have them.
            self.stacked = PromptStack([*needed], torch.promote_types(self.dtype, torch.float32))
        return self.stacked

    def _draw(self, sequences: list[_Sequence], logits_BV: Tensor) -> None:
        keys_B = torch.tensor([seq.key for seq in sequences], device=self.device)
        positions_B = torch.tensor([len(seq.tokens) for seq in sequences], device=self.device)
        tokens_B, logprobs_B = draw(logits_BV, uniforms(keys_B, positions_B), sequences[0].request.params)
        for seq, token, logprob in zip(sequences, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
            seq.tokens.append(token)
            seq.logprobs.append(logprob)

    def _collect(self) -> list[Rollout]:
        """Take the finished responses out of the active rows."""
        rows, rollouts = [], []
        for row, seq in enumerate(self.active):
            if reason := self._finish_reason(seq):
                rows.append(row)
                rollouts.append(self._rollout(seq, reason))
        self._remove(rows)
        return rollouts

    def _finish_reason(self, seq: _Sequence) -> FinishReason | None:
        if seq.tokens[-1] in self.stop_ids:
            return "stop"
        return "length" if len(seq.tokens) >= seq.request.params.max_tokens else None

    def _rollout(self, seq: _Sequence, reason: FinishReason) -> Rollout:
        return Rollout(
            serial=seq.request.serial,
            index=seq.index,
            tokens=np.array(seq.tokens, dtype=np.int32),
            logprobs=np.array(seq.logprobs, dtype=np.float32),
            finish_reason=reason,
            weight_version=self.version,
            text=self.tokenizer.decode(seq.tokens, skip_special_tokens=True),
        )

    def _remove(self, rows: list[int]) -> None:
        """Close the gaps from the back, so that the active rows stay the first slots of the cache."""
        for row in sorted(rows, reverse=True):
            self._leave_prompt(self.active[row].prompt)
            last = self.active.pop()
            if row < len(self.active):
                self.cache.move(len(self.active), row, len(last.tokens) - 1)
                self.active[row] = last

    def _leave_prompt(self, prompt: SharedPrompt) -> None:
        prompt.users -= 1
        if prompt.users == 0:
            del self.prompts[prompt.tokens]


def _kind(params: SamplingParams) -> SamplingParams:
    return replace(params, max_tokens=1)
