"""Ideals of a graph of operators: sets of operators that contain all inputs of their members.

An ideal is what has been computed at some moment. A way through the ideals, from the empty one to
the whole graph, is an order of the operators; a way with large steps is a partition of the graph
into parts that depend on earlier parts alone. So dynamic programs over ideals do for a graph what
dynamic programs over cuts do for a chain. A chain of n operators has n + 1 ideals, n operators
without dependencies have 2^n.

An ideal is a whole number: bit v says whether it contains operator v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import TypeVar

from megapipe.errors import ConfigError
from megapipe.plan.algorithms.enumeration import Front

Label = TypeVar("Label")
MAX_IDEALS = 20_000
"""Maximum number of ideals that are looked at."""


class Ideals:
    """The ideals of a graph, smaller ones first.

    Raises:
        ConfigError: an operator has an input that is not before it, or there are too many ideals.
    """

    def __init__(self, inputs: Sequence[Sequence[int]]) -> None:
        """Find all ideals. `inputs[v]` are the operators that operator v needs; their numbers are
        below v."""
        for node, own in enumerate(inputs):
            if not all(0 <= each < node for each in own):
                raise ConfigError(
                    f"operator {node} has the inputs {', '.join(map(str, own))}: expected numbers "
                    f"from 0 to {node - 1}; operators are numbered after their inputs"
                )
        self.size = len(inputs)
        """Number of operators."""
        self.inputs = [sum(1 << each for each in set(own)) for own in inputs]
        """Inputs of each operator as a set (bits)."""
        self.users = [
            sum(1 << user for user in range(self.size) if self.inputs[user] >> node & 1)
            for node in range(self.size)
        ]
        """Operators that need each operator, as a set (bits)."""
        self.all = self._found()
        """All ideals; an ideal comes after those that it contains."""

    @property
    def whole(self) -> int:
        """Ideal of all operators."""
        return (1 << self.size) - 1

    def ready(self, ideal: int) -> Iterator[int]:
        """Yield the operators outside of an ideal whose inputs are all inside."""
        for node, needed in enumerate(self.inputs):
            if not ideal >> node & 1 and not needed & ~ideal:
                yield node

    def _found(self) -> list[int]:
        found, layer = [0], {0}
        for _ in range(self.size):
            layer = {ideal | 1 << node for ideal in layer for node in self.ready(ideal)}
            found += sorted(layer)
            if len(found) > MAX_IDEALS:
                raise ConfigError(
                    f"the graph of {self.size} operators has more than {MAX_IDEALS} ideals: "
                    "expected fewer operators, or more dependencies between them"
                )
        return found


def members(ideal: int) -> list[int]:
    """Return the operators of a set, ascending."""
    return [node for node in range(ideal.bit_length()) if ideal >> node & 1]


def cut_in_parts(
    ideals: Ideals,
    parts: int,
    cost: Callable[[int, int, int], float | None],
    join: Callable[[float, float], float] = max,
) -> tuple[float, tuple[int, ...]] | None:
    """Cut a graph in at most `parts` parts, each of which depends on earlier parts alone.

    Args:
        ideals: ideals of the graph.
        parts: maximum number of parts; some can stay empty.
        cost: function of (ideal before a part, ideal after it, number of the part) that returns
            the cost of the part; None if the part is not allowed. An empty part costs 0.
        join: function that joins the costs of parts; the cost of a cut may not fall if one of
            them rises. Default: the maximum.

    Returns:
        The least cost, and the operators of each part as a set (bits); None if no cut is allowed.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}
    for part in range(parts):
        following = {}
        for after in ideals.all:
            least, found = inf, None
            for before, (spent, cut) in best.items():
                if before & ~after or spent >= least:
                    continue
                own = cost(before, after, part) if before != after else 0
                if own is not None and join(spent, own) < least:
                    least, found = join(spent, own), (*cut, after & ~before)
            if found is not None:
                following[after] = (least, found)
        best = following
    return best.get(ideals.whole)


def order_all(
    ideals: Ideals,
    start: Label,
    extend: Callable[[Label, int], Iterable[Label]],
    costs: Callable[[int, Label], tuple[float, ...]],
) -> Iterator[Label]:
    """Yield the ways through the ideals, one operator at a time, that no other way dominates.

    Args:
        ideals: ideals of the graph.
        start: label of the empty ideal.
        extend: function that returns the labels after one more operator.
        costs: function of an ideal and a label of it. If all costs of one label are at most those
            of another, the same must hold for all continuations of both.
    """
    labels: dict[int, Front[Label]] = {0: Front()}
    labels[0].add((0.0,), start)
    for ideal in ideals.all[:-1]:
        for _, label in labels.pop(ideal, Front[Label]()):
            for node in ideals.ready(ideal):
                after = ideal | 1 << node
                for each in extend(label, node):
                    labels.setdefault(after, Front()).add(costs(after, each), each)
    yield from (label for _, label in labels.get(ideals.whole, Front[Label]()))
