"""The embedded engine: continuous batching on the module that is being trained."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from dapo.engine.embedded.eager import EagerDecoder
from dapo.engine.embedded.sequence import Decoder, Finished, Response, SharedPrompt, drawing
from dapo.engine.stop import StopStrings
from dapo.kernels.sampler import row_key
from dapo.model.forward import head_weight
from dapo.model.tokens import ResponseTexts
from dapo.types import FinishReason, Request, Rollout, SamplingParams

# Defaults where the caller gives none.
_EAGER_CONCURRENT = 64
_MAX_LENGTH = 4096


class EmbeddedEngine:
    """Samples from the current weights of `causal_lm`. Finished responses leave the batch and waiting ones enter.

    A prompt is prefilled once for all its responses. `max_concurrent` 0 means a default for the device. `max_length` is
    the length of the longest prompt with its response. On a GPU the key/value cache takes at most `kv_memory_fraction`
    of the free memory that is left after `reserved` bytes. The texts of responses have no special tokens but
    `kept_tokens`.
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
        kept_tokens: Sequence[str] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.texts = ResponseTexts(tokenizer, kept_tokens)
        self.stops: dict[tuple[str, ...], StopStrings | None] = {(): None}
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
        """Bytes that the key/value cache holds permanently; 0 on a CPU, where it grows and shrinks."""
        return self.decoder.cache_bytes

    @property
    def working_bytes(self) -> int:
        """Bytes that CUDA graphs and passes take besides the cache, approximately."""
        return self.decoder.working_bytes

    def suspend(self) -> None:
        """Free the cache until something is sampled again. CUDA graphs are then captured again."""
        assert not self.active and not self.waiting
        self.decoder.suspend()

    def prepare(self, params: SamplingParams) -> None:
        """Compile kernels and capture CUDA graphs ahead of the first request. Does nothing on a CPU."""
        self.decoder.prepare(drawing(params))

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            stop = request.params.stop
            if stop not in self.stops:
                self.stops[stop] = StopStrings(self.tokenizer, stop)
            prompt = self.prompts.setdefault(request.prompt, SharedPrompt(request.prompt))
            prompt.users += request.n
            for index in range(request.n):
                key = row_key(self.seed, request.phase, request.serial, index)
                self.waiting.append(Response(request, prompt, index, key, self.stops[stop]))
        # One step draws for the whole batch.
        kinds = {drawing(response.request.params) for response in [*self.waiting, *self.active]}
        assert len(kinds) <= 1, "all groups in flight must have the same temperature and truncation"

    @torch.no_grad()
    def poll(self) -> list[Rollout]:
        finished: list[Finished] = []
        while not finished and (self.active or self.waiting):
            finished += self.decoder.advance()
            finished += self._start_waiting()
            self._requeue(self.decoder.take_preempted())
        for response, _ in finished:
            self._release_prompt(response.prompt)
        if not self.active and not self.waiting:
            self.decoder.release_idle()
        texts = self.texts([response.tokens for response, _ in finished])
        return [self._rollout(*found, text) for found, text in zip(finished, texts, strict=True)]

    def cancel(self, serials: Iterable[int]) -> int:
        gone = set(serials)
        self.decoder.wait()
        stopped = [response for response in self.active if response.request.serial in gone]
        tokens = sum(self.decoder.tokens_drawn(response) for response in stopped)
        self.decoder.remove(stopped)
        never_started = [response for response in self.waiting if response.request.serial in gone]
        self.waiting = deque(response for response in self.waiting if response.request.serial not in gone)
        for response in [*stopped, *never_started]:
            self._release_prompt(response.prompt)
        return tokens

    def sync_weights(self, version: int) -> None:
        """Continue with the new weights. Responses in flight keep the keys and values that the old weights computed."""
        assert version == self.version + 1 or not self.active, "one entry of `switches` stands for one version"
        self.decoder.wait()
        for response in self.active:
            response.switches.append(self.decoder.tokens_drawn(response))
        # Responses that have not started get fresh prompts: they must not start from the old weights' keys and values.
        old, self.prompts = self.prompts, {}
        for response in self.waiting:
            response.prompt.users -= 1
            response.prompt = self.prompts.setdefault(response.prompt.tokens, SharedPrompt(response.prompt.tokens))
            response.prompt.users += 1
        for prompt in old.values():
            if prompt.users == 0:
                self.decoder.free_prompt(prompt)
        self.version = version

    def metrics(self) -> dict[str, float]:
        return self.decoder.metrics()

    def close(self) -> None:
        self.cancel({response.request.serial for response in [*self.active, *self.waiting]})
        self.decoder.release_idle()
        self.decoder.suspend()

    def _start_waiting(self) -> list[Finished]:
        newcomers = [self.waiting.popleft() for _ in range(self.decoder.room(self.waiting))]
        for response in newcomers:
            response.version = self.version
        return self.decoder.start(newcomers)

    def _requeue(self, preempted: Sequence[Response]) -> None:
        """Put preempted responses back at the front of the queue.

        They restart with the weights of that time, so they leave a prompt that older weights have prefilled.
        """
        for response in preempted:
            prompt = self.prompts.setdefault(response.prompt.tokens, SharedPrompt(response.prompt.tokens))
            prompt.users += 1
            self._release_prompt(response.prompt)
            response.prompt = prompt
        self.waiting.extendleft(reversed(preempted))

    def _release_prompt(self, prompt: SharedPrompt) -> None:
        """Count one user less, and free the prompt's cache with the last one."""
        prompt.users -= 1
        if prompt.users == 0:
            if self.prompts.get(prompt.tokens) is prompt:
                del self.prompts[prompt.tokens]
            self.decoder.free_prompt(prompt)

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
