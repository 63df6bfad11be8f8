"""Judge by an HTTP endpoint: one POST per group, with a single deadline, retried where a retry can help.

Request: {"samples": [{"prompt": messages, "completion", "answer", "data_source", "extra"}, ...]}.
Answer: {"scores": [...]} in the same order. Each score is a number, a mapping with `score` and optionally `acc` and
extras, or null where the reward does not apply to the response.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import httpx2

from dapo.config import REWARD_TOKEN
from dapo.errors import RewardError, one_line
from dapo.rewards.function import CLOSE_LIMIT, DOES_NOT_APPLY, JUDGE_CLOSED, explain, to_json, to_score, unjudged
from dapo.types import Prompt, Rollout, Score

MAX_TRIES = 5
MAX_IN_FLIGHT = 8  # requests
MAX_ANSWER_BYTES = 2**26
RETRY_STATUSES = (408, 429, 500, 502, 503, 504)
MIN_SECRET = 8  # characters; a shorter token is not a secret, and masking it would garble numbers in answers


class _RequestFailed(Exception):
    """The request returned no scores. `is_final`: a retry would not help."""

    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final


class EndpointJudge:
    """Asks an endpoint for the scores of each group. All requests run in one event loop, in a daemon thread.

    A request may take three times `timeout`, because it carries a whole group. This single deadline covers the name
    lookup, connection, TLS, request, headers and body. Closing the judge cancels every request.
    """

    def __init__(self, url: str, timeout: float, backoff: float = 0.5) -> None:
        self.url = url
        self.deadline = 3 * timeout
        self.backoff = backoff
        self.token = _token()
        self.client = _client(self.token)
        self.jitter = random.Random()  # separate, so that the run stays reproducible
        self.slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self.tasks: set[asyncio.Task[list[Score]]] = set()
        self.closing = asyncio.Event()
        self.is_closed = False
        self.lock = threading.Lock()  # guards `is_closed`: no call reaches the loop after it has stopped
        self.loop = _Loop()
        self.thread = threading.Thread(target=self._run, name="dapo-endpoint", daemon=True)
        self.thread.start()

    def submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Future[list[Score]]:
        future: Future[list[Score]] = Future()
        future.set_running_or_notify_cancel()
        with self.lock:
            if not self.is_closed:
                self.loop.call_soon_threadsafe(self._start, prompt, rollouts, future)
                return future
        future.set_result([unjudged(JUDGE_CLOSED)] * len(rollouts))
        return future

    def close(self) -> None:
        with self.lock:
            if not self.is_closed:
                self.is_closed = True
                self.loop.call_soon_threadsafe(self.closing.set)
        self.thread.join(CLOSE_LIMIT)

    # Everything below runs in the thread.

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with self.client:
            await self.closing.wait()
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)

    def _start(self, prompt: Prompt, rollouts: Sequence[Rollout], future: Future[list[Score]]) -> None:
        task = self.loop.create_task(self._judge(prompt, rollouts))
        self.tasks.add(task)  # the loop keeps only a weak reference

        def finish(task: asyncio.Task[list[Score]]) -> None:
            self.tasks.discard(task)
            future.set_result([unjudged(JUDGE_CLOSED)] * len(rollouts) if task.cancelled() else task.result())

        task.add_done_callback(finish)

    async def _judge(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        try:
            async with self.slots:
                return await self._ask(_body(prompt, rollouts), len(rollouts))
        except _RequestFailed as error:
            reason = str(error)
        except Exception as error:  # e.g. a row that JSON cannot encode: only this group is unjudged
            reason = explain(error)
        return [unjudged(self._mask_token(f"{self.url}: {reason}"))] * len(rollouts)

    async def _ask(self, body: bytes, n: int) -> list[Score]:
        for attempt in range(1, MAX_TRIES + 1):
            try:
                return _read_scores(await self._post(body), n, self._mask_token)
            except _RequestFailed as error:
                if error.is_final:
                    raise
                if attempt == MAX_TRIES:
                    raise _RequestFailed(f"{error} (tried {MAX_TRIES} times)") from None
            # The jitter keeps clients that failed together from retrying together.
            await asyncio.sleep(self.backoff * 2 ** (attempt - 1) * self.jitter.uniform(0.5, 1.5))
        raise AssertionError("the last attempt returns or raises")

    async def _post(self, body: bytes) -> bytearray:
        try:
            async with asyncio.timeout(self.deadline), self.client.stream("POST", self.url, content=body) as response:
                if response.is_redirect:  # another host must not get the token or the dataset's rows
                    reason = f"HTTP status {response.status_code}, a redirect; set reward.use to its target"
                    raise _RequestFailed(reason, is_final=True)
                if not response.is_success:
                    code = response.status_code
                    raise _RequestFailed(f"HTTP status {code}", is_final=code not in RETRY_STATUSES)
                answer = bytearray()
                async for piece in response.aiter_raw():
                    answer += piece
                    if len(answer) > MAX_ANSWER_BYTES:
                        raise _RequestFailed(f"the answer has more than {MAX_ANSWER_BYTES} bytes", is_final=True)
                return answer
        except TimeoutError:
            raise _RequestFailed(f"no answer within {self.deadline:g} s") from None
        except httpx2.TransportError as error:
            raise _RequestFailed(_root_cause(error)) from None

    def _mask_token(self, text: str) -> str:
        """Mask the token where the endpoint echoes it: answers and reasons are recorded and shown."""
        return text.replace(self.token, f"[{REWARD_TOKEN}]") if len(self.token) >= MIN_SECRET else text


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that looks up host names in daemon threads.

    The default loop uses an executor, and Python joins its threads at exit. A name server that does not answer would
    keep the process from exiting.
    """

    async def getaddrinfo(self, host: Any, port: Any, **hints: Any) -> list[Any]:
        found: asyncio.Future[list[Any]] = self.create_future()

        def settle(addresses: list[Any], error: Exception | None) -> None:
            if found.cancelled():
                return  # the deadline has passed
            if error is not None:
                found.set_exception(error)
            else:
                found.set_result(addresses)

        def look_up() -> None:
            addresses: list[Any] = []
            error: Exception | None = None
            try:
                addresses = socket.getaddrinfo(host, port, **hints)
            except Exception as failure:
                error = failure
            with suppress(RuntimeError):  # the loop may be closed by now
                self.call_soon_threadsafe(settle, addresses, error)

        threading.Thread(target=look_up, name="dapo-name-lookup", daemon=True).start()
        return await found


