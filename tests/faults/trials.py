"""`make test-faults`: break a run at every call that changes a file, resume it, and compare with an undisturbed run.

    python -m tests.faults.trials [--every N] [--kinds "strict,lora with ledger"]

A server process imports everything once and forks a process per attempt, so that an attempt takes a second or less. The
runs are real, with a tiny model. The files that SIGKILL leaves at each call are reconstructed from the log of a whole
run; test_faults.py compares them with those of a process that is really killed. All other faults happen for real.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.disk import Disk, half_writes, kills, lay_out, power_cuts, without_shared_memory
from tests.faults.interpose import Call, Mode, build, read_log

ROOT = Path(__file__).parent.parent.parent
STEPS = 3
# The options of each kind of run. Most save after every step, so that every kind of write occurs more than once. The
# writes of the last kind always have the same order: no checkpoint is written while the run trains.
KINDS: dict[str, dict[str, Any]] = {
    "strict": {},
    "inflight": {"rollout.mode": "inflight"},
    "lora with ledger": {"model.lora": {"rank": 2, "alpha": 4.0}, "algorithm.ledger.enable": True},
    "evaluation": {"eval.k": 2, "eval.every": 1, "eval.best_metric": "data/reward/mean"},
    "saved at the end": {"run.save_every": 0},
}
FOREIGN = {
    "thesis.txt": b"precious",
    "other/checkpoints/step_9/model.safetensors": b"precious",
    "other/run.db": b"mine",
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    options.add_argument("--every", type=int, default=1, help="try only every N-th point")
    options.add_argument("--kinds", default=",".join(KINDS), help="the kinds of run to try")
    options.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    chosen = options.parse_args()
    kinds = chosen.kinds.split(",")
    with (
        tempfile.TemporaryDirectory(prefix="dapo-faults-") as folder,
        closing(Campaign(Path(folder), kinds, chosen.processes)) as campaign,
    ):
        tally = campaign.run(every=chosen.every, progress=_progress())
    print(tally.summary())
    sys.exit(1 if tally.failures else 0)


def _progress() -> Callable[[int, int, int], None]:
    start = time.monotonic()

    def show(done: int, total: int, failed: int) -> None:
        if done % 50 and done != total:
            return
        left = (time.monotonic() - start) / done * (total - done)
        print(f"{done} of {total} points, {failed} failed, {left / 60:.0f} min left", flush=True)

    return show


@dataclass(frozen=True, slots=True)
class Point:
    """One way to break a run: a call that fails or kills, several kills in a row, or a power cut."""

    kind: str
    fault: str
    at: tuple[int, ...]  # the number of the call to break, one for every attempt
    mode: Mode = Mode.WATCH
    content: dict[str, bytes | None] | None = field(default=None, repr=False)  # files left by a kill or a power cut

    def __str__(self) -> str:
        return f"{self.kind}: {self.fault} at call {', '.join(map(str, self.at))}"


@dataclass(slots=True)
class Tally:
    tried: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    differences: int = 0
    tracebacks: int = 0
    failures: list[str] = field(default_factory=list)

    def summary(self) -> str:
        lines = [f"{count:6} {fault}" for fault, count in sorted(self.tried.items())]
        lines += [f"{sum(self.tried.values()):6} points tried", f"{self.refused:6} resumes refused"]
        lines += [f"{self.differences:6} differences", f"{self.tracebacks:6} tracebacks", *self.failures]
        return "\n".join(lines)


class Refused(Exception):
    """A resume failed."""


class Different(Exception):
    """A resumed run differs from the undisturbed one, or a foreign file was touched."""


class Traceback(Exception):
    """A fault ended in something else than one sentence."""


class Campaign:
    def __init__(self, folder: Path, kinds: Sequence[str], processes: int = 1) -> None:
        self.folder = folder
        self.kinds = kinds
        self.processes = processes
        library = build(folder)
        environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.servers = [Server(environment) for _ in range(processes)]
        self.whole: dict[str, Outcome] = {}
        self.calls: dict[str, list[Call]] = {}
        for kind in kinds:
            self._run_undisturbed(kind)

    def close(self) -> None:
        for server in self.servers:
            server.close()

    def points(self) -> Iterator[Point]:
        for kind in self.kinds:
            calls = self.calls[kind]
            numbered = list(enumerate(calls, 1))
            root = self.root(kind, "whole")
            for number, content in kills(calls, root):
                yield Point(kind, "SIGKILL before a call", (number,), content=content)
            for number, content in half_writes(calls, root):
                yield Point(kind, "SIGKILL after half a write", (number,), content=content)
            for number, call in numbered:
                yield Point(kind, "EIO", (number,), Mode.IO_ERROR)
                if call.what in ("write", "create", "mkdir"):
                    yield Point(kind, "ENOSPC", (number,), Mode.DISK_FULL)
            # Kill three starts in a row: at every second early call, then throughout the run.
            begun = next(number for number, call in numbered if call.to.name == "config.yaml")
            for number in range(1, begun + 10, 2):
                yield Point(kind, "SIGKILL three times", (number, number, max(1, number // 2)), Mode.KILL)
            for number in range(begun, len(calls), 11):
                yield Point(kind, "SIGKILL three times", (number, number // 2 + 1, number // 3 + 1), Mode.KILL)
            for number, survives, content in power_cuts(calls, root):
                yield Point(kind, f"power cut, {survives.value} left", (number,), content=content)

    def run(self, every: int = 1, progress: Callable[[int, int, int], None] = lambda *_: None) -> Tally:
        tally = Tally()
        points = list(self.points())[::every]
        free = list(self.servers)

        def attempt(numbered: tuple[int, Point]) -> tuple[Point, Exception | None]:
            server = free.pop()
            try:
                self.attempt(server, numbered[1], f"trial-{numbered[0]}")
            except (Refused, Different, Traceback) as failure:
                return numbered[1], failure
            finally:
                free.append(server)
            return numbered[1], None

        with ThreadPoolExecutor(self.processes) as threads:
            for done, (point, failure) in enumerate(threads.map(attempt, enumerate(points)), 1):
                tally.tried[point.fault] += 1
                if failure is not None:
                    tally.refused += isinstance(failure, Refused)
                    tally.differences += isinstance(failure, Different)
                    tally.tracebacks += isinstance(failure, Traceback)
                    tally.failures.append(f"{point}: {type(failure).__name__}: {failure}")
                progress(done, len(points), len(tally.failures))
        return tally

    def attempt(self, server: Server, point: Point, name: str) -> None:
        """Break one run as the point says, resume it, and compare."""
        root = self.root(point.kind, name)
        try:
            self._lay_out_foreign(root)
            if point.content is not None:
                lay_out(point.content, root)
            for number in point.at if point.content is None else ():
                ended = server.run(self.job(point.kind, root, mode=point.mode, at=number))
                self._check_end(ended, root, point)
            while (ended := server.run(self.job(point.kind, root))).code != 0:
                if "has already finished" in ended.output:  # killed after its last checkpoint was complete
                    break
                raise Refused(ended.output.strip()[-1500:])
            if "Traceback" in ended.output:
                raise Traceback(ended.output[-1500:])
            self._check_leftovers(root)
            self._compare(point.kind, Outcome.of(root / "run"))
        finally:
            shutil.rmtree(root.parent, ignore_errors=True)

    def _check_end(self, ended: Ended, root: Path, point: Point) -> None:
        if point.mode in (Mode.KILL, Mode.KILL_HALFWAY):
            return  # killed, or, in a later attempt, finished before the call that was to be broken
        if "Traceback" in ended.output:
            raise Traceback(ended.output[-2500:])
        if ended.code not in (0, 3):
            raise Traceback(f"exit code {ended.code} where 3 was expected: {ended.output.strip()[-1500:]}")
        lines = [line for line in ended.output.splitlines() if line.startswith("error: ")]
        if ended.code == 3 and (len(lines) != 1 or str(root) not in lines[0]):
            raise Traceback(f"not one sentence with a path: {ended.output.strip()[-1500:]}")

    def _compare(self, kind: str, found: Outcome) -> None:
        whole = self.whole[kind]
        # Responses in flight when a run stops are sampled again with newer weights, so only the steps are comparable.
        names = ("steps",) if kind == "inflight" else ("steps", "weights", "metrics", "verdicts", "evaluations", "best")
        for name in names:
            if getattr(found, name) != getattr(whole, name):
                raise Different(f"{name} differ: {_difference(getattr(whole, name), getattr(found, name))}")

    def _check_leftovers(self, root: Path) -> None:
        there = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for name, data in FOREIGN.items():
            if there.pop(name, None) != data:
                raise Different(f"{name}, a foreign file, was touched")
        odd = {n for n in there if n.endswith(("-wal", "-shm", "-journal")) or ("/." in n and not n.endswith("/.lock"))}
        if odd:
            raise Different(f"left behind: {', '.join(sorted(odd))}")

    def _run_undisturbed(self, kind: str) -> None:
        root, log = self.root(kind, "whole"), self.folder / f"{kind}.log"
        root.mkdir(parents=True)
        ended = self.servers[0].run(self.job(kind, root, log=log))
        assert ended.code == 0, ended.output
        self.calls[kind] = read_log(log)
        # The log is complete only if applying it gives exactly the files on the disk.
        disk = Disk(root)
        for call in self.calls[kind]:
            disk.apply(call)
        there = {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in root.rglob("*")}
        assert without_shared_memory(disk.content()) == without_shared_memory(there), "a write escaped the log"
        self.whole[kind] = Outcome.of(root / "run")
        assert self.whole[kind].steps == list(range(1, STEPS + 1))

    def job(
        self, kind: str, root: Path, mode: Mode = Mode.WATCH, at: int = 0, log: Path | None = None
    ) -> dict[str, Any]:
        overrides = {"run.save_every": 1, **KINDS[kind], "run.dir": str(root), "run.name": "run", "run.steps": STEPS}
        return {
            "folder": str(self.folder / "inputs" / kind), "root": str(root), "mode": int(mode), "at": at,
            "log": str(log) if log else None, "overrides": [f"{k}={json.dumps(v)}" for k, v in overrides.items()],
            "output": str(root.parent / "output.txt"),
        }  # fmt: skip

    def root(self, kind: str, name: str) -> Path:
        return self.folder / f"{kind}-{name}" / "runs"

    def _lay_out_foreign(self, root: Path) -> None:
        lay_out(dict(FOREIGN), root)


def _difference(expected: Any, found: Any) -> str:
    if isinstance(expected, dict):
        return str({k: (expected.get(k), found.get(k)) for k in expected | found if expected.get(k) != found.get(k)})[
            :600
        ]
    if isinstance(expected, list) and len(expected) == len(found):
        return "; ".join(_difference(a, b) for a, b in zip(expected, found, strict=True) if a != b)[:600]
    return f"expected {str(expected)[:300]}, found {str(found)[:300]}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The parts of a finished run that do not depend on the clock."""

    steps: list[int]
    weights: dict[str, str]
    metrics: list[dict[str, Any]]
    verdicts: list[Any]
    evaluations: list[Any]
    best: Any

    @classmethod
    def of(cls, run: Path) -> Outcome:
        import hashlib

        from dapo.checkpoint import folder as checkpoint
        from dapo.store.database import RunDatabase
        from tests import runs

        saved = checkpoint.newest(run / "checkpoints")
        assert saved is not None
        assert checkpoint.read_state(saved).step == STEPS
        files = list(saved.rglob("*.safetensors"))
        with RunDatabase.open_readonly(run / "run.db") as database:
            evaluations = [(row["step"], row["name"], row["metrics"]) for row in database.evals()]
        metrics = runs.metrics(run)
        return cls(
            steps=[step["step"] for step in metrics],
            weights={path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
            metrics=metrics,
            verdicts=runs.verdicts(run),
            evaluations=evaluations,
            best=checkpoint.best(run / "checkpoints"),
        )


@dataclass(frozen=True, slots=True)
class Ended:
    code: int  # exit code; negative: the signal that killed it
    output: str


class Server:
    """A process that has imported everything, and forks a process for every run."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.trials_server"], cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, job: dict[str, Any]) -> Ended:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the server died"
        return Ended(int(line), Path(job["output"]).read_text(encoding="utf-8", errors="replace"))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
