"""The run's side of the trackers (TensorBoard, Weights & Biases, trackio), which can neither stop nor slow a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from typing import Any

from dapo.config import Config
from dapo.errors import ConfigError
from dapo.system.install import install_hint
from dapo.types import EvalReport, StepReport

CLOSE_SECONDS = 60.0  # for writing and sending what is left when the run has ended

# Passes this process's import path on. With -m, the working directory would come first in it.
_COMMAND = "import sys; sys.path[:] = sys.argv[2:]; from dapo.store.tracking import main; main()"


def require_trackers(names: Iterable[str]) -> None:
    """Raise ConfigError if a tracker's package, which has the tracker's name, is not installed."""
    for name in names:
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise ConfigError(f"run.trackers: {name} needs the package {name}: {install_hint('trackers')}") from None


class Trackers:
    """All trackers of a run. One that fails is reported to `on_failure` once, and gets nothing more."""

    def __init__(self, config: Config, step: int, on_failure: Callable[[str], None]) -> None:
        self.on_failure = on_failure
        self.members: list[TrackerProcess] = []
        setup = {
            "run_dir": str(config.run_dir.resolve()),
            "run_name": config.run.name,
            "config": config.model_dump(mode="json"),
            "step": step,
        }
        for name in dict.fromkeys(config.run.trackers):
            try:
                self.members.append(TrackerProcess(name, setup))
            except OSError as error:
                on_failure(f"{name}: {error}")

    def step(self, report: StepReport) -> None:
        self._send(report.step, report.metrics)

    def evaluation(self, report: EvalReport) -> None:
        self._send(report.step, {f"eval/{report.name}/{name}": value for name, value in report.metrics.items()})

    def close(self) -> None:
        """Wait up to CLOSE_SECONDS until all trackers have finished, then stop them. May be called twice."""
        members, self.members = self.members, []
        for member in members:
            member.finish_input()  # of all trackers first, so that they finish in parallel
        end = time.monotonic() + CLOSE_SECONDS
        for member in members:
            if fault := member.close(max(0.0, end - time.monotonic())):
                self.on_failure(f"{member.name}: {fault}")

    def _send(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        for member in tuple(self.members):
            if fault := member.send({"step": step, "metrics": values}):
                self.members.remove(member)
                member.close()
                self.on_failure(f"{member.name}: {fault}")


class TrackerProcess:
    """One tracker's process. Writing to it never blocks."""

    def __init__(self, name: str, setup: Mapping[str, Any]) -> None:
        self.name = name
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND, name, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.stderr,
            bufsize=0,
            # Ctrl-C must reach the trainer only, which then closes the tracker. A session of its own also lets `close`
            # kill everything that the tracker has started.
            start_new_session=True,
        )
        assert self.process.stdin is not None
        self.stdin = self.process.stdin
        os.set_blocking(self.stdin.fileno(), False)
        self.outgoing = b""
        self.send(setup)

    def send(self, message: Mapping[str, Any]) -> str | None:
        """Send a message; return the reason if the process has ended."""
        self.outgoing += json.dumps(message).encode() + b"\n"
        self._write()
        return None if self.process.poll() is None else self._last_error()

    def finish_input(self) -> None:
        """Close its input, unless some of it is still waiting to be written."""
        self._write()
        if not self.outgoing:
            self.stdin.close()
            self.process.stdin = None

    def close(self, seconds: float = 0.0) -> str | None:
        """Wait for the process to end, kill it after `seconds`, and return the reason if it failed."""
        try:
            self.process.communicate(self.outgoing or None, timeout=seconds)
            return None if self.process.returncode == 0 else self._last_error()
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            return f"had not finished {CLOSE_SECONDS:g} s after the end of the training, and was stopped"
        finally:
            self.stdin.close()
            self.stderr.close()

    def _write(self) -> None:
        """Write as much as fits into the pipe; the rest waits for the next call."""
        try:
            while self.outgoing:
                self.outgoing = self.outgoing[os.write(self.stdin.fileno(), self.outgoing) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.outgoing = b""  # the process has ended; its exit status tells why

    def _last_error(self) -> str:
        self.stderr.seek(0)
        lines = self.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"ended with status {self.process.returncode}"
