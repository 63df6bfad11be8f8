"""python -m benchmarks.controller [--workers W] [--rate R] [--groups N]: how many groups one driver can direct.

The Ray actors, the engine and the sampler are real. Only the models are missing: each worker's engine sleeps as long as
its tokens would take. Every worker is a process on this machine. Memory must not grow over 100,000 groups.
"""

from __future__ import annotations

import argparse
import heapq
import os
import platform
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dapo.types import Request, Rollout


class SimulatedEngine:
    """An engine without a model that "samples" every response at `rate` tokens per second, all at the same time.

    Lengths and tokens depend only on the group's serial and the sample index.
    """

    def __init__(self, rate: float, version: int = 0) -> None:
        self.rate = rate
        self.version = version
        self.running: list[tuple[float, int, int, int]] = []  # a heap of (end time, serial, index, length)

    def submit(self, requests: Sequence[Request]) -> None:
        now = time.monotonic()
        for request in requests:
            for index in range(request.n):
                length = length_of(request.serial, index, request.params.max_tokens)
                heapq.heappush(self.running, (now + length / self.rate, request.serial, index, length))

    def poll(self) -> list[Rollout]:
        if not self.running:
            return []
        time.sleep(max(0.0, self.running[0][0] - time.monotonic()))
        finished, now = [heapq.heappop(self.running)], time.monotonic()
        while self.running and self.running[0][0] <= now:
            finished.append(heapq.heappop(self.running))
        return [self._rollout(serial, index, length) for _, serial, index, length in finished]

    def cancel(self, serials: Iterable[int]) -> int:
        canceled, now = set(serials), time.monotonic()
        stopped = [entry for entry in self.running if entry[1] in canceled]
        self.running = [entry for entry in self.running if entry[1] not in canceled]
        heapq.heapify(self.running)
        # Tokens that were generated for nothing.
        return sum(max(0, length - int((end - now) * self.rate)) for end, _, _, length in stopped)

    def sync_weights(self, version: int) -> None:
        self.version = version

    def metrics(self) -> dict[str, float]:
        return {"engine/decode_steps": 1.0, "engine/batch_occupancy": 0.5}

    def close(self) -> None: ...

    def _rollout(self, serial: int, index: int, length: int) -> Rollout:
        tokens = np.full(length, 7, np.int32)
        return Rollout(serial, index, tokens, np.full(length, -1.0, np.float32), "stop", self.version, f"{serial}")


def length_of(serial: int, index: int, longest: int) -> int:
    """Return a pseudo-random length: half are below a quarter of `longest`, a few reach it."""
    draw = (serial * 2654435761 + index * 40503) % 1000 / 1000
    return 1 + int(draw**2 * (longest - 1))


N = 16
LONGEST = 512  # tokens of a response
ROUND = 1024  # groups
LIMIT = 256  # responses in flight per worker


def simulated(rate: float, weights: Any) -> SimulatedEngine:
    return SimulatedEngine(rate)


def measure(workers: int, rate: float, groups: int, marks: int) -> list[tuple[int, float, float, float]]:
    """Return a row at each of `marks` points on the way.

    A row has the groups so far, the groups per minute since the last mark, the driver's CPU share and its MiB.
    """
    from dapo.cluster.ray_connection import join

    join()
    import ray

    from benchmarks import controller  # not __main__: the actors must be able to import it
    from dapo.cluster.remote_engine import RemoteEngine
    from dapo.cluster.rollout_worker import RolloutWorker
    from dapo.cluster.supervisor import Restarts, Rules

    build = partial(controller.simulated, rate)
    engine = RemoteEngine(
        lambda slot: ray.remote(RolloutWorker).options(num_cpus=0).remote(build),
        workers,
        lambda: ray.put({}),
        Rules(Restarts(0), 600.0),
        limit=LIMIT,
    )
    sampler = _sampler(engine)
    rows, version, began, busy = [], 0, time.perf_counter(), time.process_time()
    for mark in range(1, marks + 1):
        start = sampler.next_serial
        while sampler.next_serial < mark * groups // marks:
            sampled = sampler.fill(version + 1, version)
            assert len(sampled.batch) == sampler.config.data.train_batch_size
            version += 1
            engine.sync_weights(version)
        seconds, cpu = time.perf_counter() - began, time.process_time() - busy
        began, busy = time.perf_counter(), time.process_time()
        rows.append((sampler.next_serial, (sampler.next_serial - start) / seconds * 60, cpu / seconds, _resident()))
    engine.close()
    ray.shutdown()
    return rows


def _sampler(engine: Any) -> Any:
    from concurrent.futures import Future

    from dapo.config import Config
    from dapo.data.stream import PromptStream, ShuffledSource
    from dapo.sampling.strict import DynamicSampler
    from dapo.types import Prompt, Score

    class Judge:
        """Scores every second response as correct, immediately."""

        def submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Future[list[Score]]:
            future: Future[list[Score]] = Future()
            future.set_result([Score(float(r.index % 2), bool(r.index % 2)) for r in rollouts])
            return future

        def close(self) -> None: ...

    prompts = [Prompt(str(i), ({"role": "user", "content": "?"},), (1, 2, 3), 0) for i in range(10_000)]
    sizes = {"train_batch_size": ROUND, "max_response_length": LONGEST}
    config = Config.parse({"model": {"path": "none"}, "data": {"train": "none", **sizes}, "rollout": {"n": N}})
    return DynamicSampler(config, engine, Judge(), PromptStream([ShuffledSource(prompts, 0)]))


def _resident() -> float:
    """Return the resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--rate", type=float, default=100.0, help="tokens per second of one response")
    parser.add_argument("--groups", type=int, default=20_480, help="to test memory: 100000, with --rate 400")
    parser.add_argument("--marks", type=int, default=5)
    options = parser.parse_args()
    rows = measure(options.workers, options.rate, options.groups, options.marks)
    table = Table(title=f"groups of {N} from {options.workers} workers, {options.rate:g} tokens/s each response")
    for heading in ("groups", "groups/min", "driver's CPU", "driver's MiB"):
        table.add_column(heading, justify="right")
    for groups, rate, share, resident in rows:
        table.add_row(f"{groups:,}", f"{rate:,.0f}", f"{share:.0%}", f"{resident:,.0f}")
    Console(width=100).print(table)
    Console(width=100).print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")


if __name__ == "__main__":
    main()
