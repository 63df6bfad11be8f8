"""TensorBoard, Weights & Biases and trackio, each in a process of its own: the far side of `dapo.store.trackers`.

These libraries print, hook into the interpreter, keep one folder per process or wait for a network. In their own
process none of that reaches the training, and whatever they do wrong ends here.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# The libraries are optional, and the messages of TensorBoard's protocol are made when they are imported.

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
from typing import Any, Protocol

import yaml

PROJECT = "dapo"


@dataclass(frozen=True, slots=True)
class Start:
    """What a tracker is told first. With `is_resumed` it should go on with its run called `id`."""

    run_dir: Path
    run_name: str
    config: Mapping[str, Any]
    step: int  # the last step that counts; what was tracked after it was undone
    id: str
    is_resumed: bool


class Tracker(Protocol):
    can_go_back: bool  # whether a step that was sent before takes the place of the earlier one

    def __init__(self, start: Start) -> None: ...
    def log(self, step: int, figures: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files as torch's SummaryWriter makes them, without torch: it would take half a gigabyte more."""

    can_go_back = True

    def __init__(self, start: Start) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.event = event_pb2.Event
        self.writer = EventFileWriter(str(start.run_dir / "tensorboard"))
        began = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        # Readers drop everything from this step on: the evaluation at step 0 only where the run begins anew.
        self._add(start.step + 1 if start.step > 0 else 0, session_log=began)
        self._add(start.step, summary=_text("configuration", _as_markdown(start)))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
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
    """Offline unless WANDB_MODE says otherwise; `wandb sync` sends the files later."""

    can_go_back = False  # it ignores steps below its latest

    def __init__(self, start: Start) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        settings: dict[str, Any] = {"silent": True, "console": "off"}
        # Of the machine it is told its versions and platform, which cannot be turned off; of code and person nothing.
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
            force=True,  # an error rather than a question where nobody is logged in
            settings=settings,
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.run.log(dict(figures), step=step)

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """In the run directory unless TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says otherwise."""

    can_go_back = False  # it would keep both

    def __init__(self, start: Start) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(start.run_dir / "trackio"))
        if not os.environ.keys() & {"TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"}:
            os.environ["HF_HUB_OFFLINE"] = "1"  # it asks the hub for the user's name even when all stays here
        self.faults: list[str] = []
        # Its errors are warnings, and some come from its own threads.
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

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.run.log(dict(figures), step=step)
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


TRACKERS: Mapping[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}


class Sent:
    """Which run a tracker has under way and how far it is, kept in the run directory for the day it is resumed."""

    def __init__(self, path: Path, *, goes_on: bool) -> None:
        self.path = path
        self.is_resumed = goes_on and path.exists()
        known = json.loads(path.read_text(encoding="utf-8")) if self.is_resumed else {}
        # Not made from the path: a run that was deleted and started anew would go on with the old one's curves.
        self.id: str = known.get("id") or secrets.token_hex(6)
        self.before = self.step = int(known.get("step", -1))

    def reached(self, step: int) -> None:
        self.step = max(self.step, step)
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps({"id": self.id, "step": self.step}), encoding="utf-8")
        draft.replace(self.path)


def follow(name: str, lines: Iterable[str]) -> None:
    """First the setup, then one line for each report, until there are no more."""
    lines = iter(lines)
    setup = json.loads(next(lines))
    run_dir, step = Path(setup["run_dir"]), setup["step"]
    (run_dir / name).mkdir(parents=True, exist_ok=True)  # where it cannot, wandb would quietly go elsewhere
    sent = Sent(run_dir / f".{name}.json", goes_on=step > 0)
    start = Start(run_dir, setup["run_name"], setup["config"], step, sent.id, sent.is_resumed)
    tracker = TRACKERS[name](start)
    for line in lines:
        if not line.endswith("\n"):
            break  # the training was killed in the middle of it
        report = json.loads(line)
        if tracker.can_go_back or report["step"] > sent.before:
            tracker.log(report["step"], report["figures"])
            sent.reached(report["step"])
    tracker.close()


def main() -> None:
    name = sys.argv[1]
    # The libraries and what they start must neither read the reports nor hold the pipe open.
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        follow(name, lines)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        sys.stderr.write(f"\n{type(error).__name__}: {first}\n")
        sys.stderr.flush()
        os._exit(1)  # at its regular exit a broken library may hang, or have the last word
