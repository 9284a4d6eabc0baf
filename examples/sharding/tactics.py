"""PartIR (2401.11202): a strategy is a list of tactics, applied in order with propagation between.

A tactic annotates a few values along one mesh axis. Earlier tactics have priority. Since a
tactic says so little, its collectives can be counted in the head: that is the check of this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from examples.sharding.placement import BROADCAST, Mesh, Placement, divides, split
from examples.sharding.plan import Hints, Plan, complete
from examples.sharding.program import Program
from examples.sharding.propagation import propagate


class Tactic(NamedTuple):
    """Annotations along one axis."""

    axis: str
    annotations: Mapping[str, Placement]


def data_parallel(axis: str) -> Tactic:
    """Return the tactic that splits the batch."""
    return Tactic(axis, {"x": split(0), "target": split(0)})


def tensor_parallel(axis: str) -> Tactic:
    """Return the tactic that splits the columns of two matrices; propagation finds the rest."""
    return Tactic(axis, {"attention.q.weight": split(0), "mlp.up.weight": split(0)})


def zero(program: Program, mesh: Mesh, axis: str, hints: Hints, *, weights: bool) -> Tactic:
    """Return the tactic that splits each parameter's gradient over replicas (ZeRO-2, 1910.02054),
    and with `weights` the parameter too (ZeRO-3).

    A parameter is split in the first dimension that leaves equal parts, if there is one, preferably
    in one that no other axis splits.
    """
    place = mesh.index(axis)
    annotations = {}
    for name in sorted(program.parameters):
        shape = program.shapes[name]
        before = hints.get(name, (None,) * len(mesh.axes))
        free = sorted(range(len(shape)), key=lambda dim: split(dim) in before)
        for dim in free:
            after = (*before[:place], split(dim), *before[place + 1 :])
            if divides(shape, tuple(each or BROADCAST for each in after), mesh.sizes):
                annotations[program.outputs[f"{name}.grad"]] = split(dim)
                annotations |= {name: split(dim)} if weights else {}
                break
    return Tactic(axis, annotations)


def apply_tactics(program: Program, mesh: Mesh, tactics: Sequence[Tactic]) -> Hints:
    """Apply tactics in order, each followed by propagation to a fixed point."""
    hints: Hints = {}
    for tactic in tactics:
        hints = propagate(program, mesh, tactic.axis, tactic.annotations, hints)
    return hints


def strategies(program: Program, mesh: Mesh, data: str, model: str) -> dict[str, Plan]:
    """Return the plans of DP, DP + TP, and both with ZeRO-2 and ZeRO-3, by name."""
    first = [data_parallel(data)]
    both = [*first, tensor_parallel(model)]
    hints = apply_tactics(program, mesh, both)
    lists = {
        "DP": first,
        "DP+TP": both,
        "DP+TP+ZeRO-2": [*both, zero(program, mesh, data, hints, weights=False)],
        "DP+TP+ZeRO-3": [*both, zero(program, mesh, data, hints, weights=True)],
    }
    return {
        name: complete(program, mesh, apply_tactics(program, mesh, tactics))
        for name, tactics in lists.items()
    }
