"""The folder of a run: made before anything takes time; what runs is written there later."""

from __future__ import annotations

import json
from pathlib import Path

from megapipe.cli import dump, flatten
from megapipe.config import Config
from megapipe.distributed.agreement import all_or_none
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import ConfigError
from megapipe.observe.observer import Observer, build_sinks
from megapipe.observe.provenance import provenance, start_mark


def make(folder: Path, mesh: ParallelMesh) -> None:
    """Make the folder on rank 0. Raises :class:`ConfigError` on all ranks."""
    error = None
    if mesh.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            error = ConfigError(f"run.folder: cannot make {folder}: {problem.strerror}")
    all_or_none(mesh, error)


def open_reports(folder: Path, config: Config, resumed_at: int | None) -> Observer:
    """Write configuration, versions and git state; returns the observer for the run's records.

    `resumed_at` is the step of the run's own checkpoint from which it goes on, if it does: then the
    files of earlier starts stay. To be called on rank 0. Raises :class:`ConfigError`.
    """
    mark = "" if resumed_at is None else start_mark(folder, resumed_at)
    try:
        (folder / f"config{mark}.yaml").write_text(dump(config))
        origin = provenance(Path(__file__).resolve().parents[2])
        text = json.dumps(origin, indent=2) + "\n"
        (folder / f"provenance{mark}.json").write_text(text)
    except OSError as error:
        raise ConfigError(f"run.folder: cannot write to {folder}: {error.strerror}") from None
    return build_sinks(config, folder, flatten(config))
