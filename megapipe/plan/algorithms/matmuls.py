"""Matrix products on a mesh of devices: how each one is split, and the bytes on the wire.

Along each axis of the mesh a tensor is split over rows (``S0``) or columns (``S1``), broadcast
(``B``, every device has all of it), or a partial sum (``P``). These are the words of OneFlow
(Yuan et al., 2110.15032). A product Y = X W is computed in one of three ways along an axis.

  ======== ==== ==== ==== =========== ================================
  way      X    W    Y    known as    gradients
  ======== ==== ==== ==== =========== ================================
  rows     S0   B    S0   data        dX: S0, dW: P, summed every step
  columns  B    S1   S1   column      dX: P
  inner    S1   S0   P    row         dX: S1, needs dY: B
  ======== ==== ==== ==== =========== ================================

The planners that use this module plan one block of such operators. The trainer's layers have fixed
splits, so it cannot run these plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from megapipe.plan.algorithms.strategies import Strategy, StrategyGraph

ITEM = 2
"""Bytes of a number."""


class Split(NamedTuple):
    """One way to compute an operator along an axis, as states of its tensors."""

    name: str
    x: str
    y: str
    dx: str
    """State in which the gradient of X is computed."""
    dy: str
    """State in which the gradient of Y is needed."""
    splits_w: bool = False


PRODUCT = (
    Split("rows", "S0", "S0", "S0", "S0"),
    Split("columns", "B", "S1", "P", "S1", splits_w=True),
    Split("inner", "S1", "P", "S1", "B", splits_w=True),
)
ELEMENTWISE = tuple(Split(state, state, state, state, state) for state in ("S0", "S1", "B"))
"""Ways of an operator on each number alone. A partial sum has to be completed before it."""
REPLICATED = (Split("B", "B", "B", "B", "B"),)
"""Way of a block's input and output if every device has all of it."""


class MeshOperator(NamedTuple):
    """An operator of a block."""

    ways: tuple[Split, ...]
    rows: int
    """Rows of its output."""
    columns: int
    """Columns of its output."""
    inner: int = 0
    """Columns of its input, if it is a product."""
    inputs: tuple[int, ...] = ()


def matmul(rows: int, inner: int, columns: int, *inputs: int) -> MeshOperator:
    """Return the product of a [rows, inner] activation with an [inner, columns] weight."""
    return MeshOperator(PRODUCT, rows, columns, inner, inputs)


def strategy_graph(operators: Sequence[MeshOperator], mesh: Sequence[int]) -> StrategyGraph:
    """Return the operators' strategies on a mesh of these sizes. Costs are bytes that a device
    sends in a step: forward, backward and the sum of weight gradients."""
    ways = [list(product(each.ways, repeat=len(mesh))) for each in operators]
    strategies = [
        [
            Strategy(" x ".join(way.name for way in own), _weight_bytes(operator, own, mesh))
            for own in of
        ]
        for operator, of in zip(operators, ways, strict=True)
    ]
    edges = {}
    for node, operator in enumerate(operators):
        for source in operator.inputs:
            size = ITEM * operators[source].rows * operators[source].columns
            edges[source, node] = [
                [_both_ways(size, before, after, mesh) for after in ways[node]]
                for before in ways[source]
            ]
    return StrategyGraph(strategies, edges)


def _weight_bytes(operator: MeshOperator, ways: Sequence[Split], mesh: Sequence[int]) -> float:
    """Return the bytes of the all-reduces that complete a weight's gradient."""
    size = float(ITEM * operator.inner * operator.columns)
    for way, count in zip(ways, mesh, strict=True):
        size /= count if way.splits_w else 1
    states = ["B" if way.splits_w else "P" for way in ways]
    return sum(boxing(size, state, "B", count) for state, count in zip(states, mesh, strict=True))


def _both_ways(
    size: float, before: Sequence[Split], after: Sequence[Split], mesh: Sequence[int]
) -> float:
    """Return the bytes that a tensor of `size` bytes and its gradient take between operators."""
    forward = convert(size, [way.y for way in before], [way.x for way in after], mesh)
    return forward + convert(size, [way.dx for way in after], [way.dy for way in before], mesh)


def convert(
    size: float, source: Sequence[str], target: Sequence[str], mesh: Sequence[int]
) -> float:
    """Return the bytes that a device sends to convert a tensor, one axis after the other."""
    states, total = list(source), 0.0
    for axis, state in enumerate(target):
        local = size
        for other, count in enumerate(mesh):
            local /= count if other != axis and states[other].startswith("S") else 1
        total += boxing(local, states[axis], state, mesh[axis])
        states[axis] = state
    return total


def boxing(size: float, source: str, target: str, count: int) -> float:
    """Return the bytes that each of `count` devices sends to convert a tensor of `size` bytes from
    one state to another; a ring's all-reduce is a reduce-scatter and an all-gather."""
    part = size * (count - 1) / count
    if source == target or source == "B":
        return 0.0
    if source == "P":
        return 2 * part if target == "B" else part
    return part if target == "B" else part / count
