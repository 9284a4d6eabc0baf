"""Checkpoints by the names that people have for them: a folder, a run, the latest of all runs."""

from pathlib import Path

from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.names import MANIFEST
from megapipe.checkpoint.reader import Checkpoint, find_newest
from megapipe.errors import CheckpointError
from megapipe.paths import exists

OF_A_RUN = "checkpoints"
"""The folder in a run's that has its checkpoints."""


def find_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """The checkpoint at `path`: its folder, or a run folder, whose newest intact one is taken.

    Without `verify` no file is hashed: what is damaged inside is found when it is read.
    """
    if exists(path / MANIFEST):
        checkpoint = Checkpoint.open(path)
        if verify:
            checkpoint.verify()
        return checkpoint
    damaged: set[Path] = set()
    while True:
        found = find_newest(path / OF_A_RUN, skip=damaged).path
        if found is None:
            what = "all its checkpoints are damaged" if damaged else "it has no checkpoint"
            raise CheckpointError(f"{path}: neither a checkpoint nor a run folder: {what}")
        checkpoint = Checkpoint.open(found)
        try:
            if verify:
                checkpoint.verify()
            return checkpoint
        except CheckpointError:
            damaged.add(found)


def latest_run(runs: Path) -> Path | None:
    """The run in the folder `runs` whose newest checkpoint, by step, was written last, by the
    time of its manifest; None if no run there has a checkpoint.

    Checkpoints that have lost theirs do not count.
    """
    found: list[tuple[float, Path]] = []
    for folder in sorted(runs.iterdir()) if runs.is_dir() else ():
        root = folder / OF_A_RUN
        names = committed(root) if root.is_dir() else []
        manifests = (root / key.name / MANIFEST for key in names)
        newest = next((manifest for manifest in manifests if manifest.is_file()), None)
        if newest is not None:
            found.append((newest.stat().st_mtime, folder))
    return max(found, default=(0.0, None))[1]
