"""Checkpoints by the names that people have for them: a folder, a run, the latest of all runs."""

from pathlib import Path

from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.names import MANIFEST
from megapipe.checkpoint.reader import Checkpoint, find_newest
from megapipe.checkpoint.storage import Place, at
from megapipe.errors import CheckpointError

OF_A_RUN = "checkpoints"
"""The folder in a run's that has its checkpoints; on object storage a run has nothing else."""


def find_checkpoint(path: Place, *, verify: bool = True) -> Checkpoint:
    """The checkpoint at `path`: its folder, or that of a run, whose newest intact one is taken.

    Without `verify` no file is hashed: what is damaged inside is found when it is read.
    """
    if at(path / MANIFEST).exists():
        checkpoint = Checkpoint.open(path)
        if verify:
            checkpoint.verify()
        return checkpoint
    root = path / OF_A_RUN if isinstance(path, Path) else path
    damaged: set[Place] = set()
    while True:
        found = find_newest(root, skip=damaged).path
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


def latest_run(runs: Place) -> Place | None:
    """The folder of the checkpoints of that run in `runs` whose newest one, by step, was written
    last, by the time of its manifest; None if no run there has a checkpoint.

    Checkpoints that have lost theirs do not count.
    """
    found: list[tuple[float, Place]] = []
    for root in _roots(runs):
        manifests = (root / key.name / MANIFEST for key in committed(root))
        newest = next((manifest for manifest in manifests if at(manifest).exists()), None)
        if newest is not None:
            found.append((at(newest).modified() or 0.0, root))
    return max(found)[1] if found else None


def _roots(runs: Place) -> list[Place]:
    """The folders that have checkpoints, of all runs."""
    if not isinstance(runs, Path):
        return [runs / name for name in at(runs).names()]
    folders = sorted(runs.iterdir()) if runs.is_dir() else []
    return [folder / OF_A_RUN for folder in folders if (folder / OF_A_RUN).is_dir()]
