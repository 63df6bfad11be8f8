"""Figures for other programs to show: TensorBoard, Weights & Biases, trackio. None can stop or slow a training."""

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
from dapo.types import EvalReport, StepReport

CLOSE_SECONDS = 60.0  # for what is still to be written or sent when the training is over

# With the training process's own import path; as a module (-m) the working directory would come first.
_COMMAND = "import sys; sys.path[:] = sys.argv[2:]; from dapo.store.tracking import main; main()"


def require_trackers(names: Iterable[str]) -> None:
    """Called before any model is loaded. Each package is called what its tracker is called."""
    for name in names:
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise ConfigError(f"run.trackers: {name} needs the package {name}: pip install 'dapo[trackers]'") from None


class Trackers:
    """All of a run's trackers. One that fails is named to `on_failure` once, and then left alone."""

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
        """Waits for what is under way, but not forever. Closing twice is closing once."""
        members, self.members = self.members, []
        for member in members:
            member.finish_input()  # all at once, so that they finish side by side
        end = time.monotonic() + CLOSE_SECONDS
        for member in members:
            if fault := member.close(max(0.0, end - time.monotonic())):
                self.on_failure(f"{member.name}: {fault}")

    def _send(self, step: int, metrics: Mapping[str, float]) -> None:
        figures = {name: float(value) for name, value in metrics.items()}
        for member in tuple(self.members):
            if fault := member.send({"step": step, "figures": figures}):
                self.members.remove(member)
                member.close()
                self.on_failure(f"{member.name}: {fault}")


class TrackerProcess:
    """One tracker's process, written to without ever waiting for it."""

    def __init__(self, name: str, setup: Mapping[str, Any]) -> None:
        self.name = name
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND, name, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.stderr,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the training, which then closes it; killed with all it has started
        )
        assert self.process.stdin is not None
        self.stdin = self.process.stdin
        os.set_blocking(self.stdin.fileno(), False)
        self.outgoing = b""
        self.send(setup)

    def send(self, message: Mapping[str, Any]) -> str | None:
        """What went wrong with it since the last time, if anything did."""
        self.outgoing += json.dumps(message).encode() + b"\n"
        self._write()
        return None if self.process.poll() is None else self._last_words()

    def finish_input(self) -> None:
        """Tell it that nothing more comes, unless it has not taken everything yet."""
        self._write()
        if not self.outgoing:
            self.stdin.close()
            self.process.stdin = None

    def close(self, seconds: float = 0.0) -> str | None:
        """What went wrong with it, if anything did."""
        try:
            self.process.communicate(self.outgoing or None, timeout=seconds)
            return None if self.process.returncode == 0 else self._last_words()
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            return f"was not done {CLOSE_SECONDS:g} s after the end of the training, and was stopped"
        finally:
            self.stdin.close()
            self.stderr.close()

    def _write(self) -> None:
        """As much as fits into the pipe; the rest goes along with the next report."""
        try:
            while self.outgoing:
                self.outgoing = self.outgoing[os.write(self.stdin.fileno(), self.outgoing) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.outgoing = b""  # that it is gone is told by its exit status

    def _last_words(self) -> str:
        self.stderr.seek(0)
        lines = self.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"ended with status {self.process.returncode}"
