"""Look-up of checkpoints: at a path, the newest of a run, and the newest of all runs."""

from collections.abc import Iterable
from pathlib import Path

from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.names import MANIFEST
from megapipe.checkpoint.reader import Checkpoint, NewestCheckpoint, find_newest
from megapipe.checkpoint.storage import StorageLocation, at
from megapipe.errors import CheckpointError, StorageError
from megapipe.util.paths import LATEST, is_folder

OF_A_RUN = "checkpoints"
"""Name of the subfolder of a run folder that holds the checkpoints. On object storage a run has no
such subfolder: there the run's folder holds only checkpoints."""


def find_checkpoint(path: StorageLocation, *, verify: bool = True) -> Checkpoint:
    """Return the checkpoint at `path`, or the newest intact one if `path` is a run folder or a
    folder of checkpoints.

    Without `verify` no file is hashed: damage inside a file is found when the file is read.
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
        raise CheckpointError(f"{path} is neither a checkpoint nor a run folder: {what}")
    return Checkpoint.open(found.path)


def find_intact(root: StorageLocation, *, skip: Iterable[StorageLocation] = ()) -> NewestCheckpoint:
    """Find the newest checkpoint in `root` that opens and whose bytes match their checksums.

    Raises StorageError if a newer checkpoint cannot be read.
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
    """Return the checkpoint folder of the run in `runs` whose newest checkpoint was written last;
    None if no run has a checkpoint.

    A run's newest checkpoint is the one with the highest step that has a manifest; the time of the
    manifest file says when it was written.
    """
    found: list[tuple[float, StorageLocation]] = []
    for root in _roots(runs):
        manifests = (root / key.name / MANIFEST for key in committed(root))
        newest = next((manifest for manifest in manifests if at(manifest).exists()), None)
        if newest is not None:
            found.append((at(newest).modified() or 0.0, root))
    return max(found)[1] if found else None


def _roots(runs: StorageLocation) -> list[StorageLocation]:
    """Return the checkpoint folder of each run in `runs`."""
    if not isinstance(runs, Path):
        return [runs / name for name in at(runs).names()]
    folders = [runs / name for name in at(runs).names()] if is_folder(runs) else []
    folders = [f for f in folders if not (f.name == LATEST and f.is_symlink())]  # a link to another
    return [folder / OF_A_RUN for folder in folders if is_folder(folder / OF_A_RUN)]
