"""Execution of a plan on simulated devices of one process: pieces are lists of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from examples.sharding.boxing import Step, apply, assemble, scatter
from examples.sharding.placement import Placements, local_shape
from examples.sharding.plan import (
    Move,
    Plan,
    Traffic,
    inputs_of,
    moves,
    outputs_of,
    traffic,
)
from examples.sharding.rules import run_piece


class Execution(NamedTuple):
    """Results of a sharded program."""

    outputs: Mapping[str, Tensor]
    """Outputs put together, by name."""
    traffic: Traffic
    """Collectives that were carried out."""


def execute(plan: Plan, tensors: Mapping[str, Tensor]) -> Execution:
    """Run a plan on whole input tensors: each device computes on its pieces only.

    Raises:
        ValueError: devices that should have equal pieces of an output do not.
    """
    sizes, program = plan.mesh.sizes, plan.program
    held = {
        (name, plan.inputs[name]): scatter(tensors[name], plan.inputs[name], sizes)
        for name in program.inputs
    }
    pending = moves(plan)
    following = next(pending, None)
    done: list[Step] = []
    for index in range(len(program.ops) + 1):
        while following is not None and following.op == index:
            done += _box(following, held, sizes)
            following = next(pending, None)
        if index < len(program.ops):
            _compute(plan, index, held)
    outputs = {
        name: assemble(held[value, plan.outputs[name]], plan.outputs[name], sizes)
        for name, value in program.outputs.items()
    }
    return Execution(outputs, traffic(done, plan.mesh))


_Held = dict[tuple[str, Placements], list[Tensor]]
"""Pieces of a value by its name and placements."""


def _box(move: Move, held: _Held, sizes: tuple[int, ...]) -> Iterator[Step]:
    pieces = held[move.value, move.source]
    for step in move.steps:
        pieces = apply(pieces, step, sizes)
        yield step
    held[move.value, move.to] = pieces


def _compute(plan: Plan, index: int, held: _Held) -> None:
    op, signatures, sizes = plan.program.ops[index], plan.signatures[index], plan.mesh.sizes
    inputs = [held[value, inputs_of(signatures, at)] for at, value in enumerate(op.inputs)]
    shape = local_shape(plan.program.shapes[op.outputs[0]], outputs_of(signatures, 0), sizes)
    results = [run_piece(op, own, shape) for own in zip(*inputs, strict=True)]
    for at, value in enumerate(op.outputs):
        held[value, outputs_of(signatures, at)] = [result[at] for result in results]


def error(plan: Plan, tensors: Mapping[str, Tensor]) -> float:
    """Return the largest difference of an output, loss or gradient, from the block on one device:
    absolute below 1, relative to the largest number of the output above 1."""
    whole = plan.program.run(tensors)
    worst = 0.0
    for name, made in execute(plan, tensors).outputs.items():
        wanted = whole[plan.program.outputs[name]]
        scale = max(float(wanted.abs().max()), 1.0)
        worst = max(worst, float((made - wanted).abs().max()) / scale)
    return worst
