"""Which checkpoint a run starts from, and loading it; all ranks take the same one."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megapipe.checkpoint.failed import FailedCheckpoints
from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.names import MANIFEST, Committed
from megapipe.checkpoint.reader import Checkpoint, Found, find_newest
from megapipe.checkpoint.storage import Place, at, place_of
from megapipe.checkpoint_config import CheckpointConfig
from megapipe.cli import flatten
from megapipe.config import Config
from megapipe.convert.folder import HuggingFaceFolder, read_model
from megapipe.distributed.agreement import all_or_none
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import CheckpointError, ConfigError, MegapipeError, StorageError
from megapipe.model.gpt.config import ModelConfig
from megapipe.train import checkpoint_io
from megapipe.train.checkpoint_io import Weights
from megapipe.train.coordinates import Coordinates
from megapipe.train.memory_copies import MemoryCopies, run_of
from megapipe.train.run_folder import patience_s
from megapipe.train.source import Source, folder_to_load, of_load
from megapipe.train.upcycle import without_source
from megapipe.urls import is_remote

_UNREAD = "it may be intact, so it is neither passed over nor removed"
"""The end of a sentence on a checkpoint that cannot be read."""

if TYPE_CHECKING:
    from megapipe.train.step import TrainStep


def choose(
    config: Config,
    checkpoints: Place,
    mesh: ParallelMesh,
    *,
    before: int | None = None,
    memory: MemoryCopies | None = None,
) -> Source:
    """The newest checkpoint in `checkpoints` that is intact, or a newer one in the `memory` of the
    nodes, else ``checkpoint.load``, else weights that are in `checkpoints` alone.

    Damaged ones are passed over if one is intact; ``checkpoint.load`` must be intact. Where a
    launcher has started the run again, rank 0 is given `before`: if not 0, checkpoints of so many
    steps or more are passed over from now on, as long as there is another. Copies in memory that
    are newer than what is chosen are removed. Raises :class:`CheckpointError` or
    :class:`ConfigError` on every rank, as ``run.resume`` demands.
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
            f"{path}: starts from it, or before it, have failed"
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
        return Source(
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
        advice = "to begin anew set run.resume=never, or another run.name"
        raise CheckpointError(
            f"{where}{checkpoints}: no checkpoint to resume from{reasons}; "
            + (advice if reasons else "expected one, or auto")
        )
    source = Source(skipped=found.skipped)
    if config.checkpoint.load is not None:
        try:
            _begin_from(config, source, mesh)
        except (CheckpointError, ConfigError) as error:
            raise of_load(error) from None
    else:
        source.weights = found.weights
    return source


class _Copies(NamedTuple):
    """Where to look for copies in memory: those of a run, of less than `below` steps if given."""

    memory: MemoryCopies
    run: str
    below: int | None

    def newest(self, above: int, skipped: list[str]) -> Checkpoint | None:
        """The newest of more than `above` steps; `skipped` gets what is wrong with others."""
        checkpoint, reasons = self.memory.newest(self.run, above, self.below)
        skipped += [reason for reason in reasons if reason not in skipped]
        return checkpoint


def _newest_of_all(
    folder: Place, mesh: ParallelMesh, failed: Collection[Place], copies: _Copies | None
) -> Newest:
    """:func:`newest_intact`, or a copy in memory that is newer; files in `folder` are not read
    where their names tell that it is."""
    skipped: list[str] = []
    if copies is not None:
        path = _newest(folder, {*failed}, [], mesh)
        key = None if path is None else Committed.parsed(path.name)
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


def _begin_from(config: Config, source: Source, mesh: ParallelMesh) -> None:
    """Set what ``checkpoint.load`` names, which rank 0 looks up, as the start of a run."""
    text, error = "", None
    if mesh.rank == 0:
        try:
            text = " ".join(map(str, folder_to_load(config)))
        except MegapipeError as raised:
            error = raised
    all_or_none(mesh, error)
    kind, _, name = mesh.share(text).partition(" ")
    if kind == "hugging_face":
        source.take(_opened(Path(name), mesh), config)
    else:
        source.take(_intact(kind, placed(name, config, mesh), config, source, mesh), config)


def _intact(
    kind: str, path: Place, config: Config, source: Source, mesh: ParallelMesh
) -> Checkpoint:
    """The checkpoint at `path`, or the newest of the run there; `source` is told what was passed
    over."""
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


def placed(name: Path | str, config: Config, mesh: ParallelMesh) -> Place:
    """The place of a path or a URL; raises on every rank where one lacks what a URL needs."""
    if isinstance(name, Path) or not is_remote(name):
        return Path(name)
    place, error = None, None
    try:
        place = place_of(name, what="URL", patience_s=patience_s(config))
    except MegapipeError as problem:
        error = problem
    all_or_none(mesh, error)
    assert place is not None
    return place


def find_weights(name: str, mesh: ParallelMesh) -> Source:
    """Find the weights that `name` stands for, as in ``checkpoint.load``; they must be intact.

    Raises :class:`CheckpointError` or :class:`ConfigError` on every rank.
    """
    source = Source()
    _begin_from(Config(checkpoint=CheckpointConfig(load=name, load_only="weights")), source, mesh)
    return source


def find(name: Path | str, config: Config, mesh: ParallelMesh) -> Checkpoint:
    """The checkpoint at a path or URL, or the newest of those in it; it must be intact.

    Raises :class:`CheckpointError` on every rank.
    """
    path = placed(name, config, mesh)
    is_one = mesh.share("yes" if at(path / MANIFEST).exists() else "no") == "yes"
    found = path if is_one else _newest(path, set(), [], mesh)
    if found is None:
        raise CheckpointError(f"{path}: neither a checkpoint nor a folder that has one")
    checkpoint, problem = verified(found, mesh)
    if checkpoint is None:
        raise CheckpointError(problem)
    return checkpoint


def load(
    checkpoint: Checkpoint,
    config: Config,
    step: TrainStep,
    mesh: ParallelMesh,
    memory: MemoryCopies | None = None,
) -> None:
    """Set weights and states to the checkpoint's, which may be a copy in `memory`. Raises on every
    rank if it does not fit."""
    error = None
    if memory is not None:
        step.maps.take_owners(Coordinates.of(checkpoint).owners)
        beside = *step.routing.names(), *step.maps.names()
        memory.bring(checkpoint, checkpoint_io.files_needed(step.optimizer, checkpoint, beside))
    try:
        model, states = step.layout.model, step.optimizer.rule.states
        shapes = model.weights()
        for name, shape in model.shapes(trained=True).items():
            shapes |= {f"optimizer.{state}/{name}": shape for state in states}
        checkpoint.match(shapes)
        step.take_over(checkpoint)
    except MegapipeError as problem:
        error = problem
    all_or_none(mesh, error)
    if memory is not None:
        memory.release()


def load_weights(weights: Weights, step: TrainStep, mesh: ParallelMesh) -> None:
    """Set the weights alone; adapters, where `weights` have none, begin afresh, and so do routers
    of experts that are copies. Raises on every rank if they do not fit."""
    error, model, run = None, step.layout.model, step.config
    fresh: Collection[str] = ()
    if run.lora.rank is not None and weights.config.get("lora.rank") is None:
        fresh = model.shapes(trained=True).keys()
    if run.checkpoint.upcycle:
        fresh = without_source(model.shapes())
    try:
        begun = {f"model/{name}" for name in fresh}
        weights.match({n: shape for n, shape in model.weights().items() if n not in begun})
        checkpoint_io.load_weights(step.optimizer, weights, fresh=fresh, seed=run.run.seed)
        step.routing.load(weights)
    except MegapipeError as problem:
        error = problem
    all_or_none(mesh, error)


class Newest(NamedTuple):
    """The newest checkpoint that is intact and has states, and those that are not."""

    checkpoint: Checkpoint | None
    skipped: list[str]
    """Why newer ones were passed over."""
    damaged: bool
    """Some on the disk are damaged."""
    weights: Checkpoint | None = None
    """The newest of weights alone that is intact, of those that are newer."""


def newest_intact(folder: Place, mesh: ParallelMesh, but: Collection[Place] = ()) -> Newest:
    """The newest checkpoint in `folder` that :func:`verified` finds nothing wrong with, of all
    `but` some, and one of weights alone that is newer. Raises :class:`CheckpointError` on every
    rank where one cannot be read."""
    skipped: list[str] = []
    passed = {*but}
    weights: Checkpoint | None = None
    while (path := _newest(folder, passed, skipped, mesh)) is not None:
        checkpoint, problem = verified(path, mesh)
        if checkpoint is None:
            skipped.append(problem)
        elif checkpoint.has_state:
            return Newest(checkpoint, skipped, bool(skipped), weights)
        else:
            weights = weights or checkpoint
        passed.add(path)
    return Newest(None, skipped, bool(skipped), weights)


def _failed(folder: Place, before: int, mesh: ParallelMesh) -> FailedCheckpoints:
    """Checkpoints that rank 0 finds marked, after it has marked those of `before` steps or more;
    0: none."""
    failed, error = FailedCheckpoints(folder), None
    if mesh.rank == 0:
        try:
            failed = FailedCheckpoints.read(folder)
            for key in committed(folder):
                if before and key.step >= before:
                    failed.add(key.name)
        except CheckpointError as problem:
            error = problem
    all_or_none(mesh, error)
    return FailedCheckpoints(folder, json.loads(mesh.share(json.dumps(failed.names))))


def _newest(
    checkpoints: Place, skip: set[Place], skipped: list[str], mesh: ParallelMesh
) -> Place | None:
    """The newest checkpoint that rank 0 finds; `skipped` gets why it passed over others."""
    found = Found(None, [])
    error: MegapipeError | None = None
    if mesh.rank == 0:
        try:
            found = find_newest(checkpoints, skip=skip)
        except StorageError as problem:
            error = StorageError(f"{problem}; {_UNREAD}")
        except MegapipeError as problem:
            error = problem
    all_or_none(mesh, error)
    own = "" if found.path is None else found.path.name
    name, reasons = json.loads(mesh.share(json.dumps([own, found.skipped])))
    skipped += [reason for reason in reasons if reason not in skipped]
    return checkpoints / name if name else None


def verified(path: Place, mesh: ParallelMesh) -> tuple[Checkpoint | None, str]:
    """The checkpoint if it is whole and its values are finite, else why not. Each rank reads its
    share of the files. Raises :class:`CheckpointError` on every rank if one cannot read them."""
    checkpoint, error, unread = None, None, None
    try:
        checkpoint = Checkpoint.open_sound(path, mesh.rank, mesh.world)
    except StorageError as problem:
        unread = StorageError(f"{problem}; {_UNREAD}")
    except CheckpointError as problem:
        error = str(problem)
    all_or_none(mesh, unread)
    first = mesh.agree(error)
    return (checkpoint, "") if first is None else (None, first)


def _opened(path: Path, mesh: ParallelMesh) -> HuggingFaceFolder:
    """A folder of Hugging Face's, whose config rank 0 reads; raises on every rank."""
    text, folder, error = "", None, None
    try:
        if mesh.rank == 0:
            model_type, model = read_model(path)
            text = f"{model_type} {model.model_dump_json()}"
    except MegapipeError as problem:
        error = problem
    all_or_none(mesh, error)
    model_type, _, fields = mesh.share(text).partition(" ")
    try:
        model = ModelConfig.model_validate_json(fields)
        folder = HuggingFaceFolder.of(path, model_type, model)
    except MegapipeError as problem:
        error = problem
    all_or_none(mesh, error)
    assert folder is not None
    return folder
