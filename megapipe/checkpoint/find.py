"""Checkpoints by the names that people have for them: a folder, a run, the latest of all runs."""

from pathlib import Path

from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.manifest import MANIFEST
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
    time of its manifest; None if no run there has a checkpoint."""
    found: list[tuple[float, Path]] = []
    for folder in sorted(runs.iterdir()) if runs.is_dir() else ():
        names = committed(folder / OF_A_RUN) if (folder / OF_A_RUN).is_dir() else []
        manifest = folder / OF_A_RUN / names[0].name / MANIFEST if names else None
        if manifest is not None and manifest.is_file():
            found.append((manifest.stat().st_mtime, folder))
    return max(found, default=(0.0, None))[1]
