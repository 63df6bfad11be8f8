"""The engine protocol over vLLM, which samples in processes of its own with a copy of the weights."""

from __future__ import annotations

import atexit
import contextlib
import queue
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from dapo.config import Config
from dapo.engine.stop import StopStrings
from dapo.engine.vllm.arguments import VllmOptions, cache_size, vllm_reason
from dapo.engine.vllm.arguments import require_vllm as require_vllm
from dapo.engine.vllm.support import Background, Guard, Meter
from dapo.engine.vllm.weights import Client, Weights, transfer
from dapo.engine.vllm.weights import Transport as Transport
from dapo.engine.vllm.weights import nccl_sender as nccl_sender
from dapo.errors import EngineError
from dapo.kernels.sampler import row_key
from dapo.model.tokens import ResponseTexts
from dapo.system.progress import progress
from dapo.types import Extension, Request, Rollout, SamplingParams

SYNC_SECONDS = 600.0  # after which a weight sync counts as hung
_CLOSE_SECONDS = 15.0
_IMPATIENT_SECONDS = 0.05  # after which `poll(wait=False)` returns


class _Answer(NamedTuple):
    output: Any  # vLLM's CompletionOutput
    length: int | None  # tokens up to the end of a stop string, if there is one; the others do not count


@dataclass(eq=False, slots=True)
class _Member:
    """One response that is being sampled: one request to vLLM."""

    name: str
    request: Request
    index: int
    answer: Future[_Answer]
    extension: Extension | None = None  # of an episode: what comes before this turn


