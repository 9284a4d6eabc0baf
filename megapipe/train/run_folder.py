"""The folder of a run: claimed before slow work begins; the run's files are written later."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from megapipe.checkpoint.find import OF_A_RUN
from megapipe.checkpoint.object_storage import RemotePath
from megapipe.checkpoint.retention import clear_leftovers
from megapipe.checkpoint.run_lock import RunLock
from megapipe.checkpoint.storage import StorageLocation, location_of
from megapipe.cli import dump, flatten
from megapipe.config.config import Config
from megapipe.distributed.agreement import raise_on_all
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import ConfigError, MegapipeError, not_written
from megapipe.observe.observer import Observer, build_sinks
from megapipe.observe.provenance import provenance, start_suffix
from megapipe.text import count_noun
from megapipe.util import heartbeat
from megapipe.util.no_symlinks import write_no_symlinks
from megapipe.util.paths import LATEST

HIDDEN_S = 60.0
"""Seconds to wait for a file from another node; NFS may hide a new file for that long."""
PATIENCE = datetime.timedelta(seconds=10 * heartbeat.STALE_S)
"""Longest time that ranks wait until rank 0 has claimed the folder: rank 0 may have to wait for a
killed job's heartbeat to become stale."""

OF_A_START = ("log.jsonl", "provenance.json", "config.yaml")
"""Files that a new run writes. They are set aside in this order: the suffix counts config files."""
FILES = (*OF_A_START, "summary.json", f"{OF_A_RUN}/latest")
"""Files that a run writes at its start, in the middle, or at its end."""


@dataclass
class RunFolder:
    """The folder of a run, which no other job can claim until :meth:`release`."""

    path: Path
    lock: RunLock | None = None
    """Lock of the folder, on rank 0."""
    notes: list[str] = field(default_factory=list)
    """Lines to print about the leftovers of earlier starts."""
    elsewhere: StorageLocation | None = None
    """Folder of the run's checkpoints; None: inside the run folder."""

    @property
    def checkpoints(self) -> StorageLocation:
        return self.elsewhere or self.path / OF_A_RUN

    def check(self, mesh: ParallelMesh) -> None:
        """Raise LaunchError on all ranks if another job has taken over the folder, CheckpointError
        if the folder is gone."""
        error = None
        try:
            self.own()
        except MegapipeError as problem:
            error = problem
        raise_on_all(mesh, error)

    def own(self) -> None:
        """Raise, on the rank with the lock, if another job has the folder, or it is gone."""
        if self.lock is not None:
            self.lock.check()

    def release(self) -> None:
        """Allow other jobs to claim the folder."""
        if self.lock is not None:
            self.lock.release()


def runs_elsewhere(config: Config) -> StorageLocation | None:
    """Return the folder at ``checkpoint.url``, which has a folder per run; None if it is not set.

    Raises ConfigError or CheckpointError for a URL that cannot be used.
    """
    url = config.checkpoint.url
    if url is None:
        return None
    return location_of(url, what="checkpoint.url", patience_s=patience_s(config))


def own_checkpoints(config: Config) -> StorageLocation:
    """Return the folder where the run saves checkpoints. Raises as :func:`runs_elsewhere` does."""
    runs, name = runs_elsewhere(config), config.run.name
    return Path(config.run.folder) / name / OF_A_RUN if runs is None else runs / name


def patience_s(config: Config) -> float:
    """Return the seconds for which a request to an object store is repeated: so few that a save or
    load fails with its own error before the other ranks give up."""
    return config.parallel.timeout_s / 3


def claim_run_folder(
    path: Path, mesh: ParallelMesh, *, local_rank: int, checkpoints: StorageLocation | None = None
) -> RunFolder:
    """Make the run folder if necessary, and keep other jobs out of it.

    Removes leftovers of killed saves; checks that an object store accepts an object, and that the
    first process of each node sees what rank 0 has written. Raises on all ranks:
    :class:`ConfigError`, also if another job has the folder, or CheckpointError.
    """
    folder, error = RunFolder(path, elsewhere=checkpoints), None
    if mesh.rank == 0:
        try:
            _take(folder)
        except MegapipeError as problem:
            error = problem
    try:
        mesh.long_barrier(PATIENCE)
        raise_on_all(mesh, error)
        nonce = mesh.share(folder.lock.nonce if folder.lock else "")
        host = mesh.share(socket.gethostname())
        if local_rank == 0 and not _sees(path, nonce):
            error = ConfigError(
                f"run.folder: rank {mesh.rank} on {socket.gethostname()} does not see what rank 0 "
                f"on {host} has written to {path}: expected a folder that all nodes share"
            )
        mesh.long_barrier(PATIENCE)
        raise_on_all(mesh, error)
    except BaseException:
        folder.release()
        raise
    return folder


