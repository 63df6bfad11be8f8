"""What can go wrong because of the user's input or the run itself, each with one sentence that says what to do."""


class DapoError(Exception):
    """Something the user can mend. The command line prints it as one sentence and exits with `exit_code`."""

    exit_code = 2


class ConfigError(DapoError, ValueError):
    """A key, value or combination in the configuration is not allowed."""


class DataError(DapoError, ValueError):
    """A dataset file or row cannot be used."""


class ModelError(DapoError, ValueError):
    """A model cannot be loaded, or computes something this system does not reproduce."""


class RewardError(DapoError, ValueError):
    """A reward function cannot be loaded, or judged nothing at all."""


class CheckpointError(DapoError, ValueError):
    """A run directory or checkpoint cannot be read, or belongs to another run."""


class StorageError(DapoError, RuntimeError):
    """A disk is full or fails while the run writes to it. What was saved before stays, and the run can resume."""

    exit_code = 3


class TrainingStopped(DapoError, RuntimeError):
    """The run cannot go on in a way that makes sense: a guard stopped it."""

    exit_code = 3


class ClusterError(DapoError, RuntimeError):
    """The cluster cannot be joined, or has too little for what is asked of it."""


class LearnerLost(ClusterError):
    """A process that learns is gone, and its weights with it: the run goes back to its newest checkpoint."""


class ClusterLost(TrainingStopped):
    """Parts of the cluster are gone and will not be replaced: the run saves what it has, and stops."""


class EngineError(DapoError, RuntimeError):
    """The engine that samples could not be started, has ended, or does not answer."""

    exit_code = 3
