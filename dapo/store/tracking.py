"""The process of one tracker (TensorBoard, Weights & Biases or trackio), started by `dapo.store.trackers`.

These libraries print, hook into the interpreter, keep one folder per process, and wait for the network. In a process of
their own none of that affects the run.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# The libraries are optional, and TensorBoard's protocol messages are generated at import time.

from __future__ import annotations

import json
import os
import secrets
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PROJECT = "dapo"


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a tracker. With `is_resumed` the tracker continues its run `id`, else it starts one."""

    run_dir: Path
    run_name: str
    config: Mapping[str, Any]
    step: int  # the step that the run resumes after; later steps that were tracked have been undone
    id: str
    is_resumed: bool


class TensorBoard:
    """Writes the event files of torch's SummaryWriter without importing torch, which would take half a gigabyte."""

    can_go_back = True  # sending a step again replaces the earlier values

    def __init__(self, start: Start) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.event = event_pb2.Event
        self.writer = EventFileWriter(str(start.run_dir / "tensorboard"))
        began = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        # Readers drop everything from this step on. Step 0, the first evaluation, is dropped only if the run restarts.
        self._add(start.step + 1 if start.step > 0 else 0, session_log=began)
        self._add(start.step, summary=_text("configuration", _as_markdown(start)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=Summary(value=values))

    def close(self) -> None:
        self.writer.close()

    def _add(self, step: int, **what: Any) -> None:
        self.writer.add_event(self.event(wall_time=time.time(), step=step, **what))
        self.writer.flush()


def _text(tag: str, markdown: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[markdown.encode()], tensor_shape=shape)
    return Summary(value=[Summary.Value(tag=tag, metadata=plugin, tensor=tensor)])


def _as_markdown(start: Start) -> str:
    text = yaml.safe_dump(dict(start.config), sort_keys=False, allow_unicode=True)
    return f"{start.run_name}\n\n" + "".join(f"    {line}\n" for line in text.splitlines())


class Wandb:
    """Writes offline unless WANDB_MODE says otherwise; `wandb sync` sends the files later."""

    can_go_back = False  # it ignores steps below its latest

    def __init__(self, start: Start) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        settings: dict[str, Any] = {"silent": True, "console": "off"}
        # Record nothing about the code or the user. Package versions and the platform cannot be turned off.
        settings |= dict.fromkeys(("disable_git", "disable_code", "x_disable_meta", "x_disable_stats"), True)
        settings |= {"x_disable_machine_info": True, "x_save_requirements": False, "save_code": False}
        settings |= {"host": "", "username": "", "email": ""}
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=str(start.run_dir),
            id=start.id,
            name=start.run_name,
            config=dict(start.config),
            mode=os.environ.get("WANDB_MODE", "offline"),  # pyright: ignore[reportArgumentType]
            resume="allow",
            allow_val_change=True,
            force=True,  # if nobody is logged in, raise an error instead of asking
            settings=settings,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """Writes to the run directory unless TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says otherwise."""

    can_go_back = False  # it would keep both values

    def __init__(self, start: Start) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(start.run_dir / "trackio"))
        if not os.environ.keys() & {"TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"}:
            os.environ["HF_HUB_OFFLINE"] = "1"  # trackio asks the hub for the user's name even when it writes locally
        self.faults: list[str] = []
        # trackio reports its errors as warnings, some of them from its own threads.
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = self._note
        import trackio

        self.run = trackio.init(
            PROJECT,
            start.run_name,
            config=dict(start.config),
            resume="allow" if start.is_resumed else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._check()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)
        self._check()

    def close(self) -> None:
        self.run.finish()
        self._check()

    def _note(self, message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if category is UserWarning:
            self.faults.append(str(message))

    def _check(self) -> None:
        if self.faults:
            raise RuntimeError(self.faults[0])


TRACKERS = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}


class Progress:
    """The tracker's run id and its newest step, kept in the run directory so that a resumed run can continue it."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        self.is_resumed = resume and path.exists()
        known = json.loads(path.read_text(encoding="utf-8")) if self.is_resumed else {}
        # A random id: if it followed from the path, a run that was deleted and restarted would extend the old curves.
        self.id: str = known.get("id") or secrets.token_hex(6)
        self.before = self.step = int(known.get("step", -1))

    def reached(self, step: int) -> None:
        self.step = max(self.step, step)
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps({"id": self.id, "step": self.step}), encoding="utf-8")
        draft.replace(self.path)


def follow(name: str, lines: Iterable[str]) -> None:
    """Read the setup from the first line, then send the report of every further line to the tracker."""
    lines = iter(lines)
    setup = json.loads(next(lines))
    run_dir, step = Path(setup["run_dir"]), setup["step"]
    (run_dir / name).mkdir(parents=True, exist_ok=True)  # fail here: wandb would silently write somewhere else
    sent = Progress(run_dir / f".{name}.json", resume=step > 0)
    start = Start(run_dir, setup["run_name"], setup["config"], step, sent.id, sent.is_resumed)
    tracker = TRACKERS[name](start)
    for line in lines:
        if not line.endswith("\n"):
            break  # the trainer was killed while writing it
        report = json.loads(line)
        if tracker.can_go_back or report["step"] > sent.before:
            tracker.log(report["step"], report["metrics"])
            sent.reached(report["step"])
    tracker.close()


def main() -> None:
    name = sys.argv[1]
    # Move the pipe away from stdin: the libraries and their children must neither read it nor keep it open.
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        follow(name, lines)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        sys.stderr.write(f"\n{type(error).__name__}: {first}\n")
        sys.stderr.flush()
        os._exit(1)  # a regular exit would run the exit handlers of a broken library, which may hang or print more
