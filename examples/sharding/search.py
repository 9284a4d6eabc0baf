"""Automap (2112.02958): Monte Carlo tree search over annotations, with propagation as the rest.

A decision splits one dimension of an input; a parameter's gradient follows it. Decisions are few,
since propagation places all other values. Automap's learned filter, which ranks inputs
beforehand, is not part of this example.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log, prod, sqrt
from typing import NamedTuple

from examples.sharding.boxing import ITEM
from examples.sharding.placement import Mesh, divides, local_shape, split
from examples.sharding.plan import Hints, Plan, complete, planned_traffic
from examples.sharding.program import Program
from examples.sharding.propagation import propagate


class Decision(NamedTuple):
    """The split of a dimension of an input."""

    value: str
    dim: int


class Found(NamedTuple):
    """The best plan of a search."""

    decisions: tuple[Decision, ...]
    hints: Hints
    plan: Plan
    bytes: int
    """Bytes of all collectives."""
    memory: int
    """Bytes of parameters and gradients on a device."""


@dataclass
class _Node:
    """A list of decisions in the search tree."""

    visits: int = 0
    total: float = 0.0
    children: dict[Decision | None, _Node] = field(default_factory=dict)
    """Longer lists by their next decision; None ends the list."""

    def best(self, explore: float) -> tuple[Decision | None, _Node]:
        """Return the child with the highest upper confidence bound (UCT, Kocsis 2006)."""
        return max(
            self.children.items(),
            key=lambda item: (
                item[1].total / item[1].visits + explore * sqrt(log(self.visits) / item[1].visits)
            ),
        )


class Search:
    """A search on one axis of `devices`.

    `memory`: maximum bytes of parameters and gradients on a device. `depth`: maximum number of
    decisions.
    """

    def __init__(
        self, program: Program, devices: int, memory: int, *, depth: int = 4, seed: int = 0
    ) -> None:
        self.program, self.memory, self.depth = program, memory, depth
        self.mesh = Mesh((("model", devices),))
        self.random = random.Random(seed)
        self.decisions = [
            Decision(value, dim)
            for value in program.inputs
            for dim in range(len(program.shapes[value]))
            if divides(program.shapes[value], (split(dim),), self.mesh.sizes)
        ]
        self.results: dict[tuple[Decision, ...], Found] = {}

    def run(self, iterations: int = 100) -> Found:
        """Search, and return the best plan that fits, or the smallest one if none does."""
        root = _Node()
        for _ in range(iterations):
            self._iterate(root)
        return min(self.results.values(), key=self._order)

    def _order(self, found: Found) -> tuple[int, int, int]:
        return max(found.memory - self.memory, 0), found.bytes, len(found.decisions)

    def _iterate(self, root: _Node) -> None:
        """Descend to a new child, finish its list at random, and add its reward to the path."""
        path, taken = [root], list[Decision]()
        decision: Decision | None
        known, ended = True, False
        while not ended and len(taken) < self.depth:
            options = self._options(taken)
            if known:
                decision, known = self._descend(path, options)
            else:
                decision = self.random.choice(options)
            ended = decision is None
            taken += [] if decision is None else [decision]
        reward = self._reward(self.evaluate(taken))
        for node in path:
            node.visits += 1
            node.total += reward

    def _descend(
        self, path: list[_Node], options: Sequence[Decision | None]
    ) -> tuple[Decision | None, bool]:
        """Add a child of the last node to the path: one that was not tried, otherwise the best.
        Return its decision, and whether it was tried before."""
        children = path[-1].children
        fresh = [each for each in options if each not in children]
        if fresh:
            decision = self.random.choice(fresh)
            children[decision] = _Node()
            path.append(children[decision])
        else:
            decision, child = path[-1].best(explore=0.5)
            path.append(child)
        return decision, not fresh

    def _options(self, taken: Sequence[Decision]) -> list[Decision | None]:
        used = {decision.value for decision in taken}
        return [None, *(each for each in self.decisions if each.value not in used)]

    def _reward(self, found: Found) -> float:
        """Return a number from 0 to 1: half of it for memory, half of it for bytes."""
        whole = sum(ITEM * prod(self.program.shapes[name]) for name in self.program.parameters)
        fits = min(self.memory / found.memory, 1.0)
        return fits / 2 + (fits == 1.0) / 2 / (1 + found.bytes / whole)

    def evaluate(self, decisions: Sequence[Decision]) -> Found:
        """Return the plan of a list of decisions. A later one on the same value does not count."""
        key = tuple(decisions)
        if key not in self.results:
            hints: Hints = {}
            for value, dim in key:
                known = {
                    name: split(dim)
                    for name in (value, self.program.outputs.get(f"{value}.grad", value))
                    if name not in hints
                }
                hints = propagate(self.program, self.mesh, "model", known, hints)
            plan = complete(self.program, self.mesh, hints)
            sent = planned_traffic(plan).bytes
            self.results[key] = Found(key, hints, plan, sent, memory(plan))
        return self.results[key]


def memory(plan: Plan) -> int:
    """Return the bytes of parameters and their gradients on a device."""
    program = plan.program
    return sum(
        ITEM * prod(local_shape(program.shapes[name], places, plan.mesh.sizes))
        for name in program.parameters
        for places in (plan.inputs[name], plan.outputs[f"{name}.grad"])
    )
