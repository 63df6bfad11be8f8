"""The exceptions that are reported to the user as one sentence, and the masking of secrets in it."""

import difflib
import errno
import re
from collections.abc import Iterable, Sequence

_USER_IN_URL = re.compile(r"(?<=://)\S*@")
_PARAMETER = re.compile(r"([?&;#]([^\s=&;#]+)=)([^\s&;#]+)")
_SECRET_NAME = re.compile(
    r"key(?!w)|token(?!s|iz)|secret|passw|passphrase|pwd|signature|credential|jwt|bearer"
    r"|(?<![a-z])(auth|authorization|sig|pass|pw|sas|code|session|sid)(?![a-z])",
    re.IGNORECASE,
)


def mask_secrets(text: str) -> str:
    """Mask credentials in URLs, and URL parameters whose names look like secrets."""
    text = _USER_IN_URL.sub("***@", text)
    return _PARAMETER.sub(lambda found: found[1] + ("***" if _SECRET_NAME.search(found[2]) else found[3]), text)


def one_line(error: BaseException) -> str:
    """Return an error's message as one line of at most 300 characters, or its type if it has no message."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 300 characters, or its type if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def counted(count: int, noun: str) -> str:
    """Return "1 row" or "2 rows"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint to append to a message about an unknown name: the known name that is most like it, if one is."""
    close = difflib.get_close_matches(name, [*known], n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


class DapoError(Exception):
    """An error that the user can fix. The command line prints its one sentence and exits with `exit_code`.

    Secrets in the sentence are masked, because it may quote a URL and ends up in terminals, logs and the database.
    """

    exit_code = 2

    def __init__(self, sentence: str = "") -> None:
        super().__init__(mask_secrets(sentence))


class ConfigError(DapoError, ValueError):
    """A key, value or combination in the configuration is not allowed."""


class NotReady(ConfigError):
    """Several things are missing for a run, one sentence each."""

    def __init__(self, sentences: Sequence[str]) -> None:
        super().__init__("; ".join(sentences))
        self.sentences = [mask_secrets(sentence) for sentence in sentences]


class DataError(DapoError, ValueError):
    """A dataset file or row cannot be used."""


class ModelError(DapoError, ValueError):
    """A model cannot be loaded, or does a computation that dapo does not support."""


class RewardError(DapoError, ValueError):
    """A reward function cannot be loaded, or could not judge any response."""


class EpisodeError(DapoError, ValueError):
    """An environment cannot be loaded, or cannot begin an episode."""


class PartError(DapoError, ValueError):
    """A user's function that replaces a part of the algorithm cannot be loaded, raised, or returned a wrong value."""


class CheckpointError(DapoError, ValueError):
    """A run directory or checkpoint cannot be read, or belongs to another run."""


class RunExists(CheckpointError):
    """A new run's folder already holds a run, or another process is training there."""


# The errno values that become a StorageError.
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class StorageError(DapoError, RuntimeError):
    """A write failed because a disk is full or broken. Earlier checkpoints are intact, and the run can resume."""

    exit_code = 3


class TrainingStopped(DapoError, RuntimeError):
    """A guard stopped the run, because continuing would not make sense."""

    exit_code = 3


class NothingToLearn(TrainingStopped):
    """Several batches in a row were empty, although the reward judged the responses."""


class ClusterError(DapoError, RuntimeError):
    """The cluster cannot be joined, or has too few resources for the configuration."""


class LearnerLost(ClusterError):
    """A learner process died and its weights are lost. The run restarts from its newest checkpoint."""


class ClusterLost(TrainingStopped):
    """Parts of the cluster are gone and will not be replaced. The run saves a checkpoint and stops."""


class EngineError(DapoError, RuntimeError):
    """The inference engine could not be started, has exited, or does not respond."""

    exit_code = 3
