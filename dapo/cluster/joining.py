"""Whether a run needs Ray, and the way in: the cluster that RAY_ADDRESS names is joined, else Ray is started here."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

from dapo.config import Config
from dapo.errors import ClusterError

CONNECT_LIMIT = 5.0  # seconds for the head of a cluster to answer
LOCAL = (None, "", "local")


def needs_ray(config: Config) -> bool:
    """Whether parts of the run are to live elsewhere. Under torchrun the learners are there already, and sample."""
    workers, is_placed = config.cluster.rollout_workers, "TORCHELASTIC_RUN_ID" in os.environ
    if is_placed and workers:
        raise ClusterError(f"cluster.rollout_workers = {workers} needs Ray: start the run without torchrun")
    return workers > 0 or (config.cluster.learners > 1 and not is_placed)


def join() -> bool:
    """Join the cluster that RAY_ADDRESS names, else start Ray here. False where this process had joined before."""
    address = os.environ.get("RAY_ADDRESS")
    if address in LOCAL:
        # Ray then takes 127.0.0.1 for this machine's address, and listens there alone.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    else:
        check_address(address)
        # Where something answers that is no head, Ray would try twenty times, most of a minute each.
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ClusterError("cluster.learners and cluster.rollout_workers need Ray: pip install ray") from None
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address in LOCAL:
            ray.init(address="local", include_dashboard=False, **quiet)
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(f"RAY_ADDRESS is {address}, which cannot be joined: {_one_line(error)}") from None
    return True


def check_address(address: str) -> None:
    """Ray would try for minutes."""
    if "://" in address:
        raise ClusterError(
            f"RAY_ADDRESS is {address}, but a run must be inside the cluster: give HOST:PORT of its head, or submit "
            "the run with `ray job submit`"
        )
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ClusterError(f"RAY_ADDRESS is {address}, expected HOST:PORT of the cluster's head, auto or local")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_LIMIT).close()
    except OSError as error:
        raise ClusterError(
            f"RAY_ADDRESS is {address}, but nothing answers there ({error}); is the cluster's head running?"
        ) from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