class VllmEngine:
    """Runs vLLM's asynchronous engine on an event loop in a background thread.

    Model shape and initial weights come from `options.model_dir`. Each sync calls `weights` for the new ones, under the
    tensor names of that directory.
    """

    is_repeatable = False

    def __init__(
        self,
        options: VllmOptions,
        stop_ids: frozenset[int],
        tokenizer: Any,
        weights: Weights,
        sync_seconds: float = SYNC_SECONDS,
        kept_tokens: Sequence[str] = (),
    ) -> None:
        self.options, self.stop_ids, self.tokenizer = options, sorted(stop_ids), tokenizer
        self.texts = ResponseTexts(tokenizer, kept_tokens)
        self.stops: dict[tuple[str, ...], StopStrings | None] = {(): None}
        self.transfer = transfer(options.transport, weights, options.tensor_parallel)
        self.sync_seconds, self.sync_time, self.deadline = sync_seconds, 0.0, 0.0
        self.members: dict[str, _Member] = {}  # submitted and not returned by `poll` yet
        self.finished: queue.SimpleQueue[_Member] = queue.SimpleQueue()
        self.submitted = 0
        self.is_asleep = self.is_closed = False
        self.llm: Any = None
        with progress("Starting vLLM"):
            vllm_config = options.resolved()
            self.meter = Meter(vllm_config.scheduler_config.max_num_seqs)
            self.background = Background()
            try:
                self.background.run(self._open(vllm_config))
            except Exception as error:
                self.background.stop()
                raise EngineError(
                    f"vLLM could not be started ({vllm_reason(error)}); see its messages above, or set "
                    "VLLM_LOGGING_LEVEL=INFO for more"
                ) from error
        # An update on the same GPU can use this memory while vLLM sleeps.
        self.cache_bytes = cache_size(vllm_config) if options.shares_gpu else 0
        manager = self.llm.engine_core.resources.engine_manager
        cores = [psutil.Process(process.pid) for process in manager.processes]
        self.processes = [process for core in cores for process in (core, *core.children(recursive=True))]
        self.guard = Guard(process.pid for process in self.processes)
        atexit.register(self.close)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            for index in range(request.n):
                self._start(request, index)

    def extend(self, extensions: Sequence[Extension]) -> None:
        """Sample each next turn as a response to all tokens before it. vLLM's prefix cache has most of them."""
        for extension in extensions:
            self._start(extension.request, extension.rollout.index, extension)

    def end(self, episodes: Iterable[tuple[int, int]]) -> None:
        """Do nothing: vLLM keeps nothing of an episode but its prefix cache."""

    def poll(self, *, wait: bool = True) -> list[Rollout]:
        found: list[tuple[_Member, _Answer]] = []
        while self.members and not found:
            try:
                arrived = [self.finished.get(timeout=None if wait else _IMPATIENT_SECONDS)]
            except queue.Empty:
                break
            while not self.finished.empty():
                arrived.append(self.finished.get())
            # A member that was canceled in the meantime is no longer in `members`.
            found = [(member, self._answer(member)) for member in arrived if self.members.pop(member.name, None)]
        return [self._rollout(member, *answer) for member, answer in found]

    def cancel(self, serials: Iterable[int]) -> int:
        """Drop these groups. A rollout that `poll` has not returned yet counts as unfinished."""
        gone = set(serials)
        stopped = [member for member in list(self.members.values()) if member.request.serial in gone]
        for member in stopped:
            del self.members[member.name]
        if not stopped:
            return 0
        self.background.run(self.llm.abort([member.name for member in stopped]))
        return sum(len(self._answer(member).output.token_ids) for member in stopped)

    def sync_weights(self, version: int) -> None:
        """Pause sampling, send the weights, and resume. Responses in flight have their cache recomputed."""
        with self._sync(version):
            self._pause()
            self.transfer.send(self)
            self._resume(version)

    def receive(self, call: str, *arguments: Any, version: int) -> None:
        """Make one of the four calls of `Client` for a learner in another process that sends by NCCL."""
        with self._sync(version):
            if call == "start_weight_update":
                self._pause()
            getattr(Client(self), call)(*arguments)
            if call == "finish_weight_update":
                self._resume(version)

    def metrics(self) -> dict[str, float]:
        seconds, self.sync_time = self.sync_time, 0.0
        return self.meter.metrics() | {"engine/sync_s": seconds}

    def prepare(self, params: SamplingParams) -> None:
        """Do nothing: vLLM compiles and captures when it starts."""

    def suspend(self) -> None:
        """Put vLLM to sleep if the learner shares its GPU. The next sample or sync wakes it."""
        assert not self.members
        if self.options.shares_gpu and not self.is_asleep:
            self.background.run(self.llm.sleep(level=1))
            self.is_asleep = True

    def close(self) -> None:
        """End vLLM's processes, in whatever state they are."""
        if self.is_closed:
            return
        self.is_closed = True
        atexit.unregister(self.close)
        self.members.clear()
        with contextlib.suppress(Exception):  # it may hang or be dead; the processes are killed below
            self.background.run(self._shut_down(), timeout=_CLOSE_SECONDS)
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self.processes, timeout=_CLOSE_SECONDS)
        self.guard.dismiss()
        self.background.stop()
        self.llm = None  # or it would clean up again during interpreter shutdown

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on vLLM's loop, until the deadline of the current sync at the latest."""
        return self.background.run(coroutine, timeout=max(self.seconds_left(), 0.0))

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    @contextlib.contextmanager
    def _sync(self, version: int) -> Iterator[None]:
        """Time a weight sync. If it fails or exceeds its deadline, stop vLLM and raise an EngineError."""
        started = time.monotonic()
        self.deadline = started + self.sync_seconds
        try:
            yield
        except TimeoutError:
            self.close()
            raise EngineError(
                f"vLLM did not load the weights of version {version} within {self.sync_seconds:g} seconds and was "
                "stopped; one of its processes is hung or was never reached: continue with dapo resume"
            ) from None
        except Exception as error:
            self.close()
            raise EngineError(
                f"vLLM could not load the weights of version {version} and was stopped ({vllm_reason(error)})"
            ) from error
        self.sync_time += time.monotonic() - started

    def _pause(self) -> None:
        """Pause responses in flight and drop their cache, which belongs to the old weights."""
        self._wake()
        self.run(self.llm.pause_generation(mode="keep", clear_cache=True))

    def _resume(self, version: int) -> None:
        self.run(self.llm.update_weight_version(str(version)))
        self.run(self.llm.resume_generation())

    def _wake(self) -> None:
        if self.is_asleep:
            self.background.run(self.llm.wake_up(), timeout=self.sync_seconds)
            self.is_asleep = False

    async def _open(self, vllm_config: Any) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

        self.llm = AsyncLLM.from_vllm_config(
            vllm_config, stat_loggers=[lambda config, index: self.meter], disable_log_stats=True
        )
        # Cached from now on, so that adding a request never awaits and requests enter in the order of submission.
        await self.llm.get_supported_tasks()
        await self.llm.update_weight_version("0")

    async def _shut_down(self) -> None:
        self.llm.shutdown(timeout=1)

    async def _sample(self, name: str, prompt: Sequence[int], params: Any, stop: StopStrings | None) -> _Answer:
        from vllm.inputs.engine import tokens_input  # pyright: ignore[reportMissingImports]

        output, searched, length = None, 0, None
        async for found in self.llm.generate(tokens_input(list(prompt)), params, name):
            output = found.outputs[0]
            if stop is not None and length is None:
                length = stop.length(output.token_ids, searched)
                searched = len(output.token_ids)
                if length is not None and not found.finished:
                    await self.llm.abort(name)  # a last output follows, with the versions of the weights
        return _Answer(output, length)

    def _start(self, request: Request, index: int, extension: Extension | None = None) -> None:
        self._wake()
        stop = request.params.stop
        if stop not in self.stops:
            self.stops[stop] = StopStrings(self.tokenizer, stop)
        prompt, max_tokens, turn = request.prompt, request.params.max_tokens, 0
        if extension is not None:
            prompt = (*prompt, *extension.rollout.tokens.tolist(), *extension.tokens)
            max_tokens = extension.max_tokens - (len(prompt) - len(request.prompt))
            turn = 1 + len(extension.rollout.given)
        params = self._params(request, index, max_tokens, turn)
        self.submitted += 1
        name = f"{request.phase}/{request.serial}/{index}/{self.submitted}"
        answer = self.background.start(self._sample(name, prompt, params, self.stops[stop]))
        member = self.members[name] = _Member(name, request, index, answer, extension)
        answer.add_done_callback(lambda _, member=member: self.finished.put(member))

    def _params(self, request: Request, index: int, max_tokens: int, turn: int) -> Any:
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import SamplingParams as VllmParams  # pyright: ignore[reportMissingImports]

        params = request.params
        return VllmParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            max_tokens=max_tokens,
            # Each turn of an episode has its own random numbers.
            seed=(row_key(self.options.seed, request.phase, request.serial, index) + turn) & (2**63 - 1),
            stop_token_ids=self.stop_ids,
            ignore_eos=True,  # only the stop ids end a response
            logprobs=0,  # only of the drawn token
            flat_logprobs=True,
            detokenize=False,
            # vLLM's own `stop` needs its tokenizer, and compares with text that it decodes token by token.
            output_kind=RequestOutputKind.CUMULATIVE if params.stop else RequestOutputKind.FINAL_ONLY,
        )

    def _answer(self, member: _Member) -> _Answer:
        try:
            return member.answer.result()
        except Exception as error:
            self.close()
            raise EngineError(
                f"vLLM ended or failed while it was sampling ({vllm_reason(error)}); see its messages above, and "
                "continue with dapo resume"
            ) from error

    def _rollout(self, member: _Member, output: Any, length: int | None) -> Rollout:
        is_stopped = length is not None or output.finish_reason == "stop"
        if not is_stopped and output.finish_reason != "length":
            self.close()
            raise EngineError(f"vLLM gave up a response ({output.finish_reason}); continue with dapo resume")
        spans = output.weight_versions
        versions = [int(span.version) for span in spans]
        # One entry per version, including versions between two spans that drew no token.
        steps = zip(spans[1:], versions, versions[1:], strict=False)
        switches = [span.start for span, old, new in steps for _ in range(new - old)]
        tokens = np.asarray(output.token_ids, dtype=np.int32)[:length]
        rollout = Rollout(
            serial=member.request.serial,
            index=member.index,
            tokens=tokens,
            logprobs=np.asarray(output.logprobs.logprobs, dtype=np.float32)[:length],
            finish_reason="stop" if is_stopped else "length",
            weight_version=versions[0],
            text=self.texts([tokens])[0],
            switches=tuple(switch for switch in switches if switch < len(tokens)),
        )
        return rollout if member.extension is None else _joined(member.extension, rollout)


