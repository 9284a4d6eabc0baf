"""The folder of a run: taken before anything takes time; what runs is written there later."""

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
from megapipe.checkpoint.objects import RemotePath
from megapipe.checkpoint.retention import clear_leftovers
from megapipe.checkpoint.run_lock import RunLock
from megapipe.checkpoint.storage import StorageLocation, place_of
from megapipe.cli import dump, flatten
from megapipe.config.config import Config
from megapipe.distributed.agreement import raise_on_all
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import ConfigError, MegapipeError, not_written
from megapipe.observe.observer import Observer, build_sinks
from megapipe.observe.provenance import provenance, start_mark
from megapipe.util import heartbeat
from megapipe.util.beneath import write_no_symlinks
from megapipe.util.paths import LATEST
from megapipe.words import count_noun

HIDDEN_S = 60.0
"""Seconds for which NFS may hide a new file from another node."""
PATIENCE = datetime.timedelta(seconds=10 * heartbeat.STALE_S)
"""How long ranks wait for rank 0 to get the folder: it may have to watch a killed job for a
heartbeat."""

OF_A_START = ("log.jsonl", "provenance.json", "config.yaml")
"""Files that a run which begins writes; the last one counts starts, and is the last set aside."""
FILES = (*OF_A_START, "summary.json", f"{OF_A_RUN}/latest")
"""Files that a run writes at its start, in the middle, or at its end."""


@dataclass
class RunFolder:
    """The folder of a run, which no other job has until :meth:`release`."""

    path: Path
    lock: RunLock | None = None
    """On rank 0."""
    notes: list[str] = field(default_factory=list)
    """Lines on what an earlier start had left."""
    elsewhere: StorageLocation | None = None
    """The folder of the run's checkpoints; None: in this one."""

    @property
    def checkpoints(self) -> StorageLocation:
        return self.elsewhere or self.path / OF_A_RUN

    def check(self, mesh: ParallelMesh) -> None:
        """Raise LaunchError on all ranks where another job has taken over, CheckpointError where
        the folder is gone."""
        error = None
        try:
            self.own()
        except MegapipeError as problem:
            error = problem
        raise_on_all(mesh, error)

    def own(self) -> None:
        """Raise as :meth:`check` on the rank that has the lock."""
        if self.lock is not None:
            self.lock.check()

    def release(self) -> None:
        """Let other jobs have it."""
        if self.lock is not None:
            self.lock.release()


def runs_elsewhere(config: Config) -> StorageLocation | None:
    """The folder on object storage that has a folder of checkpoints for each run, if there is one.

    Raises ConfigError or CheckpointError for a URL that cannot be used.
    """
    url = config.checkpoint.folder
    if url is None:
        return None
    return place_of(url, what="checkpoint.folder", patience_s=patience_s(config))


def own_checkpoints(config: Config) -> StorageLocation:
    """Where the checkpoints of the run are, or will be. Raises as :func:`runs_elsewhere`."""
    runs, name = runs_elsewhere(config), config.run.name
    return Path(config.run.folder) / name / OF_A_RUN if runs is None else runs / name


def patience_s(config: Config) -> float:
    """Seconds in which a request to a store is repeated: so few that a save or a load fails by an
    error of its own before the other ranks give up the one that waits."""
    return config.parallel.timeout_s / 3


def claim_run_folder(
    path: Path, mesh: ParallelMesh, *, local_rank: int, checkpoints: StorageLocation | None = None
) -> RunFolder:
    """Make the folder, if it is not there, and keep other jobs out of it.

    Leftovers of killed saves are removed, and a store for `checkpoints` has to take an object. The
    first process of each node looks whether it sees what rank 0 has written. Raises
    :class:`ConfigError` or CheckpointError on all ranks, ConfigError too where another job has the
    folder.
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
        _refuse_what_is_in_the_way(path)
        folder.lock = RunLock(path)
        if folder.lock.taken_over is not None:
            folder.notes.append(f"took over {path} from {folder.lock.taken_over}, which is gone")
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
    """Have the link beside the runs lead to this one, where the file system has links."""
    link, new = path.with_name(LATEST), path.with_name(f".{LATEST}-{os.getpid()}")
    with contextlib.suppress(OSError):
        if link.is_symlink() or not link.exists():
            new.symlink_to(path.name)
            new.replace(link)


def _refuse_what_is_in_the_way(folder: Path) -> None:
    """Raise :class:`ConfigError` for a link in the folder, by which writes would leave it, and for
    a folder where a file of the run should be, or the other way round."""
    checkpoints = folder / OF_A_RUN
    inside = os.scandir(checkpoints) if checkpoints.is_dir() else ()
    for entry in itertools.chain(os.scandir(folder), inside):
        if entry.is_symlink():
            raise ConfigError(
                f"run.folder: {entry.path} is a symbolic link, which a run does not write through: "
                "remove it, or have run.folder lie where it leads"
            )
    if checkpoints.exists() and not checkpoints.is_dir():
        raise ConfigError(f"run.folder: {checkpoints} is a file: expected a folder or nothing")
    for path in (folder / name for name in FILES):
        if path.is_dir():
            raise ConfigError(f"run.folder: {path} is a folder: expected a file or nothing")


def _sees(folder: Path, name: str) -> bool:
    """Whether there is a file of that name, which another node has made, in the folder."""
    deadline = time.monotonic() + HIDDEN_S
    while True:
        try:
            os.listdir(folder)  # which has a network file system ask for news
            if (folder / name).exists():
                return True
        except OSError:
            _set_aside(folder)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)


def open_reports(folder: Path, config: Config, resumed_at: int | None) -> Observer:
    """Write configuration, versions and git state; returns the observer for the run's records.

    `resumed_at` is the step of the run's own checkpoint from which it goes on, if it does: then the
    files of earlier starts stay, and the log goes on. To be called on rank 0. Raises
    :class:`ConfigError`, or StorageError where the disk is full.
    """
    mark = "" if resumed_at is None else start_mark(folder, resumed_at)
    try:
        if resumed_at is None:
            _set_aside(folder)
        write_no_symlinks(folder, f"config{mark}.yaml", dump(config))
        origin = provenance(Path(__file__).resolve().parents[2])
        text = json.dumps(origin, indent=2) + "\n"
        write_no_symlinks(folder, f"provenance{mark}.json", text)
    except OSError as error:
        raise not_written(f"run.folder: cannot write to {folder}", error) from None
    return build_sinks(config, folder, flatten(config))


def _set_aside(folder: Path) -> None:
    """Give the files of a start that a later one cannot go on from names of their own."""
    mark = start_mark(folder, 0)
    for path in (folder / name for name in OF_A_START):
        if path.is_file() and not path.is_symlink():
            path.rename(path.with_stem(path.stem + mark))
