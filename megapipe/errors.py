"""Errors that a user can fix, each kind with an exit code.

A message is one line: what is wrong, where, and what is expected. ``train.py`` prints it once per
job and exits with the code. Any other exception that escapes is a bug and shows a traceback.

====  ====================================================================
code  meaning
====  ====================================================================
0     done
1     a bug: an unexpected exception, with its traceback; in a callback, one line
2     configuration or command line; a number of processes that does not fit the configuration,
      or a run folder that another job uses
3     data: corpus, token files, tokenizer
4     launch: rendezvous, a loopback interface that is down, no folder for temporary files, ranks
      that disagree, a lost peer, a run folder that another job has taken over
5     checkpoint: missing, damaged, or of another model
6     numerics: loss or gradient is not finite
7     memory of a device or of the host is used up
8     a launcher has used up its restarts, and the job made no progress
9     a device fault: replicas of a value differ, or a step gives another result each time
10    --dry-run: the plan needs more memory than the device has, less a margin
75    stopped by a signal or a callback, and saved as far as time allowed: the next start resumes
130   Ctrl-C before there was anything to save, or a second Ctrl-C, on at least one rank;
      128 + n: ended by signal n
====  ====================================================================
"""

import errno

from megapipe.text import without_secrets


class MegapipeError(Exception):
    """Base class of errors that a user can cause and fix. Secrets of URLs are removed from the
    text."""

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
    """The processes of a job cannot start, disagree with each other, or have lost contact."""

    exit_code = 4


class CheckpointError(MegapipeError):
    """A checkpoint is missing, damaged, or belongs to another model."""

    exit_code = 5


class StorageError(CheckpointError):
    """A disk or object store is full, fails or does not answer; a checkpoint may be intact."""


class NumericError(MegapipeError):
    """A loss or a gradient is not finite."""

    exit_code = 6


class OutOfMemory(MegapipeError):
    """A device or the host has no memory left."""

    exit_code = 7


class DeviceFault(MegapipeError):
    """A device has computed or stored a value wrongly: values that must be equal differ."""

    exit_code = 9


class DoesNotFit(MegapipeError):
    """A plan needs more memory than the device has, less a margin."""

    exit_code = 10


class TooManyRestarts(MegapipeError):
    """A job has failed after each of its allowed restarts, without progress."""

    exit_code = 8


class CallbackError(MegapipeError):
    """A user-defined callback has raised an exception, or has made a request too late."""


class Preempted(MegapipeError):
    """A signal or a callback asked the job to stop; what could be saved is saved."""

    exit_code = 75


class Interrupted(MegapipeError):
    """A rank was interrupted with nothing to save, or a second time."""

    exit_code = 130


def not_written(what: str, error: OSError) -> MegapipeError:
    """Return the error for a folder that a run cannot write to. `what`: the folder and its key, as
    the message names them. The error is a StorageError if the disk is full or fails, otherwise a
    ConfigError, as the user has to choose another folder."""
    fails = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
    kind = StorageError if fails else ConfigError
    return kind(f"{what}: {error.strerror}")
