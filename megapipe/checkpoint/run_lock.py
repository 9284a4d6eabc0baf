"""A lock that allows one job at a time in a run folder.

Two jobs in one folder would delete each other's half-written checkpoints and mix their logs. The
first process of a job owns ``.lock.1`` in the folder (:mod:`megapipe.util.heartbeat`). Another job
is refused as long as that process lives. If the process was killed, the other job takes over the
lock: at once on the same machine, else after 90 s without a heartbeat.
"""

from __future__ import annotations

import secrets
import shutil
import time
from contextlib import ExitStack
from pathlib import Path

from megapipe.errors import CheckpointError, ConfigError, LaunchError
from megapipe.util import heartbeat

LOCK, OWNER = "lock", "owner"


class RunLock:
    """The right of this process's job to write into the run folder `folder`.

    Raises ConfigError if another job has the lock, OSError if the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.taken_over: heartbeat.Owner | None = None
        """The previous owner of the lock, if that process was killed."""
        self._resources = ExitStack()
        own = self._take()
        self.nonce = f"{own.name}/{secrets.token_hex(8)}"
        """Path, relative to the run folder, of a file whose name only this job's processes know."""
        self._resources.callback(self._remove, own)
        try:
            (folder / self.nonce).touch()
            self._resources.enter_context(heartbeat.beating(own / OWNER, proof=folder / self.nonce))
        except OSError:
            shutil.rmtree(own, ignore_errors=True)
            raise
        for _, path in heartbeat.attempts(folder / LOCK):
            if path != own:
                shutil.rmtree(path, ignore_errors=True)

    def _take(self) -> Path:
        """Make the folder that gives this process the lock, and return its path."""
        watch, reported = heartbeat.OwnerWatch(), False
        while True:
            number, newest = max(heartbeat.attempts(self.folder / LOCK), default=(0, None))
            if newest is not None and (state := watch.look(newest / OWNER)) != "gone":
                owner = watch.owner
                if owner is not None and (owner.is_here or state == "alive"):
                    raise self._refusal(owner)
                if owner is not None and not reported:
                    heartbeat.print_notice(
                        f"checking whether {owner}, which had locked {self.folder}, is alive"
                    )
                    reported = True
                watch.pause()
                continue
            own = self.folder / f".{LOCK}.{number + 1}"
            try:
                own.mkdir()
            except FileExistsError:  # another job was first
                continue
            if newest is not None and heartbeat.read(newest / OWNER) != watch.owner:
                own.rmdir()  # another job came, ended, and gave its number to a third
                continue
            self.taken_over = watch.owner
            return own

    def _refusal(self, owner: heartbeat.Owner) -> ConfigError:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(owner.since))
        return ConfigError(
            f"run.folder: {self.folder} is in use by {owner} since {since}: end that job first, or "
            "choose another run.name"
        )

    def check(self) -> None:
        """Raise LaunchError if another job has taken over the lock, as after a long suspension, and
        CheckpointError if the run folder no longer exists."""
        try:
            if (self.folder / self.nonce).exists():
                return
            others = [path for _, path in sorted(heartbeat.attempts(self.folder / LOCK))]
        except OSError as error:
            raise CheckpointError(
                f"run.folder: {self.folder} cannot be read any more: {error.strerror}; this "
                "job writes nothing more"
            ) from None
        if not others:
            raise CheckpointError(
                f"run.folder: {self.folder} or its lock was removed; this job writes nothing more"
            )
        owner = heartbeat.read(others[-1] / OWNER)
        raise LaunchError(
            f"run.folder: {self.folder} was taken over by {owner or 'another job'} because "
            "this job sent no heartbeat; this job writes nothing more"
        )

    def _remove(self, own: Path) -> None:
        if (self.folder / self.nonce).exists():  # else another job owns it by now
            shutil.rmtree(own, ignore_errors=True)

    def release(self) -> None:
        """Give up the lock, so that other jobs can start; a second call does nothing."""
        self._resources.close()
