"""Tofu (1807.08887): halve all tensors of a program again and again, with fewest bytes each time.

Every tensor is stored split, so memory is halved too, and every operation is split. One halving is
solved exactly by dynamic programming over the operations; 2**k devices take k halvings, each of
which is solved with those before it fixed. :func:`exhaustive` tries all halvings together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from examples.sharding.boxing import route
from examples.sharding.placement import Mesh, Placements, divides, split
from examples.sharding.plan import Plan, Signatures, inputs_of, outputs_of
from examples.sharding.program import Program
from examples.sharding.rules import Signature, signatures


def halvings(count: int) -> Mesh:
    """Return a mesh of 2**count devices with an axis for each halving."""
    return Mesh(tuple((f"half{index}", 2) for index in range(count)))


def bisect(program: Program, count: int, width: int = 1) -> Plan:
    """Split a program over 2**count devices by that many halvings, one after the other.

    `width`: number of best halvings that are kept each time. Tofu keeps 1.
    """
    choices = [_Choice(dict.fromkeys(program.inputs, ()), ((),) * len(program.ops))]
    for _ in range(count):
        ranked = [found for choice in choices for found in _halve(program, choice, width)]
        choices = [choice for _, choice in sorted(ranked, key=_first)[:width]]
    return _plan(program, count, choices[0])


class _Choice(NamedTuple):
    """Placements of inputs and signatures of operations, along the axes chosen so far."""

    inputs: dict[str, Placements]
    signatures: tuple[Signatures, ...]


_Live = frozenset[tuple[str, Placements]]
"""Placements of the values that a later operation reads."""


def _halve(program: Program, fixed: _Choice, width: int) -> list[tuple[int, _Choice]]:
    """Return the `width` ways to add an axis that need fewest bytes, with these bytes.

    Of each set of live placements, the dynamic program keeps as many cheapest histories.
    """
    first_read, last_read = _reads(program)
    states: dict[_Live, list[tuple[int, _Choice]]] = {frozenset(): [(0, _Choice({}, ()))]}
    for index in range(len(program.ops)):
        new = [value for value in program.inputs if first_read[value] == index]
        ways = [_stored(program, value, fixed.inputs[value]) for value in new]
        after: dict[_Live, list[tuple[int, _Choice]]] = {}
        for (live, histories), places, signature in product(
            states.items(), list(product(*ways)), _splitting(program, index)
        ):
            given = dict(zip(new, places, strict=True))
            both = (*fixed.signatures[index], signature)
            cost = _bytes(program, index, both, dict(live) | given)
            if cost is None:
                continue
            at = dict(live) | given | _made(program, index, both)
            key = frozenset((v, p) for v, p in at.items() if last_read[v] > index)
            after.setdefault(key, []).extend(
                (sent + cost, _Choice(before.inputs | given, (*before.signatures, both)))
                for sent, before in histories
            )
        states = {key: sorted(found, key=_first)[:width] for key, found in after.items()}
    return [found for histories in states.values() for found in histories]


def _first(found: tuple[int, _Choice]) -> int:
    return found[0]


def _reads(program: Program) -> tuple[dict[str, int], dict[str, int]]:
    """Return the indices of the first and the last operation that reads each value; -1 without
    one."""
    first, last = dict.fromkeys(program.shapes, -1), dict.fromkeys(program.shapes, -1)
    for index, op in enumerate(program.ops):
        for value in op.inputs:
            first[value] = index if first[value] < 0 else first[value]
            last[value] = index
    return first, last


def _stored(program: Program, value: str, before: Placements) -> list[Placements]:
    """Return the ways in which one more axis can split a value."""
    shape = program.shapes[value]
    every = [(*before, split(dim)) for dim in range(len(shape))]
    return [places for places in every if divides(shape, places, _sizes(places))]


def _sizes(places: Sequence[object]) -> tuple[int, ...]:
    return (2,) * len(places)


def _splitting(program: Program, index: int) -> list[Signature]:
    """Return the signatures that split an operation."""
    return [each for each in signatures(program.ops[index], program) if each.splits]


def _made(program: Program, index: int, both: Signatures) -> dict[str, Placements]:
    """Return the placements of an operation's outputs."""
    return {value: outputs_of(both, at) for at, value in enumerate(program.ops[index].outputs)}


def _bytes(
    program: Program, index: int, both: Signatures, at: Mapping[str, Placements]
) -> int | None:
    """Return the bytes of an operation: boxing of its inputs, and of what it returns to the user.
    None if its parts would not be equal."""
    op, sizes = program.ops[index], _sizes(both)
    needs = [(value, inputs_of(both, position)) for position, value in enumerate(op.inputs)]
    made = _made(program, index, both)
    if not all(divides(program.shapes[v], own, sizes) for v, own in (*needs, *made.items())):
        return None
    sent = sum(_sent(program, value, at[value], to) for value, to in needs)
    for value in set(program.outputs.values()) & made.keys():
        sent += _sent(program, value, made[value], _returned(program, value, made[value]))
    return sent


def _sent(program: Program, value: str, source: Placements, to: Placements) -> int:
    return sum(step.bytes for step in route(program.shapes[value], source, to, _sizes(to)))


def _returned(program: Program, value: str, places: Placements) -> Placements:
    """Return the nearest placements in which a value is split along every axis."""
    every = _split_ways(program, value, len(places))
    return min(every, key=lambda to: _sent(program, value, places, to))


def _nearest(program: Program, value: str, to: Placements) -> Placements:
    """Return where an input is stored best for its only reader, split along every axis."""
    every = _split_ways(program, value, len(to))
    return min(every, key=lambda places: _sent(program, value, places, to))


def _split_ways(program: Program, value: str, count: int) -> list[Placements]:
    """Return the ways to split a value along all of `count` axes."""
    every: list[Placements] = [()]
    for _ in range(count):
        every = [longer for shorter in every for longer in _stored(program, value, shorter)]
    return every


def _plan(program: Program, count: int, choice: _Choice) -> Plan:
    """Return the plan of a choice. Outputs stay where they are made, but are summed and split."""
    made = dict(choice.inputs)
    for index, both in enumerate(choice.signatures):
        made |= _made(program, index, both)
    outputs = {
        name: _returned(program, value, made[value]) for name, value in program.outputs.items()
    }
    return Plan(program, halvings(count), choice.inputs, choice.signatures, outputs)


def exhaustive(program: Program, count: int) -> Plan:
    """Return a plan with fewest bytes of all halvings together, for programs that read each input
    once: then its storage is chosen for its only reader."""
    choices = [
        product(_splitting(program, index), repeat=count) for index in range(len(program.ops))
    ]
    best: tuple[int, _Choice] | None = None
    for chosen in product(*choices):
        sent, at, stored = 0, dict[str, Placements](), dict[str, Placements]()
        for index, both in enumerate(chosen):
            for position, value in enumerate(program.ops[index].inputs):
                if value in program.inputs:
                    to = inputs_of(both, position)
                    stored[value] = _nearest(program, value, to)
            cost = _bytes(program, index, both, at | stored)
            if cost is None or (best is not None and sent + cost >= best[0]):
                break
            sent += cost
            at |= _made(program, index, both)
        else:
            best = sent, _Choice(stored, chosen)
    assert best is not None, "every operation can be split"
    return _plan(program, count, best[1])
