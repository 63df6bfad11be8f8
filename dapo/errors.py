"""What can go wrong because of the user's input or the run itself, each with one sentence that says what to do."""

import errno
import re

_USER_IN_URL = re.compile(r"(?<=://)\S*@")
_PARAMETER = re.compile(r"([?&;#]([^\s=&;#]+)=)([^\s&;#]+)")
_SECRET_NAME = re.compile(
    r"key(?!w)|token(?!s|iz)|secret|passw|passphrase|pwd|signature|credential|jwt|bearer"
    r"|(?<![a-z])(auth|authorization|sig|pass|pw|sas|code|session|sid)(?![a-z])",
    re.IGNORECASE,
)


def mask_secrets(text: str) -> str:
    """Mask user names and passwords in the URLs of a text, and parameters whose names sound like those of secrets."""
    text = _USER_IN_URL.sub("***@", text)
    return _PARAMETER.sub(lambda found: found[1] + ("***" if _SECRET_NAME.search(found[2]) else found[3]), text)


class DapoError(Exception):
    """Something the user can mend. The command line prints it as one sentence and exits with `exit_code`.

    The sentence may quote a URL, and is on its way to a terminal, a log or a database: secrets in it are masked.
    """

    exit_code = 2

    def __init__(self, sentence: str = "") -> None:
        super().__init__(mask_secrets(sentence))


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


DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


class StorageError(DapoError, RuntimeError):
    """A disk is full or fails while it is written to. What was saved before stays, and a run can resume."""

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
