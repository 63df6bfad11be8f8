"""Whether a run needs Ray, and the way in: the cluster that RAY_ADDRESS names is joined, else Ray is started here."""

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
from dapo.errors import ClusterError
from dapo.system.progress import progress

CONNECT_LIMIT = 5.0  # seconds for the head of a cluster to answer
LOCAL = (None, "", "local")
_PING = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
_PING_LIMITS = {"RAY_gcs_rpc_server_connect_timeout_s": "1", "RAY_py_gcs_connect_timeout_s": "3"}
_NO_RAY = "cluster.learners, cluster.rollout_workers and cluster.reward_workers need Ray: pip install ray"


def needs_ray(config: Config) -> bool:
    """Whether parts of the run are to live elsewhere. Under torchrun the learners are there already, and sample."""
    counts = {"rollout_workers": len(config.rollout_engines), "reward_workers": config.cluster.reward_workers}
    workers = {name: count for name, count in counts.items() if count}
    is_placed = "TORCHELASTIC_RUN_ID" in os.environ
    if is_placed and workers:
        name, count = next(iter(workers.items()))
        raise ClusterError(f"cluster.{name} = {count} needs Ray: start the run without torchrun")
    return bool(workers) or (config.cluster.learners > 1 and not is_placed)


def starts_here() -> bool:
    """Whether there is no cluster to join."""
    return os.environ.get("RAY_ADDRESS") in LOCAL


def check_room(config: Config) -> None:
    """A Ray that is started here has what this machine has: what does not fit need not be tried for a minute."""
    if not starts_here() or _has_joined():
        return
    import torch

    gpus = torch.cuda.device_count()
    Demand.of(config, on_gpu=wants_gpus(config, gpus)).check([room(os.cpu_count() or 1, gpus)])


def join() -> bool:
    """Join the cluster that RAY_ADDRESS names, else start Ray here. False where this process had joined before."""
    if _has_joined():
        return False
    if importlib.util.find_spec("ray") is None:
        raise ClusterError(_NO_RAY)
    address = os.environ.get("RAY_ADDRESS")
    with progress("Starting Ray on this machine" if address in LOCAL else f"Joining Ray at {address}"):
        if address not in LOCAL:
            check_address(address)
        prepare()
        import ray

        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            if address in LOCAL:
                ray.init(address="local", include_dashboard=False, **quiet)
            else:
                ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            what = (
                "Ray cannot be started here"
                if address in LOCAL
                else f"RAY_ADDRESS is {address}, which cannot be joined"
            )
            raise ClusterError(f"{what}: {_one_line(error)}") from None
    return True


def prepare() -> None:
    """The environment that Ray reads when it is first imported, by whomever."""
    address = os.environ.get("RAY_ADDRESS")
    # Whoever made processes knows how many, and says what becomes of them; Ray would print walls of text besides.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", r"^(A worker died|WARNING: \d+ PYTHON worker processes)")
    # An address that `auto` has found may be out of date: Ray would try twenty times, most of a minute each.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
    if address in LOCAL or _is_on_loopback_alone(address):
        # Ray then takes 127.0.0.1 for this machine's address, and listens there alone.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def check_address(address: str) -> None:
    """Ray would try for minutes."""
    if "://" in address:
        raise ClusterError(
            f"RAY_ADDRESS is {address}, but a run must be inside the cluster: give HOST:PORT of its head, or submit "
            "the run with `ray job submit`"
        )
    if address == "auto":
        return
    host, port = _parts(address)
    try:
        socket.create_connection((host, port), timeout=CONNECT_LIMIT).close()
    except OSError as error:
        raise ClusterError(
            f"RAY_ADDRESS is {address}, but nothing answers there ({error}); is the cluster's head running?"
        ) from None
    _check_head(address)


def check_run_dir(config: Config) -> None:
    """A job of `ray job submit` works in a copy of a folder, which is gone when the job is."""
    folder = Path(config.run.dir)
    if "/_ray_pkg_" in Path.cwd().as_posix() and not folder.is_absolute():
        raise ClusterError(
            f"run.dir is {folder}, in a copy of the working directory that Ray removes after the job: give an absolute "
            "path that stays"
        )


def _check_head(address: str) -> None:
    """Ask in a process of its own: Ray would take most of a minute, and print what it tries."""
    command, environment = [sys.executable, "-c", _PING, address], os.environ | _PING_LIMITS
    try:
        said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False).stderr
    except subprocess.TimeoutExpired:
        return  # whatever it is, the way in will tell
    if "AuthenticationError" in said:
        raise ClusterError(
            f"RAY_ADDRESS is {address}, but this Ray wants a token, which is missing or not the right one: set "
            "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        )
    if "RpcError" in said:
        raise ClusterError(
            f"RAY_ADDRESS is {address}, but what answers there is not the head of a Ray cluster; its port is 6379 "
            "unless `ray start --port` said otherwise"
        )


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ClusterError(f"RAY_ADDRESS is {address}, expected HOST:PORT of the cluster's head, auto or local")
    return host.strip("[]"), int(port)


def _is_on_loopback_alone(address: str) -> bool:
    """Ray replaces a loopback address by this machine's outward one, where such a head does not listen."""
    if address == "auto":
        return False
    host, port = _parts(address)
    if host not in ("localhost", "127.0.0.1", "::1"):
        return False
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("8.8.8.8", 53))  # nothing is sent: the system only chooses a way out
            outward = probe.getsockname()[0]
        socket.create_connection((outward, port), timeout=CONNECT_LIMIT).close()
    except OSError:
        return True
    return False


def _has_joined() -> bool:
    """Ray need not be imported to know."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
