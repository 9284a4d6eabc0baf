"""Running cases of the parity matrix on the ranks of a world."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from megapipe import TrainStep
from megapipe.schedule.generators import gpipe_on
from megapipe.schedule.ir import Schedule
from megapipe.testing import World
from tests.parity import reference
from tests.parity.cases import END, Case, Rows, configure, validation_rows, validation_samples
from tests.parity.cases import LR as LR
from tests.parity.cases import STEPS as STEPS
from tests.parity.cases import batch_of as batch_of
from tests.parity.cases import plain as plain
from tests.parity.checking import check_case as check_case
from tests.parity.expected import expected as expected
from tests.parity.in_memory_models import HeldWeights
from tests.parity.named_settings import ACTIVATIONS as ACTIVATIONS
from tests.parity.named_settings import OF_ALL_MODELS as OF_ALL_MODELS
from tests.parity.outcome import (
    Outcome,
    Parts,
    kept_by_routers,
    local_copies,
    own_grads,
    own_values,
    take_region,
)
from tests.parity.outcome import _global as _global
from tests.parity.outcome import assemble as assemble
from tests.parity.routing_margins import recording


def run_case(world: World, case: Case, *, validate: bool = True, device: str = "cpu") -> Outcome:
    """Train a case on this rank of a world of `case.world`."""
    config, layout = configure(case)
    mesh = world.mesh(case.grid, device)
    swapped = as_gpipe(layout.schedule) if case.swap else None
    step = TrainStep(config, layout, mesh, schedule=swapped, document_end=END)
    params = reference.init_random(config.model, seed=3, lora=config.lora)
    step.optimizer.set_weights(lambda spec, out: take_region(params[spec.name], spec, out))
    step.routing.read_weights(HeldWeights(params))
    return train(step, case, validate=validate)


def as_gpipe(like: Schedule) -> Schedule:
    """Build all forwards, then all backwards, of the same work items and placement."""
    return gpipe_on(
        like.placement,
        like.microbatches,
        direction=like.direction,
        slices=like.slices,
        sizes=like.sizes,
    )


def values_of(step: TrainStep) -> dict[str, Parts]:
    """Return the values for which this rank is primary; router state is among the weights."""
    values = own_values(step.optimizer)
    values.setdefault("model", []).extend(kept_by_routers(step))
    return values


def train(step: TrainStep, case: Case, *, validate: bool) -> Outcome:
    """Train the case's steps; return what this rank saw."""
    outcome = Outcome()
    with recording(lambda: outcome.chosen[-1]):
        _train(step, case, outcome, validate=validate)
    return outcome


def _train(step: TrainStep, case: Case, outcome: Outcome, *, validate: bool) -> None:
    rows = Rows(case)
    if validate:
        outcome.validation = step.evaluate(validation_rows(case), validation_samples(case)).loss
    note_gradients(step, outcome)
    outcome.values.append(values_of(step))
    for i in range(case.steps):
        if case.resumed and i == 1:
            step = resumed(step)
            note_gradients(step, outcome)
        outcome.chosen.append([])
        (result,) = step.train(i, rows) or step.settle()
        outcome.grads[i:] = outcome.grads[-1:]  # on GPUs the warm-up before the first reduces too
        outcome.losses.append(result.loss)
        outcome.norms.append(result.grad_norm)
        outcome.rates.append(result.lr)
        outcome.routing.append(result.routing)
        outcome.values.append(values_of(step))
        outcome.copies.append(list(local_copies(step)))
    for shard in step.optimizer.shards:
        assert not any(grad.requires_grad for grad in shard.bucket.grads), "W built a graph"


def note_gradients(step: TrainStep, outcome: Outcome) -> None:
    """Note this rank's part of the reduced gradients after each reduction."""
    optimizer, finish_reduce = step.optimizer, step.optimizer.finish_reduce

    def spy(loss_scale: float = 1.0) -> Tensor:
        squares = finish_reduce(loss_scale)
        outcome.grads.append(list(own_grads(optimizer)))
        return squares

    optimizer.finish_reduce = spy  # type: ignore[method-assign]


def resumed(step: TrainStep) -> TrainStep:
    """Build a new step that has loaded what the given one has saved after its first step."""
    mesh = step.mesh
    folder = Path(mesh.share(tempfile.mkdtemp() if mesh.rank == 0 else ""))
    step.settle()
    step.save(folder, 1)
    again = TrainStep(
        step.config,
        step.layout,
        mesh,
        schedule=step.schedule,
        kernels=step.kernels,
        document_end=END,
    )
    again.load(folder)
    mesh.barrier()
    if mesh.rank == 0:
        shutil.rmtree(folder)
    return again


def run_cases(world: World, cases: Sequence[Case], device: str = "cpu") -> list[Outcome]:
    """Run all cases of one world size, one after the other."""
    results = []
    for case in cases:
        try:
            results.append(run_case(world, case, device=device))
        except Exception as error:
            error.add_note(f"case: {case.name}")
            raise
    return results