def _token() -> str:
    token = os.environ.get(REWARD_TOKEN, "").strip()
    if not re.fullmatch(r"[!-~]*", token):
        raise RewardError(
            f"{REWARD_TOKEN} has characters that an HTTP header cannot carry; use printable ASCII without spaces"
        )
    return token


def _client(token: str) -> httpx2.AsyncClient:
    # One connection per request. No compression: a small answer could decompress to more than fits in memory.
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "Connection": "close"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        limits = httpx2.Limits(max_keepalive_connections=0)
        return httpx2.AsyncClient(headers=headers, timeout=None, limits=limits, follow_redirects=False)
    except (ValueError, ImportError) as error:
        raise RewardError(f"reward.use: the proxy set in the environment cannot be used ({one_line(error)})") from None


def _root_cause(error: BaseException) -> str:
    """Describe the innermost error: the HTTP client itself only says that all connection attempts failed."""
    while True:
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__
        if inner is None:
            return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        error = inner


def _body(prompt: Prompt, rollouts: Sequence[Rollout]) -> bytes:
    samples = [
        {
            "prompt": prompt.messages,
            "completion": rollout.text,
            "answer": prompt.answer,
            "data_source": prompt.data_source,
            "extra": prompt.extra,
        }
        for rollout in rollouts
    ]
    return to_json({"samples": samples}).encode()


def _read_scores(answer: bytearray, n: int, clean: Callable[[str], str]) -> list[Score]:
    expected = f'expected {{"scores": [...]}} with {n} entries'
    try:
        content: Any = json.loads(clean(answer.decode("utf-8-sig")))
    except (ValueError, RecursionError):
        raise _RequestFailed(f"the answer is not JSON; {expected}", is_final=True) from None
    scores = content.get("scores") if isinstance(content, dict) else None
    if not isinstance(scores, list):
        raise _RequestFailed(f"the answer has no list 'scores'; {expected}", is_final=True)
    if len(scores) != n:
        raise _RequestFailed(f"the answer has {len(scores)} scores; {expected}", is_final=True)
    return [unjudged(DOES_NOT_APPLY) if score is None else to_score(score) for score in scores]
