"""GSPMD (2105.04663): annotate a few values, propagate to a fixed point, insert collectives.

Also its pipeline: stages are stacked along a dimension, and a shift of that dimension hands each
stage's output to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from examples.sharding.placement import BROADCAST, Mesh, Placement, divides
from examples.sharding.plan import Hints
from examples.sharding.program import Op, Program
from examples.sharding.rules import signatures


def propagate(
    program: Program, mesh: Mesh, axis: str, known: Mapping[str, Placement], hints: Hints
) -> Hints:
    """Return hints with those that follow from `known` along an axis.

    An operation passes placements on, forward and backward, if exactly one of its signatures fits
    all of its values that have one. It is asked again until nothing changes. Placements of
    `hints` stay, so that earlier annotations have priority.
    """
    place = mesh.index(axis)
    found: Hints = dict(hints)
    for value, placement in known.items():
        _put(found, value, place, placement, mesh)
    changed = True
    while changed:
        changed = False
        for op in (*program.ops, *reversed(program.ops)):
            for value, placement in _implied(op, program, found, place).items():
                after: Hints = {}
                before = found.get(value, (None,) * len(mesh.axes))
                after[value] = (*before[:place], placement, *before[place + 1 :])
                full = tuple(each or BROADCAST for each in after[value])
                if divides(program.shapes[value], full, mesh.sizes):
                    found.update(after)
                    changed = True
    return found


def _put(hints: Hints, value: str, axis: int, placement: Placement, mesh: Mesh) -> None:
    before = hints.get(value, (None,) * len(mesh.axes))
    hints[value] = (*before[:axis], placement, *before[axis + 1 :])


def _implied(op: Op, program: Program, hints: Hints, axis: int) -> dict[str, Placement]:
    """Return placements of values without one that follow from those of the others."""
    values = (*op.inputs, *op.outputs)
    known = [hints[value][axis] if value in hints else None for value in values]
    if not any(place is not None and place.kind == "S" for place in known):
        return {}
    fitting = []
    for signature in signatures(op, program):
        places = (*signature.inputs, *signature.outputs)
        if all(k is None or k == p for k, p in zip(known, places, strict=True)):
            fitting.append(places)
    if len(fitting) != 1:
        return {}
    return {
        value: place
        for value, place, before in zip(values, fitting[0], known, strict=True)
        if before is None and place.kind == "S"
    }


def shifted_pipeline(
    stage: Callable[[Tensor, Tensor], Tensor], weights: Tensor, microbatches: Tensor
) -> Tensor:
    """Run a pipeline as one vectorised program; return the outputs of the micro-batches.

    `weights` [stages, ...] and the state [stages, ...] have a dimension of stages, and `stage` maps
    all stages at once. A compiler splits that dimension over devices; here it is whole. Each turn
    shifts the state by one stage, which would be a message between neighbours. A stage without a
    micro-batch computes on zeros: that is the bubble.
    """
    stages, count = len(weights), len(microbatches)
    zeros = torch.zeros_like(microbatches[:1])
    state = zeros.expand(stages, *microbatches.shape[1:])
    outputs = []
    for turn in range(count + stages - 1):
        first = microbatches[turn : turn + 1] if turn < count else zeros
        state = stage(torch.cat([first, state[:-1]]), weights)
        if turn >= stages - 1:
            outputs.append(state[-1])
    return torch.stack(outputs)
