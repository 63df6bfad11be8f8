"""Judging by an HTTP endpoint: one POST per group, with one deadline, retried while that makes sense.

It gets {"samples": [{"prompt": messages, "completion", "answer", "data_source", "extra"}, ...]} and answers
{"scores": [...]} in the same order, each a number, a mapping with `score` and perhaps `acc` and extras, or null for a
response to which it does not apply.
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
from dapo.errors import RewardError
from dapo.rewards.function import CLOSE_LIMIT, CLOSED, DOES_NOT_APPLY, explain, to_json, to_score, unjudged
from dapo.types import Prompt, Rollout, Score

TRIES = 5
AT_ONCE = 8  # requests in flight
MAX_ANSWER = 2**26
TRY_AGAIN = (408, 429, 500, 502, 503, 504)
MIN_SECRET = 8  # characters; a shorter token is no secret, and masking it would garble numbers


class _Unanswered(Exception):
    """No scores, and why; `is_final` when asking again would not help."""

    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final


class EndpointJudge:
    """Asks an endpoint for the scores of a group. All exchanges run in one event loop, in a daemon thread.

    A request has three times as long as one response, since it carries a group. That is one deadline for the whole
    exchange: name lookup, connection, TLS, request, headers and body. Closing cancels every exchange, whatever the
    endpoint does.
    """

    def __init__(self, url: str, timeout: float, backoff: float = 0.5) -> None:
        self.url = url
        self.seconds = 3 * timeout
        self.backoff = backoff
        self.token = _token()
        self.client = _client(self.token)
        self.jitter = random.Random()  # the run's own random numbers stay untouched
        self.places = asyncio.Semaphore(AT_ONCE)
        self.tasks: set[asyncio.Task[list[Score]]] = set()
        self.closing = asyncio.Event()
        self.is_closed = False
        self.lock = threading.Lock()  # over `is_closed`: nothing is handed to the loop after its end
        self.loop = _Loop()
        self.thread = threading.Thread(target=self._run, name="dapo-endpoint", daemon=True)
        self.thread.start()

    def submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Future[list[Score]]:
        future: Future[list[Score]] = Future()
        future.set_running_or_notify_cancel()
        with self.lock:
            if not self.is_closed:
                self.loop.call_soon_threadsafe(self._begin, prompt, rollouts, future)
                return future
        future.set_result([unjudged(CLOSED)] * len(rollouts))
        return future

    def close(self) -> None:
        with self.lock:
            if not self.is_closed:
                self.is_closed = True
                self.loop.call_soon_threadsafe(self.closing.set)
        self.thread.join(CLOSE_LIMIT)

    # All that follows runs in the thread

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with self.client:
            await self.closing.wait()
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)

    def _begin(self, prompt: Prompt, rollouts: Sequence[Rollout], future: Future[list[Score]]) -> None:
        task = self.loop.create_task(self._judge(prompt, rollouts))
        self.tasks.add(task)  # the loop itself would let it be garbage collected

        def finish(task: asyncio.Task[list[Score]]) -> None:
            self.tasks.discard(task)
            future.set_result([unjudged(CLOSED)] * len(rollouts) if task.cancelled() else task.result())

        task.add_done_callback(finish)

    async def _judge(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        try:
            async with self.places:
                return await self._ask(_body(prompt, rollouts), len(rollouts))
        except _Unanswered as error:
            reason = str(error)
        except Exception as error:  # a row that is no JSON, or a library's surprise: these responses, not the run
            reason = explain(error)
        return [unjudged(self._without_token(f"{self.url}: {reason}"))] * len(rollouts)

    async def _ask(self, body: bytes, n: int) -> list[Score]:
        for attempt in range(1, TRIES + 1):
            try:
                return _read_scores(await self._post(body), n, self._without_token)
            except _Unanswered as error:
                if error.is_final:
                    raise
                if attempt == TRIES:
                    raise _Unanswered(f"{error} (tried {TRIES} times)") from None
            # Clients that failed together should not come back together.
            await asyncio.sleep(self.backoff * 2 ** (attempt - 1) * self.jitter.uniform(0.5, 1.5))
        raise AssertionError("the last attempt returns or raises")

    async def _post(self, body: bytes) -> bytearray:
        try:
            async with asyncio.timeout(self.seconds), self.client.stream("POST", self.url, content=body) as response:
                if response.is_redirect:  # another host must not get the token, nor the dataset's rows
                    reason = f"HTTP status {response.status_code}, a redirect; name the address it leads to"
                    raise _Unanswered(reason, is_final=True)
                if not response.is_success:
                    code = response.status_code
                    raise _Unanswered(f"HTTP status {code}", is_final=code not in TRY_AGAIN)
                answer = bytearray()
                async for piece in response.aiter_raw():
                    answer += piece
                    if len(answer) > MAX_ANSWER:
                        raise _Unanswered(f"an answer of more than {MAX_ANSWER} bytes", is_final=True)
                return answer
        except TimeoutError:
            raise _Unanswered(f"no answer within {self.seconds:g} s") from None
        except httpx2.TransportError as error:
            raise _Unanswered(_root_cause(error)) from None

    def _without_token(self, text: str) -> str:
        """Mask the token where the endpoint sends it back: answers and reasons are recorded, and shown."""
        return text.replace(self.token, f"[{REWARD_TOKEN}]") if len(self.token) >= MIN_SECRET else text


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that looks up names in daemon threads.

    The usual loop looks them up in an executor, whose threads Python joins before it exits: a name server that does
    not answer would hold up the process.
    """

    async def getaddrinfo(self, host: Any, port: Any, **hints: Any) -> list[Any]:
        found: asyncio.Future[list[Any]] = self.create_future()

        def settle(addresses: list[Any], error: Exception | None) -> None:
            if found.cancelled():
                return  # past the deadline
            if error is not None:
                found.set_exception(error)
            else:
                found.set_result(addresses)

        def look_up() -> None:
            addresses: list[Any] = []
            error: Exception | None = None
            try:
                addresses = socket.getaddrinfo(host, port, **hints)
            except Exception as fault:
                error = fault
            with suppress(RuntimeError):  # the loop may be closed by now
                self.call_soon_threadsafe(settle, addresses, error)

        threading.Thread(target=look_up, name="dapo-name-lookup", daemon=True).start()
        return await found


