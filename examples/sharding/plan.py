"""A plan: the signature of every operation of a program on every axis of a mesh.

The function :func:`complete` chooses signatures for hints, the placements that some values should
have. The methods of this folder differ in where their hints come from. The function :func:`moves`
says which values have to be boxed. The executor carries out that list, so planned and executed
traffic are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from examples.sharding.boxing import Step, route
from examples.sharding.placement import (
    BROADCAST,
    PARTIAL,
    Mesh,
    Placement,
    Placements,
    divides,
)
from examples.sharding.program import Op, Program
from examples.sharding.rules import Signature, signatures
from megapipe.errors import ConfigError

Hints = dict[str, tuple[Placement | None, ...]]
"""Placement that a value should have along each mesh axis; None where nothing is asked."""
Signatures = tuple[Signature, ...]
"""The signature of an operation along each mesh axis."""


@dataclass(frozen=True)
class Plan:
    """Placements of all values of a program on a mesh."""

    program: Program
    mesh: Mesh
    inputs: Mapping[str, Placements]
    """Placements in which inputs are given."""
    signatures: tuple[Signatures, ...]
    """Signatures of each operation."""
    outputs: Mapping[str, Placements]
    """Placements in which outputs are returned, by their names."""


class Move(NamedTuple):
    """The boxing of a value, before an operation or at the end of the program."""

    op: int
    """Index of the operation; the number of operations at the end."""
    value: str
    source: Placements
    to: Placements
    steps: tuple[Step, ...]


@dataclass
class Copies:
    """Placements in which each value is available so far. A boxed value stays available."""

    program: Program
    sizes: tuple[int, ...]
    at: dict[str, list[Placements]] = field(default_factory=dict)

    def nearest(self, value: str, to: Placements) -> tuple[Placements, tuple[Step, ...]]:
        """Return the placement from which a value is boxed with fewest bytes, and the steps."""
        shape = self.program.shapes[value]
        routes = [(source, route(shape, source, to, self.sizes)) for source in self.at[value]]
        return min(routes, key=lambda each: (sum(step.bytes for step in each[1]), len(each[1])))


def moves(plan: Plan) -> Iterator[Move]:
    """Yield what has to be boxed, in the order in which the program runs."""
    copies = Copies(plan.program, plan.mesh.sizes, {n: [p] for n, p in plan.inputs.items()})
    for index, (op, chosen) in enumerate(zip(plan.program.ops, plan.signatures, strict=True)):
        for position, value in enumerate(op.inputs):
            yield from _move(copies, index, value, inputs_of(chosen, position))
        for position, value in enumerate(op.outputs):
            copies.at[value] = [outputs_of(chosen, position)]
    for name, value in plan.program.outputs.items():
        yield from _move(copies, len(plan.program.ops), value, plan.outputs[name])


def _move(copies: Copies, index: int, value: str, to: Placements) -> Iterator[Move]:
    source, steps = copies.nearest(value, to)
    if steps:
        copies.at[value].append(to)
        yield Move(index, value, source, to, steps)


def inputs_of(chosen: Signatures, position: int) -> Placements:
    """Return the placements of an input, by its position."""
    return tuple(signature.inputs[position] for signature in chosen)


def outputs_of(chosen: Signatures, position: int) -> Placements:
    """Return the placements of an output, by its position."""
    return tuple(signature.outputs[position] for signature in chosen)


class Traffic(NamedTuple):
    """Collectives of a plan or of its execution."""

    counts: Mapping[tuple[str, str], int]
    """Number of collectives by axis and kind."""
    bytes: int
    """Bytes sent by all devices."""

    def on(self, axis: str) -> dict[str, int]:
        """Return the number of collectives on an axis by kind."""
        return {kind: count for (name, kind), count in self.counts.items() if name == axis}

    def __str__(self) -> str:
        text = ", ".join(f"{n} {kind} on {axis}" for (axis, kind), n in sorted(self.counts.items()))
        return text or "no collective"


def traffic(steps: Iterator[Step] | list[Step], mesh: Mesh) -> Traffic:
    """Count steps that send."""
    sent = [step for step in steps if step.sends]
    counts = Counter((mesh.names[step.axis], step.kind) for step in sent)
    return Traffic(dict(counts), sum(step.bytes for step in sent))


def planned_traffic(plan: Plan) -> Traffic:
    """Return the collectives that a plan will need."""
    return traffic([step for move in moves(plan) for step in move.steps], plan.mesh)


@lru_cache(maxsize=2**12)
def choices(op: Op, program: Program, sizes: tuple[int, ...]) -> tuple[Signatures, ...]:
    """Return the signatures that an operation can have on all axes together: all parts of split
    dimensions are equal."""
    found = []
    for chosen in product(signatures(op, program), repeat=len(sizes)):
        tensors = [(value, inputs_of(chosen, at)) for at, value in enumerate(op.inputs)]
        tensors += [(value, outputs_of(chosen, at)) for at, value in enumerate(op.outputs)]
        if all(divides(program.shapes[value], places, sizes) for value, places in tensors):
            found.append(chosen)
    return tuple(found)


_EAGER = ("add", "view", "_unsafe_view", "t", "transpose")
"""Operations that take partial values where sums are not deferred: they move no data."""


def complete(program: Program, mesh: Mesh, hints: Hints, *, deferred: bool = False) -> Plan:
    """Choose the signatures that fit the hints best, then those with fewest bytes, in order.

    A value without a hint should not be split. Partial values are summed before the next operation
    that is more than a view or a sum of partial values. If `deferred`, they are summed as late as
    the rules allow, as OneFlow does.
    """
    hints = _checked(program, mesh, hints)
    sizes = mesh.sizes
    inputs = {name: _placed(hints.get(name), mesh) for name in program.inputs}
    copies = Copies(program, sizes, {name: [places] for name, places in inputs.items()})
    chosen = []
    for op in program.ops:
        allowed = [x for x in choices(op, program, sizes) if _may_pass(op, x, copies, deferred)]
        best = min(allowed, key=lambda each: _rank(op, each, hints, copies))
        for position, value in enumerate(op.inputs):
            to = inputs_of(best, position)
            if to not in copies.at[value]:
                copies.at[value].append(to)
        for position, value in enumerate(op.outputs):
            copies.at[value] = [outputs_of(best, position)]
        chosen.append(best)
    outputs = {name: _placed(hints.get(v), mesh) for name, v in program.outputs.items()}
    return Plan(program, mesh, inputs, tuple(chosen), outputs)


def _placed(hint: tuple[Placement | None, ...] | None, mesh: Mesh) -> Placements:
    return tuple(place or BROADCAST for place in hint) if hint else mesh.replicated


def _may_pass(op: Op, chosen: Signatures, copies: Copies, deferred: bool) -> bool:
    """Whether partial inputs that are only handed on are partial already: some of them if sums are
    deferred, otherwise all."""
    for axis, signature in enumerate(chosen):
        if signature.passes_partial:
            partial = [copies.at[value][0][axis] == PARTIAL for value in op.inputs]
            if not (any(partial) if deferred else op.name in _EAGER and all(partial)):
                return False
    return True


def _rank(op: Op, chosen: Signatures, hints: Hints, copies: Copies) -> tuple[int, int, int]:
    """Return differences from hints, bytes of boxing, and the number of its steps."""
    differences, sent, steps = 0, 0, 0
    values = [(value, inputs_of(chosen, at)) for at, value in enumerate(op.inputs)]
    for value, places in values:
        _, path = copies.nearest(value, places)
        sent += sum(step.bytes for step in path)
        steps += len(path)
    values += [(value, outputs_of(chosen, at)) for at, value in enumerate(op.outputs)]
    for value, places in values:
        asked = hints.get(value, (None,) * len(places))
        differences += sum(
            place != hint if hint is not None else place.kind == "S"
            for hint, place in zip(asked, places, strict=True)
        )
    return differences, sent, steps


def _checked(program: Program, mesh: Mesh, hints: Hints) -> Hints:
    """Return the hints. Raises ConfigError for a value or a split that cannot be."""
    for value, hint in hints.items():
        if value not in program.shapes:
            near = ", ".join(program.inputs)
            raise ConfigError(f"sharding: value {value!r} is unknown; inputs are {near}")
        if not divides(program.shapes[value], _placed(hint, mesh), mesh.sizes):
            raise ConfigError(
                f"sharding: {value} of shape {program.shapes[value]} cannot be placed "
                f"{','.join(map(str, hint))} on {dict(mesh.axes)}: parts have to be equal"
            )
    return hints
