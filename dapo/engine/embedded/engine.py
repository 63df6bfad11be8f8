"""The embedded engine: continuous batching on the very module that is being trained."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dapo.engine.embedded.eager import EagerDecoder
from dapo.engine.embedded.sequence import Decoder, Finished, Response, SharedPrompt
from dapo.kernels.sampler import row_key
from dapo.model.forward import head_weight
from dapo.types import FinishReason, Request, Rollout, SamplingParams

_EAGER_CONCURRENT = 64
_MAX_LENGTH = 4096


class EmbeddedEngine:
    """Samples from `causal_lm` as it is: finished responses leave, waiting ones enter, a prompt is prefilled once.

    `max_concurrent` 0: as many as serve the device well. `max_length` is the longest prompt with its response; on a
    GPU the key/value cache takes at most `kv_memory_fraction` of the memory that is free beside `reserved` bytes.
    """

    def __init__(
        self,
        causal_lm: Any,
        tokenizer: Any,
        stop_ids: frozenset[int],
        seed: int,
        max_concurrent: int = 0,
        *,
        max_length: int | None = None,
        kv_memory_fraction: float = 0.5,
        reserved: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        is_plain = getattr(tokenizer, "is_fast", False) and not tokenizer.clean_up_tokenization_spaces
        self.decode_batch = tokenizer.backend_tokenizer.decode_batch if is_plain else None
        self.seed = seed
        self.version = 0
        self.waiting: deque[Response] = deque()
        self.prompts: dict[tuple[int, ...], SharedPrompt] = {}
        self.decoder: Decoder
        if head_weight(causal_lm).is_cuda:
            from dapo.engine.embedded.paged import PagedDecoder

            self.decoder = PagedDecoder.sized(
                causal_lm, stop_ids, max_concurrent, max_length or _MAX_LENGTH, kv_memory_fraction, reserved
            )
        else:
            self.decoder = EagerDecoder(causal_lm, stop_ids, max_concurrent or _EAGER_CONCURRENT)

    @property
    def active(self) -> Collection[Response]:
        return self.decoder.active

    @property
    def cache_bytes(self) -> int:
        """Memory that the key/value cache holds for good; on a CPU it grows and shrinks as needed."""
        return self.decoder.cache_bytes

    def release_cache(self) -> None:
        """Give the cache's memory back until something is sampled again; graphs are then captured anew."""
        assert not self.active and not self.waiting
        self.decoder.release_cache()

    def prepare(self, params: SamplingParams) -> None:
        """Compile and capture now what would otherwise be when it is first needed. On a CPU there is nothing to do."""
        self.decoder.prepare(_kind(params))

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            prompt = self.prompts.setdefault(request.prompt, SharedPrompt(request.prompt))
            prompt.users += request.n
            for index in range(request.n):
                key = row_key(self.seed, request.phase, request.serial, index)
                self.waiting.append(Response(request, prompt, index, key))
        kinds = {_kind(response.request.params) for response in [*self.waiting, *self.active]}
        assert len(kinds) <= 1, "all groups in flight are drawn with the same temperature and truncation"

    @torch.no_grad()
    def poll(self) -> list[Rollout]:
        finished: list[Finished] = []
        while not finished and (self.active or self.waiting):
            finished += self.decoder.advance()
            finished += self._start_waiting()
            self._put_back(self.decoder.displaced())
        for response, _ in finished:
            self._leave_prompt(response.prompt)
        if not self.active and not self.waiting:
            self.decoder.release()
        texts = self._texts([response.tokens for response, _ in finished])
        return [self._rollout(*found, text) for found, text in zip(finished, texts, strict=True)]

    def cancel(self, serials: Iterable[int]) -> int:
        gone = set(serials)
        self.decoder.settle()
        stopped = [response for response in self.active if response.request.serial in gone]
        tokens = sum(self.decoder.drawn(response) for response in stopped)
        self.decoder.remove(stopped)
        never_started = [response for response in self.waiting if response.request.serial in gone]
        self.waiting = deque(response for response in self.waiting if response.request.serial not in gone)
        for response in [*stopped, *never_started]:
            self._leave_prompt(response.prompt)
        return tokens

    def sync_weights(self, version: int) -> None:
        """What is under way goes on with the new weights, its cached keys and values being those of the old."""
        assert version == self.version + 1 or not self.active, "one switch stands for one version"
        self.decoder.settle()
        for response in self.active:
            response.switches.append(self.decoder.drawn(response))
        # Newcomers must not start from what the old weights made of their prompt.
        old, self.prompts = self.prompts, {}
        for response in self.waiting:
            response.prompt.users -= 1
            response.prompt = self.prompts.setdefault(response.prompt.tokens, SharedPrompt(response.prompt.tokens))
            response.prompt.users += 1
        for prompt in old.values():
            if prompt.users == 0:
                self.decoder.forget(prompt)
        self.version = version

    def figures(self) -> dict[str, float]:
        return self.decoder.figures()

    def close(self) -> None:
        self.cancel({response.request.serial for response in [*self.active, *self.waiting]})
        self.decoder.release()

    def _start_waiting(self) -> list[Finished]:
        newcomers = [self.waiting.popleft() for _ in range(self.decoder.room(self.waiting))]
        for response in newcomers:
            response.version = self.version
        return self.decoder.start(newcomers)

    def _put_back(self, displaced: Sequence[Response]) -> None:
        """They start again with the weights of then, so not from what older ones made of their prompt."""
        for response in displaced:
            prompt = self.prompts.setdefault(response.prompt.tokens, SharedPrompt(response.prompt.tokens))
            prompt.users += 1
            self._leave_prompt(response.prompt)
            response.prompt = prompt
        self.waiting.extendleft(reversed(displaced))

    def _leave_prompt(self, prompt: SharedPrompt) -> None:
        prompt.users -= 1
        if prompt.users == 0:
            if self.prompts.get(prompt.tokens) is prompt:
                del self.prompts[prompt.tokens]
            self.decoder.forget(prompt)

    def _texts(self, tokens: Sequence[Sequence[int] | np.ndarray]) -> list[str]:
        """Without special tokens; several at once by the tokenizer's own threads, which is several times as fast."""
        if self.decode_batch is not None:
            return self.decode_batch([np.asarray(ids).tolist() for ids in tokens], skip_special_tokens=True)
        return [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens]

    def _rollout(self, response: Response, reason: FinishReason, text: str) -> Rollout:
        return Rollout(
            serial=response.request.serial,
            index=response.index,
            tokens=np.asarray(response.tokens, dtype=np.int32),
            logprobs=np.asarray(response.logprobs, dtype=np.float32),
            finish_reason=reason,
            weight_version=response.version,
            text=text,
            switches=tuple(response.switches),
        )


def _kind(params: SamplingParams) -> SamplingParams:
    return replace(params, max_tokens=1)
