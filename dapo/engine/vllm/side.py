"""What vLLM needs beside it: the event loop that it runs on, the meter that it reports to, and a guard."""

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
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._work, name="dapo-vllm", daemon=True)
        self.thread.start()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        return self.start(coroutine).result(timeout)

    def stop(self) -> None:
        with contextlib.suppress(TimeoutError):  # one that hangs is left behind
            self.run(self._cancel_all(), timeout=_STOP_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(_STOP_SECONDS)

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=1) if tasks else None

    def _work(self) -> None:
        # Ctrl-C goes to every process of a terminal, and a batch system's end to every process of a job, but the run
        # wants to finish its step: the processes that this thread starts inherit that they do not hear it. (Starting
        # the tracker would undo that.)
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


class Meter:
    """vLLM tells it about every step."""

    def __init__(self, places: int) -> None:
        self.places = places
        self._reset()

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self.most_used = max(self.most_used, scheduler_stats.kv_cache_usage)
        if iteration_stats is not None:
            self.steps += 1
            self.tokens += iteration_stats.num_generation_tokens
            self.restarts += iteration_stats.num_preempted_reqs

    def figures(self) -> dict[str, float]:
        figures = {
            "engine/decode_steps": float(self.steps),
            "engine/batch_occupancy": self.tokens / (max(self.steps, 1) * self.places),
            "engine/kv_occupancy": self.most_used,
            "engine/restarts": float(self.restarts),
        }
        self._reset()
        return figures

    def log(self) -> None: ...

    def log_engine_initialized(self) -> None: ...

    def record_sleep_state(self, is_awake: int, level: int) -> None: ...

    def _reset(self) -> None:
        self.steps = self.tokens = self.restarts = 0
        self.most_used = 0.0


class Guard:
    """vLLM goes on when the process that started it is killed. So another one waits for that, and ends it then."""

    def __init__(self, pids: Iterable[int]) -> None:
        command = [sys.executable, "-I", "-S", "-c", _GUARD, *map(str, pids)]
        # It hears of the end when the other side of its input closes; in a session of its own no Ctrl-C reaches it.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def dismiss(self) -> None:
        self.process.kill()
        self.process.communicate()
