"""Connecting to Ray: decide whether a run needs it, join the cluster at RAY_ADDRESS, or start Ray on this machine."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from dapo.cluster.placement import Demand, room, wants_gpus
from dapo.config import Config
from dapo.errors import ClusterError, one_line
from dapo.system.install import install_hint
from dapo.system.progress import progress

CONNECT_LIMIT = 5.0  # seconds in which the cluster's head must accept a connection
LOCAL = (None, "", "local")  # values of RAY_ADDRESS for which Ray is started on this machine
_PING = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
_PING_LIMITS = {"RAY_gcs_rpc_server_connect_timeout_s": "1", "RAY_py_gcs_connect_timeout_s": "3"}


def needs_ray(config: Config) -> bool:
    """Return whether the run has processes that Ray must start. Under torchrun the learners run already."""
    counts = {"rollout_workers": len(config.rollout_engines), "reward_workers": config.cluster.reward_workers}
    workers = {name: count for name, count in counts.items() if count}
    is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if is_torchrun and workers:
        name, count = next(iter(workers.items()))
        raise ClusterError(f"cluster.{name} = {count} needs Ray: start the run without torchrun")
    return bool(workers) or (config.cluster.learners > 1 and not is_torchrun)


def starts_here() -> bool:
    """Return whether Ray will be started on this machine instead of joining a cluster."""
    return os.environ.get("RAY_ADDRESS") in LOCAL


def check_room(config: Config, *, has_learners: bool = True) -> None:
    """Refuse a run that does not fit on this machine, if Ray will be started here. Ray takes a minute to say so."""
    if not starts_here() or _has_joined():
        return
    import torch

    gpus = torch.cuda.device_count()
    demand = Demand.of(config, on_gpu=wants_gpus(config, gpus), has_learners=has_learners)
    demand.check([room(os.cpu_count() or 1, gpus)])


def join(given: str | None = None) -> bool:
    """Join the cluster at RAY_ADDRESS or `given`, or start Ray here. Return False if this process had joined before."""
    if _has_joined():
        return False
    if importlib.util.find_spec("ray") is None:
        raise ClusterError(
            "--ray, cluster.learners, cluster.rollout_workers and cluster.reward_workers need Ray: "
            + install_hint("ray")
        )
    address, option = (os.environ.get("RAY_ADDRESS"), "RAY_ADDRESS") if given is None else (given, "--ray")
    with progress("Starting Ray on this machine" if address in LOCAL else f"Joining Ray at {address}"):
        if address not in LOCAL:
            check_address(address, option)
        prepare(address)
        import ray

        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            if address in LOCAL:
                ray.init(address="local", include_dashboard=False, **quiet)
            else:
                ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            what = (
                "Ray cannot be started here" if address in LOCAL else f"{option} is {address}, which cannot be joined"
            )
            raise ClusterError(f"{what}: {one_line(error)}") from None
    return True


def prepare(address: str | None) -> None:
    """Set environment variables that Ray reads when it is first imported."""
    # The run reports lost processes itself, in one line each. Hide Ray's own long messages about them.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", r"^(A worker died|WARNING: \d+ PYTHON worker processes)")
    # `auto` may find the address of a cluster that is gone. Ray would try it twenty times, most of a minute each.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
    if address in LOCAL or _is_loopback_only(address):
        # Makes Ray use 127.0.0.1 as this machine's address and listen on loopback only.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def check_address(address: str, option: str = "RAY_ADDRESS") -> None:
    """Refuse an address that cannot be joined. This takes seconds; Ray itself would try for minutes."""
    if "://" in address:
        raise ClusterError(
            f"{option} is {address}, but a driver must run inside the cluster: set it to HOST:PORT of the head, or "
            "submit the run with `ray job submit`"
        )
    if address == "auto":
        return
    host, port = _host_and_port(address, option)
    try:
        socket.create_connection((host, port), timeout=CONNECT_LIMIT).close()
    except OSError as error:
        raise ClusterError(
            f"{option} is {address}, but nothing answers there ({error}); is the cluster's head running?"
        ) from None
    _check_head(address, option)


def check_run_dir(config: Config, option: str = "run.dir") -> None:
    """Refuse a relative run directory in a submitted job, whose working directory Ray deletes afterwards."""
    folder = Path(config.run.dir)
    if "/_ray_pkg_" in Path.cwd().as_posix() and not folder.is_absolute():
        raise ClusterError(
            f"{option} is {folder}, in a copy of the working directory that Ray deletes after the job: set it to an "
            "absolute path"
        )


def _check_head(address: str, option: str) -> None:
    """Ping the head from a subprocess with short timeouts. Here, Ray would try for a minute and print errors."""
    command, environment = [sys.executable, "-c", _PING, address], os.environ | _PING_LIMITS
    try:
        errors = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        ).stderr
    except subprocess.TimeoutExpired:
        return  # unknown problem: joining will report it
    if "AuthenticationError" in errors:
        raise ClusterError(
            f"{option} is {address}, but this cluster requires a token, which is missing or wrong: set "
            "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        )
    if "RpcError" in errors:
        raise ClusterError(
            f"{option} is {address}, but the service there is not the head of a Ray cluster; the head's port is "
            "6379 unless `ray start --port` set another"
        )


def _host_and_port(address: str, option: str = "RAY_ADDRESS") -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ClusterError(f"{option} is {address}, expected HOST:PORT of the cluster's head, auto or local")
    return host.strip("[]"), int(port)


def _is_loopback_only(address: str) -> bool:
    """Return whether the head at this address listens on loopback only.

    Ray replaces a loopback address by this machine's outward address, where such a head does not listen.
    """
    if address == "auto":
        return False
    host, port = _host_and_port(address)
    if host not in ("localhost", "127.0.0.1", "::1"):
        return False
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("8.8.8.8", 53))  # sends nothing: only selects the outward interface
            outward = probe.getsockname()[0]
        socket.create_connection((outward, port), timeout=CONNECT_LIMIT).close()
    except OSError:
        return True
    return False


def _has_joined() -> bool:
    """Return whether this process is connected to Ray, without importing Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()
