"""One run in several processes started by torchrun on one machine: rank 0 sends commands, all ranks execute them.

Rank 0 has the only trainer. Its calls to policy and engine are broadcast to all ranks, and each executes them on its
own part: its FSDP2 shard of the weights, and an embedded engine on a full copy of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from dapo.errors import ClusterError, ConfigError, DapoError
from dapo.policy.sharding import backend

_COMMAND_TIMEOUT = timedelta(days=30)  # rank 0 may judge or evaluate for hours between commands
_RANK_0_GRACE = 3.0  # seconds to wait for rank 0 to report the same error, so that it is printed only once
_FAILED, _REPORTED = "failed", "reported"  # store keys: a rank's exit code; that rank 0 reports its error


def run(main: Callable[[], None]) -> None:
    """Run `main` on rank 0 and serve its commands on the other ranks until it ends. Called in every process."""
    store, rank, world = next(iter(rendezvous("env://")))
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group(backend(on_gpu), store=store, rank=rank, world_size=world)
    channel = Channel(PrefixStore("dapo", store), rank)
    if rank > 0:
        _serve(channel)
    _channels.append(channel)
    try:
        main()
    finally:
        _channels.clear()
        channel.end()


_channels: list[Channel] = []  # on rank 0: its channel while `main` runs


def channel() -> Channel | None:
    """Return the channel through which this process commands the other ranks, or None if it runs alone."""
    if not dist.is_initialized() and "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
        raise ConfigError(
            "torchrun has started several processes, and each would train alone; start them with -m dapo train"
        )
    return _channels[0] if _channels else None


class Channel:
    """Commands from rank 0 to all ranks, and their answers. Objects are pickled: the processes trust each other."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank = store, rank
        self.group: Any = dist.new_group(backend="gloo", timeout=_COMMAND_TIMEOUT)
        self.own: Any = None  # what this rank holds: a `TorchrunRank`
        self.is_broken = False

    def call(self, name: str, *arguments: Any) -> Any:
        """Call this method of every rank's `own`. Return the answer of rank 0."""
        return self.call_each(name, *arguments)[0]

    def call_each(self, name: str, *arguments: Any) -> list[Any]:
        """Call this method of every rank's `own`, and return the answers by rank."""
        if self.is_broken:
            raise ClusterError("the processes of this run have lost their connection; resume with --resume")
        try:
            dist.broadcast_object_list([(name, arguments)], group=self.group)
            answer = getattr(self.own, name)(*arguments)
            answers: list[Any] = [None] * dist.get_world_size()
            dist.gather_object(answer, answers, group=self.group)
        except BaseException as error:
            self.is_broken = True
            self._explain(error)
            raise
        return answers

    def _explain(self, error: BaseException) -> None:
        """Explain a broken connection: another rank failed, which it reports itself, or was killed."""
        if not _is_broken_connection(error):
            self.store.set(_REPORTED, "")  # rank 0's own error, which the caller prints
            return
        if self.store.check([_FAILED]):
            raise SystemExit(int(self.store.get(_FAILED)))
        # torchrun ends this process, too; it must print the reason first.
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise ClusterError("another process of this run was killed or crashed; resume with --resume") from error

    def receive(self) -> tuple[str, tuple[Any, ...]]:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, group=self.group)
        return box[0]

    def answer(self, result: Any) -> None:
        dist.gather_object(result, group=self.group)

    def end(self) -> None:
        if not self.is_broken:
            with contextlib.suppress(RuntimeError):
                dist.broadcast_object_list([("end", ())], group=self.group)
                dist.destroy_process_group()

    def fail(self, error: BaseException) -> NoReturn:
        """Exit after an error on a rank other than 0, and print it unless rank 0 reports it."""
        code = error.exit_code if isinstance(error, DapoError) else 1
        self.store.set(_FAILED, str(code))
        limit = time.monotonic() + _RANK_0_GRACE
        while time.monotonic() < limit and not self.store.check([_REPORTED]):
            time.sleep(0.05)
        if not self.store.check([_REPORTED]):
            sentence = (
                f"error: {error}\n" if isinstance(error, DapoError) else "".join(traceback.format_exception(error))
            )
            assert sys.__stderr__ is not None
            sys.__stderr__.write(sentence)
            sys.__stderr__.flush()
        os._exit(code)  # without cleanup: the other ranks are inside a collective and see the connection break


def _is_broken_connection(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "Connection"))


def _serve(channel: Channel) -> NoReturn:
    """Execute commands until rank 0 ends the run: the main loop of all other ranks."""
    from dapo.cluster.torchrun_parts import TorchrunRank  # here, since it is slow to import

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 finishes the step, then ends the run
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # only rank 0 prints
    channel.own = TorchrunRank()
    while True:
        try:
            name, arguments = channel.receive()
            if name == "end":
                dist.destroy_process_group()
                sys.exit(0)
            channel.answer(getattr(channel.own, name)(*arguments))
        except Exception as error:
            if _is_broken_connection(error):
                os._exit(1)  # the rank that broke it prints why
            channel.fail(error)
