"""Errors that a user can mend, each kind with its process exit code.

A message is one line: what is wrong, where, and what would be right. ``train.py`` prints it
once per job and exits with the code; anything else that escapes is a bug and shows a traceback.

====  ====================================================================
code  meaning
====  ====================================================================
0     done
1     a bug: an unexpected exception, with its traceback; in a callback, one line
2     configuration or command line; a number of processes that does not fit it, or a run folder
      that another job has
3     data: corpus, token files, tokenizer
4     launch: rendezvous, a loopback interface that is down, no folder for temporary files, ranks
      that disagree, a lost peer, a run folder that another job has taken over
5     checkpoint: missing, damaged, or of another model
6     numerics: loss or gradient is not finite
7     memory of a device or of the host is used up
8     a launcher has started a job again as often as it may, and it came no further
9     a device is at fault: copies of a value differ, or a step comes out otherwise each time
75    stopped by a signal or a callback, and all is saved that there was and was time for; run
      again to go on
130   interrupted with nothing to save, or a second time, be it one rank alone (128 + n: by
      signal n)
====  ====================================================================
"""

import errno

from megapipe.words import without_secrets


class MegapipeError(Exception):
    """Base of every error that a user can cause and mend. Its text has no secrets of URLs."""

    exit_code = 1

    def __init__(self, text: str = "") -> None:
        super().__init__(without_secrets(text))


class ConfigError(MegapipeError):
    """A key, a value or a combination of values is wrong."""

    exit_code = 2


class ScheduleError(ConfigError):
    """A pipeline schedule is incomplete, out of order, or would deadlock."""


class DataError(MegapipeError):
    """A corpus, a token file or a tokenizer cannot be used."""

    exit_code = 3


class LaunchError(MegapipeError):
    """The processes of a job do not fit together."""

    exit_code = 4


class CheckpointError(MegapipeError):
    """A checkpoint is missing, damaged, or belongs to another model."""

    exit_code = 5


class StorageError(CheckpointError):
    """A disk or an object store does not answer a request for a checkpoint, which may be intact."""


class NumericError(MegapipeError):
    """A loss or a gradient is not finite."""

    exit_code = 6


class OutOfMemory(MegapipeError):
    """A device or the host has no memory left."""

    exit_code = 7


class DeviceFault(MegapipeError):
    """A device has computed or kept a value wrongly: what is to be equal differs."""

    exit_code = 9


class TooManyRestarts(MegapipeError):
    """A job fails whenever it is started again."""

    exit_code = 8


class CallbackError(MegapipeError):
    """A callback of the user's has raised an exception, or has made a request too late."""


class Preempted(MegapipeError):
    """A signal or a callback asked the job to stop; what there was to save is saved."""

    exit_code = 75


class Interrupted(MegapipeError):
    """A rank was interrupted with nothing to save, or a second time."""

    exit_code = 130


def not_written(what: str, error: OSError) -> MegapipeError:
    """Make the error of a folder that a run cannot write to: StorageError where its disk is full
    or fails, else ConfigError, as another folder has to be named. `what` says so with the key."""
    fails = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
    kind = StorageError if fails else ConfigError
    return kind(f"{what}: {error.strerror}")