def _take(folder: RunFolder) -> None:
    path = folder.path
    try:
        path.mkdir(parents=True, exist_ok=True)
        _refuse_conflicts(path)
        folder.lock = RunLock(path)
        if folder.lock.taken_over is not None:
            folder.notes.append(f"took over {path} from {folder.lock.taken_over}, which has ended")
        if isinstance(folder.checkpoints, RemotePath):
            folder.checkpoints.probe()
        cleared = clear_leftovers(folder.checkpoints)
    except OSError as problem:
        folder.release()
        raise not_written(f"run.folder: cannot write to {path}", problem) from None
    except MegapipeError:
        folder.release()
        raise
    if cleared.removed:
        what = count_noun(len(cleared.removed), "unfinished checkpoint")
        folder.notes.append(f"removed {what} of killed jobs from {folder.checkpoints}")
    folder.notes.extend(cleared.problems)
    _link_latest(path)


def _link_latest(path: Path) -> None:
    """Point the link `latest`, beside the run folders, to this run, if links are supported."""
    link, new = path.with_name(LATEST), path.with_name(f".{LATEST}-{os.getpid()}")
    with contextlib.suppress(OSError):
        if link.is_symlink() or not link.exists():
            new.symlink_to(path.name)
            new.replace(link)


def _refuse_conflicts(folder: Path) -> None:
    """Raise :class:`ConfigError` if there is a symbolic link in the folder (writes would follow
    it), a folder in place of one of the run's files, or a file in place of a folder."""
    checkpoints = folder / OF_A_RUN
    inside = os.scandir(checkpoints) if checkpoints.is_dir() else ()
    for entry in itertools.chain(os.scandir(folder), inside):
        if entry.is_symlink():
            raise ConfigError(
                f"run.folder: {entry.path} is a symbolic link, through which a run does not "
                "write: remove it, or set run.folder to its target"
            )
    if checkpoints.exists() and not checkpoints.is_dir():
        raise ConfigError(f"run.folder: {checkpoints} is a file: expected a folder or nothing")
    for path in (folder / name for name in FILES):
        if path.is_dir():
            raise ConfigError(f"run.folder: {path} is a folder: expected a file or nothing")


def _sees(folder: Path, name: str) -> bool:
    """Whether this node sees the file `name` that another node has made in the folder."""
    deadline = time.monotonic() + HIDDEN_S
    while True:
        try:
            os.listdir(folder)  # makes a network file system refresh
            if (folder / name).exists():
                return True
        except OSError:
            _set_aside(folder)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)


def open_reports(folder: Path, config: Config, resumed_at: int | None) -> Observer:
    """Write configuration, versions and git state; return the observer for the run's records.

    `resumed_at` is the step of the run's own checkpoint from which the run resumes, else None. With
    it, the files of earlier starts stay, and the log is continued. Call this on rank 0. Raises
    :class:`ConfigError`, or StorageError if the disk is full.
    """
    suffix = "" if resumed_at is None else start_suffix(folder, resumed_at)
    try:
        if resumed_at is None:
            _set_aside(folder)
        write_no_symlinks(folder, f"config{suffix}.yaml", dump(config))
        origin = provenance(Path(__file__).resolve().parents[2])
        text = json.dumps(origin, indent=2) + "\n"
        write_no_symlinks(folder, f"provenance{suffix}.json", text)
    except OSError as error:
        raise not_written(f"run.folder: cannot write to {folder}", error) from None
    return build_sinks(config, folder, flatten(config))


def _set_aside(folder: Path) -> None:
    """Rename the files of an earlier start that this start cannot continue."""
    suffix = start_suffix(folder, 0)
    for path in (folder / name for name in OF_A_START):
        if path.is_file() and not path.is_symlink():
            path.rename(path.with_stem(path.stem + suffix))