def _token() -> str:
    token = os.environ.get(REWARD_TOKEN, "").strip()
    if not re.fullmatch(r"[!-~]*", token):
        raise RewardError(f"{REWARD_TOKEN} holds characters that no HTTP header can carry; expected printable ASCII")
    return token


def _client(token: str) -> httpx2.AsyncClient:
    # One connection per request. No compression: a small answer could unpack to more than the memory holds.
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "Connection": "close"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        limits = httpx2.Limits(max_keepalive_connections=0)
        return httpx2.AsyncClient(headers=headers, timeout=None, limits=limits, follow_redirects=False)
    except (ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise RewardError(f"reward.use: the proxy that the environment names cannot be used ({reason})") from None


def _root_cause(error: BaseException) -> str:
    """Say what went wrong below the client, whose own words are only that all attempts to connect failed."""
    while True:
        below = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__
        if below is None:
            return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        error = below


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
        raise _Unanswered(f"the answer is not JSON; {expected}", is_final=True) from None
    scores = content.get("scores") if isinstance(content, dict) else None
    if not isinstance(scores, list):
        raise _Unanswered(f"the answer has no list 'scores'; {expected}", is_final=True)
    if len(scores) != n:
        raise _Unanswered(f"the answer has {len(scores)} scores; {expected}", is_final=True)
    return [unjudged(DOES_NOT_APPLY) if score is None else to_score(score) for score in scores]
