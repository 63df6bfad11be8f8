"""Build the environment that `environment.use` names."""

from __future__ import annotations

from dapo.config import Config
from dapo.environments.pool import WorkerEnvironments


def build_environment(config: Config) -> WorkerEnvironments | None:
    """Start the processes of the run's environment; return None if its responses are single turns."""
    return None if config.environment.use is None else WorkerEnvironments(config)
