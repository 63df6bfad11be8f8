"""Judging by somebody's HTTP endpoint: one POST per group, tried again while that makes sense, never forever.

It is sent {"samples": [{"prompt": messages, "completion", "answer", "data_source", "extra"}, ...]} and answers
{"scores": [...]} in the same order, each a number, a mapping with `score` and perhaps `acc` and extras, or null for a
response to which it does not apply.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dapo.rewards.function import CLOSED, DOES_NOT_APPLY, explain, to_json, to_score, unjudged
from dapo.types import Prompt, Rollout, Score

TRIES = 5
THREADS = 8
MAX_ANSWER = 2**26
TRY_AGAIN = (408, 429, 500, 502, 503, 504)


class _Unanswered(Exception):
    """No scores, and why; `is_final` when asking again would not help."""

    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final


class EndpointJudge:
    """A request has three times as long as one response, since it carries a group."""

    def __init__(self, url: str, timeout: float, backoff: float = 0.5) -> None:
        self.url = url
        self.seconds = 3 * timeout
        self.backoff = backoff
        self.jitter = random.Random()  # the run's own random numbers stay untouched
        self.closing = threading.Event()
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="dapo-endpoint")

    def submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Future[list[Score]]:
        future: Future[list[Score]] = Future()
        future.set_running_or_notify_cancel()
        if self.closing.is_set():
            future.set_result([unjudged(CLOSED)] * len(rollouts))
        else:
            self.threads.submit(self._judge, prompt, rollouts, future)
        return future

    def close(self) -> None:
        self.closing.set()
        self.threads.shutdown()

    def _judge(self, prompt: Prompt, rollouts: Sequence[Rollout], future: Future[list[Score]]) -> None:
        try:
            scores = self._ask(_body(prompt, rollouts), len(rollouts))
        except _Unanswered as error:
            scores = [unjudged(f"{self.url}: {error}")] * len(rollouts)
        except Exception as error:  # a row that is no JSON, or a library's surprise: these responses, not the run
            scores = [unjudged(f"{self.url}: {explain(error)}")] * len(rollouts)
        future.set_result(scores)

    def _ask(self, body: bytes, n: int) -> list[Score]:
        for attempt in range(1, TRIES + 1):
            if self.closing.is_set():
                raise _Unanswered(CLOSED)
            try:
                return _read_scores(self._post(body), n)
            except _Unanswered as error:
                if error.is_final:
                    raise
                if attempt == TRIES:
                    raise _Unanswered(f"{error} (tried {TRIES} times)") from None
            # Clients that failed together should not come back together.
            self.closing.wait(self.backoff * 2 ** (attempt - 1) * self.jitter.uniform(0.5, 1.5))
        raise AssertionError("the last attempt returns or raises")

    def _post(self, body: bytes) -> bytes:
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"}, method="POST")
        deadline = time.monotonic() + self.seconds
        try:
            with urllib.request.urlopen(request, timeout=self.seconds) as response:
                return self._read(response, deadline)
        except urllib.error.HTTPError as error:
            error.close()
            raise _Unanswered(f"HTTP status {error.code}", is_final=error.code not in TRY_AGAIN) from None
        except TimeoutError:
            raise _Unanswered(f"no answer within {self.seconds:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(cause, TimeoutError):
                raise _Unanswered(f"no connection within {self.seconds:g} s") from None
            raise _Unanswered(f"{type(cause).__name__}: {cause}") from None

    def _read(self, response: http.client.HTTPResponse, deadline: float) -> bytes:
        """In pieces, since the timeout of a socket starts again with every byte."""
        answer = b""
        while piece := response.read1(2**16):
            answer += piece
            if time.monotonic() > deadline:
                raise TimeoutError
            if len(answer) > MAX_ANSWER:
                raise _Unanswered(f"an answer of more than {MAX_ANSWER} bytes", is_final=True)
        return answer


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


def _read_scores(answer: bytes, n: int) -> list[Score]:
    expected = f'expected {{"scores": [...]}} with {n} entries'
    try:
        content: Any = json.loads(answer)
    except (ValueError, RecursionError):
        raise _Unanswered(f"the answer is not JSON; {expected}", is_final=True) from None
    scores = content.get("scores") if isinstance(content, dict) else None
    if not isinstance(scores, list):
        raise _Unanswered(f"the answer has no list 'scores'; {expected}", is_final=True)
    if len(scores) != n:
        raise _Unanswered(f"the answer has {len(scores)} scores; {expected}", is_final=True)
    return [unjudged(DOES_NOT_APPLY) if score is None else to_score(score) for score in scores]
