"""The state in a run's checkpoints, and how a run resumes from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from pydantic import JsonValue, TypeAdapter, ValidationError

from megapipe.checkpoint.manifest import first_problem
from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.stateful import Stateful, TensorReader
from megapipe.checkpoint.writer import Meta, Piece
from megapipe.cli import flatten
from megapipe.errors import CheckpointError, ConfigError
from megapipe.plan.memory import checkpoint_bytes
from megapipe.train import checkpoint_io
from megapipe.train.resume.coordinates import ResumePoint
from megapipe.train.step.data import DataPosition, StepData
from megapipe.train.step.machine import Machine


class SaveArguments(NamedTuple):
    """A rank's arguments of :func:`megapipe.checkpoint.save`."""

    step: int
    meta: Meta
    pieces: Iterator[Piece]
    nbytes: int
    """Bytes of all ranks' pieces, without pieces of members added by callbacks."""


class RunState:
    """State of a run: the optimizer, the position in the data, and `members` with more state.

    `forget` drops work in flight before another state is loaded.
    """

    def __init__(
        self,
        machine: Machine,
        data: StepData,
        members: Iterable[Stateful],
        forget: Callable[[], None],
    ) -> None:
        self.machine = machine
        self._data = data
        self._forget = forget
        self._members: list[Stateful] = []
        for member in (data, *members):
            self.add(member)

    def add(self, member: Stateful) -> None:
        """Add a member whose state is saved in checkpoints. Raises :class:`ConfigError` if its name
        is taken, or if it has buffers and no name."""
        if not member.name and member.buffers():
            raise ConfigError(
                f"{type(member).__name__} has buffers and no name: expected `name`, the "
                "prefix of their names in a checkpoint"
            )
        taken = {"step", *ResumePoint.model_fields, *(each.name for each in self._members)}
        if member.name and member.name in taken:
            raise ConfigError(
                f"{type(member).__name__}.name={member.name!r} is the name of another part of "
                "a checkpoint: expected a unique name"
            )
        self._members.append(member)

    def entries(self) -> Iterable[str]:
        """Return the names of checkpoint entries that all ranks read in full."""
        return chain.from_iterable(member.entries() for member in self._members)

    def content(
        self, step: int, *, run_id: str, digests: Mapping[str, str], order: str
    ) -> SaveArguments:
        """Return the content of a checkpoint after `step` steps. `order`: name of the sample order.
        The pieces are views of the state."""
        machine, members = self.machine, self._members
        config, layout, optimizer = machine.config, machine.layout, machine.optimizer
        more = (name for name in ("ep", "etp") if getattr(layout, name) > 1)
        axes = ("pp", "dp", "cp", "tp", *more, "chunks")
        states = {member.name: member.state() for member in members if member.name}
        meta = Meta(
            run_id=run_id,
            layout={name: getattr(layout, name) for name in axes},
            coordinates={
                "step": step,
                "samples": self._data.samples(step),
                "order": order,
                "updates": optimizer.count,
                "lr": optimizer.lr,
                "threads": torch.get_num_threads(),
                **{name: state for name, state in states.items() if state is not None},
            },
            config=flatten(config),
            digests=dict(digests),
        )
        writes = [member for member in members if machine.mesh.rank == 0 or not member.shared]
        own = (member.tensors() for member in writes)
        pieces = chain(checkpoint_io.pieces(optimizer), chain.from_iterable(own))
        for member in members:
            member.saved()
        return SaveArguments(step, meta, pieces, checkpoint_bytes(config, layout))

    def prepare(self, checkpoint: Checkpoint) -> ResumePoint:
        """Load the part of the state that is in the manifest. It determines which tensors are to be
        read. Raises :class:`CheckpointError`."""
        found = ResumePoint.of(checkpoint)
        self._data.position = DataPosition(checkpoint.step, found.samples)
        for member in self._members:
            try:
                member.load(_stored(member, checkpoint.manifest.coordinates))
            except ValidationError as error:
                where = ".".join((member.name, first_problem(error)))
                raise CheckpointError(f"{checkpoint.path}: coordinates.{where}") from None
            except ValueError as error:
                where = f"coordinates.{member.name}"
                raise CheckpointError(f"{checkpoint.path}: {where}: {error}") from None
        return found

    def take_over(self, checkpoint: Checkpoint) -> None:
        """Load the whole state of a checkpoint. Collective. Raises :class:`CheckpointError`."""
        self._forget()
        found, names = self.prepare(checkpoint), set(checkpoint.names())
        checkpoint_io.load(self.machine.optimizer, checkpoint, found.updates, found.lr)
        for member in self._members:
            member.read(checkpoint, names)

    def read_weights(self, weights: TensorReader) -> None:
        """Read the members' values that belong to the weights. Collective. Raises
        :class:`CheckpointError`."""
        for member in self._members:
            member.read_weights(weights)


def _stored(member: Stateful, coordinates: Mapping[str, JsonValue]) -> Any:
    """Return a member's state in the manifest, converted to the member's type; None if missing."""
    if member.name not in coordinates:
        return None
    stored = json.dumps(coordinates[member.name])
    return TypeAdapter(member.kind).validate_json(stored, strict=True)
