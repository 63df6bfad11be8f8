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
from dapo.types import Extension, FinishReason, Request, Rollout, SamplingParams

# Defaults where the caller gives none.
_EAGER_CONCURRENT = 64
_MAX_LENGTH = 4096
_IMPATIENT_STEPS = 8  # decode steps after which `poll(wait=False)` returns


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
        self.parked: dict[tuple[int, int], Response] = {}  # finished episodes, by serial and index
        self.prompts: dict[tuple[int, ...], SharedPrompt] = {}
        self.decoder: Decoder
        if head_weight(causal_lm).is_cuda:
            from dapo.engine.embedded.sized import sized_decoder

            self.decoder = sized_decoder(
                causal_lm, stop_ids, max_concurrent, max_length or _MAX_LENGTH, kv_memory_fraction, reserved
            )
        else:
            self.decoder = EagerDecoder(causal_lm, stop_ids, max_concurrent or _EAGER_CONCURRENT)

        self.is_repeatable = not head_weight(causal_lm).is_cuda

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
        self.decoder.unpark([*self.decoder.parked])
        self.decoder.suspend()

    def prepare(self, params: SamplingParams) -> None:
        """Compile kernels and capture CUDA graphs ahead of the first request. Does nothing on a CPU."""
        self.decoder.prepare(drawing(params))

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.waiting.extend(self._response(request, index) for index in range(request.n))
        self._check_drawing()

    @torch.no_grad()
    def poll(self, *, wait: bool = True) -> list[Rollout]:
        finished: list[Finished] = []
        steps = 0
        if self.decoder.burst == 1:  # nothing is in flight: what waits takes part in the next step
            finished += self._start_waiting()
        while not finished and (self.active or self.waiting) and (wait or steps < _IMPATIENT_STEPS):
            finished += self.decoder.advance()
            finished += self._start_waiting()
            self._requeue(self.decoder.take_preempted())
            steps += self.decoder.burst
        for response, _ in finished:
            if response.request.turns:
                self.parked[response.request.serial, response.index] = response
            else:
                self._release_prompt(response.prompt)
        if not self.active and not self.waiting:
            self.decoder.release_idle()
        texts = self.texts([response.tokens[response.turn_start :] for response, _ in finished])
        return [self._rollout(*found, text) for found, text in zip(finished, texts, strict=True)]

    def extend(self, extensions: Sequence[Extension]) -> None:
        """Continue episodes before anything that waits. One that is not parked here is computed from its tokens."""
        continued: list[Response] = []
        for extension in extensions:
            rollout, tokens = extension.rollout, extension.tokens
            fixed = len(rollout) + len(tokens)
            assert tokens and fixed < extension.max_tokens, "there must be given tokens, and room for one more"
            episode = rollout.serial, rollout.index
            if episode in self.parked and not np.array_equal(self.parked[episode].tokens, rollout.tokens):
                self.end([episode])  # sampled anew here, after the worker that had sampled it was lost
            response = self.parked.pop(episode, None)
            if response is None:
                response = self._response(extension.request, rollout.index)
                response.version, response.switches = rollout.weight_version, list(rollout.switches)
            elif response not in self.decoder.parked:  # its prompt may be one that older weights have computed
                self._renew_prompt(response)
            response.tokens = [*rollout.tokens.tolist(), *tokens]
            response.logprobs = [*rollout.logprobs.tolist(), *[0.0] * len(tokens)]
            response.given = [*rollout.given, (len(rollout), fixed)]
            response.fixed, response.limit = fixed, extension.max_tokens
            continued.append(response)
        self.waiting.extendleft(reversed(continued))
        self._check_drawing()

    def end(self, episodes: Iterable[tuple[int, int]]) -> None:
        ended = [self.parked.pop(episode) for episode in episodes if episode in self.parked]
        self.decoder.unpark(ended)
        for response in ended:
            self._release_prompt(response.prompt)

    def cancel(self, serials: Iterable[int]) -> int:
        gone = set(serials)
        self.decoder.wait()
        parked = [episode for episode in self.parked if episode[0] in gone]
        tokens = sum(_drawn(self.parked[episode]) for episode in parked)
        self.end(parked)
        stopped = [response for response in self.active if response.request.serial in gone]
        for response in stopped:
            tokens += self.decoder.tokens_drawn(response) - sum(end - start for start, end in response.given)
        self.decoder.remove(stopped)
        not_started = [response for response in self.waiting if response.request.serial in gone]
        tokens += sum(map(_drawn, not_started))
        self.decoder.unpark(not_started)
        self.waiting = deque(response for response in self.waiting if response.request.serial not in gone)
        for response in [*stopped, *not_started]:
            self._release_prompt(response.prompt)
        return tokens

    def sync_weights(self, version: int) -> None:
        """Continue with the new weights. Responses in flight keep the keys and values that the old weights computed."""
        assert version == self.version + 1 or not self.active, "one entry of `switches` stands for one version"
        self.decoder.wait()
        for response in self.active:
            response.switches.append(self.decoder.tokens_drawn(response))
        # Responses that have not started get fresh prompts: they must not start from the old weights' keys and values.
        # Parked episodes keep theirs, as responses in flight do.
        self.prompts = {}
        for response in self.waiting:
            if response not in self.decoder.parked:
                self._renew_prompt(response)
        self.version = version

    def metrics(self) -> dict[str, float]:
        return self.decoder.metrics()

    def close(self) -> None:
        self.cancel({response.request.serial for response in [*self.active, *self.waiting, *self.parked.values()]})
        self.decoder.release_idle()
        self.decoder.suspend()

    def _start_waiting(self) -> list[Finished]:
        newcomers = [self.waiting.popleft() for _ in range(self.decoder.room(self.waiting))]
        for response in newcomers:
            if response.fixed:  # an episode that goes on: what it has so far was sampled by older weights
                behind = self.version - response.version - len(response.switches)
                response.switches += [response.fixed] * behind
            else:
                response.version = self.version
        return self.decoder.start(newcomers)

    def _requeue(self, preempted: Sequence[Response]) -> None:
        """Put preempted responses back at the front of the queue.

        They restart with the weights of that time, so they leave a prompt that older weights have prefilled.
        """
        for response in preempted:
            self._renew_prompt(response)
        self.waiting.extendleft(reversed(preempted))

    def _response(self, request: Request, index: int) -> Response:
        stop = request.params.stop
        if stop not in self.stops:
            self.stops[stop] = StopStrings(self.tokenizer, stop)
        prompt = self.prompts.setdefault(request.prompt, SharedPrompt(request.prompt))
        prompt.users += 1
        key = row_key(self.seed, request.phase, request.serial, index)
        return Response(request, prompt, index, key, self.stops[stop], limit=request.params.max_tokens)

    def _check_drawing(self) -> None:
        """Assert that one step can draw for the whole batch."""
        kinds = {drawing(response.request.params) for response in [*self.waiting, *self.active]}
        assert len(kinds) <= 1, "all groups in flight must have the same temperature and truncation"

    def _renew_prompt(self, response: Response) -> None:
        """Let a response use the prompt as the current weights compute it."""
        prompt = self.prompts.setdefault(response.prompt.tokens, SharedPrompt(response.prompt.tokens))
        prompt.users += 1
        self._release_prompt(response.prompt)
        response.prompt = prompt

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
            given=tuple(response.given),
        )


def _drawn(response: Response) -> int:
    """Return the number of tokens that were drawn for a response that is not active."""
    return len(response.tokens) - sum(end - start for start, end in response.given)
