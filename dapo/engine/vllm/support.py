"""Helpers around vLLM: the event loop it runs on, the meter it reports to, and the guard that ends its processes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from multiprocessing import resource_tracker
from typing import Any

_STOP_SECONDS = 15.0
_GUARD = """
import os, sys
sys.stdin.read()
for pid in sys.argv[1:]:
    try:
        os.kill(int(pid), 9)
    except ProcessLookupError:
        pass
"""


class Background:
    """An event loop in a background thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._work, name="dapo-vllm", daemon=True)
        self.thread.start()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        return self.start(coroutine).result(timeout)

    def stop(self) -> None:
        with contextlib.suppress(TimeoutError):  # a hung coroutine is abandoned
            self.run(self._cancel_all(), timeout=_STOP_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(_STOP_SECONDS)

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=1) if tasks else None

    def _work(self) -> None:
        # Ctrl-C reaches every process of a terminal, and a batch system's SIGTERM every process of a job. The run wants
        # to finish its step first, so vLLM's processes must not see either: they inherit this thread's signal mask.
        # Python's resource tracker unblocks the signals when it starts, so it starts before they are blocked.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


class Meter:
    """A vLLM stat logger that counts steps, tokens and restarts."""

    def __init__(self, max_concurrent: int) -> None:
        self.max_concurrent = max_concurrent
        self._reset()

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self.peak_cache_use = max(self.peak_cache_use, scheduler_stats.kv_cache_usage)
        if iteration_stats is not None:
            self.steps += 1
            self.tokens += iteration_stats.num_generation_tokens
            self.restarts += iteration_stats.num_preempted_reqs

    def metrics(self) -> dict[str, float]:
        metrics = {
            "engine/decode_steps": float(self.steps),
            "engine/batch_occupancy": self.tokens / (max(self.steps, 1) * self.max_concurrent),
            "engine/kv_occupancy": self.peak_cache_use,
            "engine/restarts": float(self.restarts),
        }
        self._reset()
        return metrics

    def log(self) -> None: ...

    def log_engine_initialized(self) -> None: ...

    def record_sleep_state(self, is_awake: int, level: int) -> None: ...

    def _reset(self) -> None:
        self.steps = self.tokens = self.restarts = 0
        self.peak_cache_use = 0.0


class Guard:
    """A small process that kills vLLM's processes when this one dies. vLLM alone would keep running."""

    def __init__(self, pids: Iterable[int]) -> None:
        command = [sys.executable, "-I", "-S", "-c", _GUARD, *map(str, pids)]
        # Its standard input closes when this process dies. In a session of its own it does not receive Ctrl-C.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def dismiss(self) -> None:
        self.process.kill()
        self.process.communicate()
