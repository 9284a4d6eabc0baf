"""Checkpoints by the names that people have for them: a folder, a run, the latest of all runs."""

from collections.abc import Iterable
from pathlib import Path

from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.names import MANIFEST
from megapipe.checkpoint.reader import Checkpoint, NewestCheckpoint, find_newest
from megapipe.checkpoint.storage import StorageLocation, at
from megapipe.errors import CheckpointError, StorageError
from megapipe.util.paths import LATEST, is_folder

OF_A_RUN = "checkpoints"
"""The folder in a run's that has its checkpoints; on object storage a run has nothing else."""


def find_checkpoint(path: StorageLocation, *, verify: bool = True) -> Checkpoint:
    """The checkpoint at `path`: its folder, or that of a run or of its checkpoints, whose newest
    intact one is taken.

    Without `verify` no file is hashed: what is damaged inside is found when it is read.
    """
    if at(path / MANIFEST).exists():
        checkpoint = Checkpoint.open(path)
        if verify:
            checkpoint.verify()
        return checkpoint
    inside = isinstance(path, Path) and is_folder(path / OF_A_RUN)
    root = path / OF_A_RUN if inside else path
    found = find_intact(root) if verify else find_newest(root)
    if found.path is None:
        what = "all its checkpoints are damaged" if found.skipped else "it has no checkpoint"
        raise CheckpointError(f"{path}: neither a checkpoint nor a run folder: {what}")
    return Checkpoint.open(found.path)


def find_intact(root: StorageLocation, *, skip: Iterable[StorageLocation] = ()) -> NewestCheckpoint:
    """Find the newest checkpoint in `root` that opens, and whose every byte is what was written.

    Raises StorageError where a newer one cannot be read.
    """
    passed, damaged = set(skip), list[str]()
    while True:
        found = find_newest(root, skip=passed)
        if found.path is None:
            return NewestCheckpoint(None, [*found.skipped, *damaged])
        try:
            Checkpoint.open(found.path).verify()
            return NewestCheckpoint(found.path, [*found.skipped, *damaged])
        except StorageError:
            raise
        except CheckpointError as error:
            damaged.append(str(error))
            passed.add(found.path)


def latest_run(runs: StorageLocation) -> StorageLocation | None:
    """The folder of the checkpoints of that run in `runs` whose newest one, by step, was written
    last, by the time of its manifest; None if no run there has a checkpoint.

    Checkpoints that have lost theirs do not count.
    """
    found: list[tuple[float, StorageLocation]] = []
    for root in _roots(runs):
        manifests = (root / key.name / MANIFEST for key in committed(root))
        newest = next((manifest for manifest in manifests if at(manifest).exists()), None)
        if newest is not None:
            found.append((at(newest).modified() or 0.0, root))
    return max(found)[1] if found else None


def _roots(runs: StorageLocation) -> list[StorageLocation]:
    """The folders that have checkpoints, of all runs."""
    if not isinstance(runs, Path):
        return [runs / name for name in at(runs).names()]
    folders = [runs / name for name in at(runs).names()] if is_folder(runs) else []
    folders = [f for f in folders if not (f.name == LATEST and f.is_symlink())]  # to another
    return [folder / OF_A_RUN for folder in folders if is_folder(folder / OF_A_RUN)]
