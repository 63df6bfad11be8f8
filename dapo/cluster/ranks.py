"""One run in several processes that torchrun has started on this machine: rank 0 drives, the others do as it says.

Rank 0 has the only trainer. What it asks of policy and engine goes to all ranks as a command, and each carries it out
on its own part: FSDP2's shards of the weights, and an embedded engine on a copy of them.
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

_PATIENCE = timedelta(days=30)  # of a rank that waits for the next command: rewards and evaluations take their time
_OWN_WORDS = 3.0  # seconds in which rank 0 may come upon a mistake by itself, and explain it
_FAILED, _HEARD = "failed", "heard"


def run(main: Callable[[], None]) -> None:
    """In each of them: `main` on rank 0, service on the others, until `main` ends."""
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


_channels: list[Channel] = []  # of rank 0, while its main function runs


def channel() -> Channel | None:
    """Where this process may give commands to others; None where it is alone."""
    if not dist.is_initialized() and "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
        raise ConfigError(
            "torchrun has started several processes, and each of them would train alone; start them with -m dapo train"
        )
    return _channels[0] if _channels else None


class Channel:
    """From rank 0 to all and back. Objects travel as pickles, between processes of one run that trust each other."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank = store, rank
        self.group: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self.member: Any = None
        self.is_broken = False

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """What each rank's member answers."""
        if self.is_broken:
            raise ClusterError("the processes of this run no longer work together")
        try:
            dist.broadcast_object_list([(name, arguments)], group=self.group)
            own = getattr(self.member, name)(*arguments)
            answers: list[Any] = [None] * dist.get_world_size()
            dist.gather_object(own, answers, group=self.group)
        except BaseException as error:
            self.is_broken = True
            self._explain(error)
            raise
        return answers

    def _explain(self, error: BaseException) -> None:
        """Another rank's end shows here as a connection that breaks."""
        if not _is_broken_connection(error):
            self.store.set(_HEARD, "")
            return
        if self.store.check([_FAILED]):
            raise SystemExit(int(self.store.get(_FAILED)))  # it has said why
        raise ClusterError(
            "another process of this run has ended without a word, as one does that is killed; go on with --resume"
        ) from error

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
        """Of a rank that cannot go on: one sentence for the user, and the end of all."""
        code = error.exit_code if isinstance(error, DapoError) else 1
        self.store.set(_FAILED, str(code))
        limit = time.monotonic() + _OWN_WORDS
        while time.monotonic() < limit and not self.store.check([_HEARD]):
            time.sleep(0.05)
        if not self.store.check([_HEARD]):
            sentence = (
                f"error: {error}\n" if isinstance(error, DapoError) else "".join(traceback.format_exception(error))
            )
            assert sys.__stderr__ is not None
            sys.__stderr__.write(sentence)
            sys.__stderr__.flush()
        os._exit(code)  # the others are in the middle of something: they notice that the connection is gone


def _is_broken_connection(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "Connection"))


def _serve(channel: Channel) -> NoReturn:
    """On every rank but 0."""
    from dapo.cluster.member import Member  # takes long to import, which is none of the others' business

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 ends the step first, then the run
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # rank 0 alone speaks
    channel.member = Member()
    while True:
        try:
            name, arguments = channel.receive()
            if name == "end":
                dist.destroy_process_group()
                sys.exit(0)
            channel.answer(getattr(channel.member, name)(*arguments))
        except Exception as error:
            if _is_broken_connection(error):
                os._exit(1)  # whoever broke it says why
            channel.fail(error)