def _joined(extension: Extension, turn: Rollout) -> Rollout:
    """Return an episode with its newest turn, which was sampled as a response of its own."""
    before, start = extension.rollout, len(extension.rollout) + len(extension.tokens)
    version = before.weight_version + len(before.switches)  # of the last token before this turn
    switches = [start] * (turn.weight_version - version) + [start + switch for switch in turn.switches]
    return replace(
        turn,
        tokens=np.concatenate([before.tokens, np.array(extension.tokens, np.int32), turn.tokens]),
        logprobs=np.concatenate([before.logprobs, np.zeros(len(extension.tokens), np.float32), turn.logprobs]),
        weight_version=before.weight_version,
        switches=(*before.switches, *switches),
        given=(*before.given, (len(before), start)),
    )


def open_vllm(
    config: Config,
    model_dir: Path,
    tokenizer: Any,
    stop_ids: frozenset[int],
    weights: Weights,
    transport: Transport | None = None,
) -> VllmEngine:
    """Start the vLLM of a configuration. `transport` None: chosen by the device of this process's learner."""
    options = VllmOptions.of(config, model_dir, transport)
    return VllmEngine(options, stop_ids, tokenizer, weights, kept_tokens=config.reward.think_tags or ())


def check_vllm(config: Config, model_dir: Path, transport: Transport | None = None) -> None:
    """Raise what would keep vLLM from starting, before a model is loaded."""
    VllmOptions.of(config, model_dir, transport).resolved()
