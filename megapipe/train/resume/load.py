"""Loading of a checkpoint, or only of weights, into a run's state, equally on all ranks."""

from __future__ import annotations

from collections.abc import Collection

from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.stateful import TensorReader
from megapipe.distributed.agreement import raise_on_all
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import MegapipeError
from megapipe.train import checkpoint_io
from megapipe.train.moe.upcycle import without_source
from megapipe.train.resume.memory_checkpoints import MemoryCheckpoints
from megapipe.train.state import RunState


def load(
    checkpoint: Checkpoint,
    state: RunState,
    mesh: ParallelMesh,
    memory: MemoryCheckpoints | None = None,
) -> None:
    """Load weights and states of a checkpoint; an in-memory one is fetched from `memory`. Raises on
    every rank if the checkpoint does not fit."""
    error, machine = None, state.machine
    if memory is not None:
        state.prepare(checkpoint)
        needed = checkpoint_io.files_needed(machine.optimizer, checkpoint, state.entries())
        memory.fetch(checkpoint, needed)
    try:
        model, states = machine.layout.model, machine.optimizer.rule.states
        shapes = model.weights()
        for name, shape in model.shapes(trained=True).items():
            shapes |= {f"optimizer.{each}/{name}": shape for each in states}
        checkpoint.match(shapes)
        state.take_over(checkpoint)
    except MegapipeError as problem:
        error = problem
    raise_on_all(mesh, error)
    if memory is not None:
        memory.release()


def load_weights(weights: TensorReader, state: RunState, mesh: ParallelMesh) -> None:
    """Load only weights. Adapters that `weights` lack and the routers of an upcycled model are
    initialised. Raises on every rank if the weights do not fit."""
    machine = state.machine
    error, model, run = None, machine.layout.model, machine.config
    fresh: Collection[str] = ()
    if run.lora.rank is not None and weights.config.get("lora.rank") is None:
        fresh = model.shapes(trained=True).keys()
    if run.checkpoint.upcycle:
        fresh = without_source(model.shapes())
    try:
        begun = {f"model/{name}" for name in fresh}
        weights.match({n: shape for n, shape in model.weights().items() if n not in begun})
        checkpoint_io.load_weights(machine.optimizer, weights, fresh=fresh, seed=run.run.seed)
        state.read_weights(weights)
    except MegapipeError as problem:
        error = problem
    raise_on_all(mesh, error)
