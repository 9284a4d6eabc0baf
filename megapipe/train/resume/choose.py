"""Choice of the checkpoint that a run starts from, equal on all ranks."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from megapipe.checkpoint.failed import FailedCheckpoints
from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.names import CheckpointName
from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.storage import StorageLocation, at
from megapipe.cli import flatten
from megapipe.config.checkpoint import CheckpointConfig
from megapipe.config.config import Config
from megapipe.distributed.agreement import raise_on_all
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import CheckpointError, ConfigError, MegapipeError
from megapipe.train.resume.find import (
    Newest,
    newest_intact,
    newest_of,
    open_hugging_face,
    placed,
    verified,
)
from megapipe.train.resume.memory_checkpoints import MemoryCheckpoints, run_of
from megapipe.train.start_point import StartPoint, folder_to_load, of_load


def choose_start_point(
    config: Config,
    checkpoints: StorageLocation,
    mesh: ParallelMesh,
    *,
    before: int | None = None,
    memory: MemoryCheckpoints | None = None,
) -> StartPoint:
    """Choose the newest intact checkpoint in `checkpoints`, or a newer in-memory one in `memory`.
    If there is none, choose ``checkpoint.load`` or else a weights-only checkpoint in `checkpoints`.

    Damaged checkpoints are skipped if another one is intact; ``checkpoint.load`` must be intact.
    After a restart, rank 0 passes `before`, the launcher's request. If it is not 0, checkpoints of
    `before` or more steps are skipped from now on, unless there is no other checkpoint. In-memory
    checkpoints newer than the chosen checkpoint are removed. Raises :class:`CheckpointError` or
    :class:`ConfigError` on every rank if the result is not allowed by ``run.resume``.
    """
    before = json.loads(mesh.share(json.dumps(before)))
    if config.run.resume == "never" and before is None:
        own = newest_intact(checkpoints, mesh)
        if (checkpoint := own.checkpoint or own.weights) is not None:
            raise ConfigError(
                f"{checkpoints.parent} already has the checkpoint {checkpoint.path.name}, and "
                "run.resume is never; choose another run.name"
            )
    failed = _failed(checkpoints, before or 0, mesh)
    copies = None if memory is None else _Copies(memory, run_of(flatten(config)), before or None)
    found = _newest_of_all(checkpoints, mesh, failed.paths, copies)
    if found.checkpoint is not None:
        found.skipped.extend(
            f"{path}: starts from it, or from before it, failed"
            for path in failed.paths
            if at(path).is_checkpoint()
        )
    elif failed.names or before:
        copies = None if copies is None else copies._replace(below=None)
        ruined = [checkpoints / name for name in failed.not_finite()]
        found = _newest_of_all(checkpoints, mesh, ruined, copies)
        if found.checkpoint is None and ruined:
            found = _newest_of_all(checkpoints, mesh, [], copies)
    if memory is not None:
        memory.forget(-1 if found.checkpoint is None else found.checkpoint.step)
    if found.checkpoint is not None:
        return StartPoint(
            found.checkpoint,
            is_own=True,
            skipped=found.skipped,
            failed=failed,
            in_memory=memory is not None and memory.has(found.checkpoint),
        )
    never, must = (config.run.resume == word for word in ("never", "must"))
    if must or (found.damaged and not never):
        where = "" if found.damaged else "run.resume=must: "
        reasons = f": {'; '.join(found.skipped)}" if found.skipped else ""
        advice = "to start over set run.resume=never, or another run.name"
        raise CheckpointError(
            f"{where}{checkpoints}: no checkpoint to resume from{reasons}; "
            + (advice if reasons else "expected one, or auto")
        )
    source = StartPoint(skipped=found.skipped)
    if config.checkpoint.load is not None:
        try:
            _begin_from(config, source, mesh)
        except (CheckpointError, ConfigError) as error:
            raise of_load(error) from None
    else:
        source.weights = found.weights
    return source


class _Copies(NamedTuple):
    """In-memory checkpoints of one run to choose from; with `below`, only those of fewer steps."""

    memory: MemoryCheckpoints
    run: str
    below: int | None

    def newest(self, above: int, skipped: list[str]) -> Checkpoint | None:
        """Return the newest checkpoint of more than `above` steps; add problems to `skipped`."""
        checkpoint, reasons = self.memory.newest(self.run, above, self.below)
        skipped += [reason for reason in reasons if reason not in skipped]
        return checkpoint


def _newest_of_all(
    folder: StorageLocation,
    mesh: ParallelMesh,
    failed: Collection[StorageLocation],
    copies: _Copies | None,
) -> Newest:
    """Return the newest intact checkpoint in `folder`, or a newer in-memory one. Files in `folder`
    are not read if their names show that the in-memory checkpoint is newer."""
    skipped: list[str] = []
    if copies is not None:
        path = newest_of(folder, {*failed}, [], mesh)
        key = None if path is None else CheckpointName.parsed(path.name)
        copy = copies.newest(-1 if key is None else key.step, skipped)
        if copy is not None:
            return Newest(copy, skipped, False)
    found = newest_intact(folder, mesh, failed)
    found.skipped.extend(skipped)
    if copies is not None and (found.damaged or found.weights is not None):
        above = -1 if found.checkpoint is None else found.checkpoint.step
        copy = copies.newest(above, found.skipped)
        return found if copy is None else found._replace(checkpoint=copy)
    return found


def _begin_from(config: Config, source: StartPoint, mesh: ParallelMesh) -> None:
    """Set the start point `source` from ``checkpoint.load``. Rank 0 looks up the folder."""
    text, error = "", None
    if mesh.rank == 0:
        try:
            text = " ".join(map(str, folder_to_load(config)))
        except MegapipeError as raised:
            error = raised
    raise_on_all(mesh, error)
    kind, _, name = mesh.share(text).partition(" ")
    if kind == "hugging_face":
        source.take(open_hugging_face(Path(name), mesh), config)
    else:
        source.take(_intact(kind, placed(name, config, mesh), config, source, mesh), config)


def _intact(
    kind: str, path: StorageLocation, config: Config, source: StartPoint, mesh: ParallelMesh
) -> Checkpoint:
    """Return the intact checkpoint at `path`, or the newest intact one of the run at `path`.
    Reasons for skipping other checkpoints are added to `source`."""
    if kind == "checkpoint":
        checkpoint, problem = verified(path, mesh)
        if checkpoint is None:
            raise CheckpointError(problem)
        return checkpoint
    found = newest_intact(path, mesh)
    source.skipped += found.skipped
    checkpoint = found.checkpoint or found.weights
    if config.checkpoint.load_only == "weights":
        checkpoint = found.weights or found.checkpoint
    if checkpoint is None:
        raise CheckpointError(f"{path}: no checkpoint is intact: {'; '.join(found.skipped)}")
    return checkpoint


def find_weights(name: str, mesh: ParallelMesh) -> StartPoint:
    """Find the weights that `name` stands for, as in ``checkpoint.load``.

    Raises :class:`CheckpointError` or :class:`ConfigError` on every rank, also for damaged weights.
    """
    source = StartPoint()
    _begin_from(Config(checkpoint=CheckpointConfig(load=name, load_only="weights")), source, mesh)
    return source


def _failed(folder: StorageLocation, before: int, mesh: ParallelMesh) -> FailedCheckpoints:
    """Return the checkpoints that are marked as failed. First, rank 0 marks those of `before` or
    more steps, unless `before` is 0."""
    failed, error = FailedCheckpoints(folder), None
    if mesh.rank == 0:
        try:
            failed = FailedCheckpoints.read(folder)
            for key in committed(folder):
                if before and key.step >= before:
                    failed.add(key.name)
        except CheckpointError as problem:
            error = problem
    raise_on_all(mesh, error)
    return FailedCheckpoints(folder, json.loads(mesh.share(json.dumps(failed.names))))
