"""The input of a planner: units to cut, devices, links and memory. It imports no torch.

A problem can be written by hand (tests), or be measured from a configuration
(:mod:`megapipe.plan.algorithms.measured`). Seconds and bytes are the units of all figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple


class UnitCost(NamedTuple):
    """Costs of a unit for one micro-batch, on one device of a tensor-parallel group."""

    forward: float
    input_grad: float
    weight_grad: float
    recompute: float = 0.0
    """Seconds that the backward takes longer if the unit recomputes its forward."""
    weights: float = 0.0
    """Bytes of weights and main gradients."""
    states: float = 0.0
    """Bytes of optimizer states before they are sharded over the replicas."""
    gradients: float = 0.0
    """Bytes that the replicas all-reduce once a step."""
    saved: float = 0.0
    """Bytes saved from the forward to the backward."""
    saved_recompute: float = 0.0
    """Bytes saved if the unit recomputes its forward."""
    message: float = 0.0
    """Bytes that are sent to the next unit if that is on other devices."""
    reduced: float = 0.0
    """Bytes of reduced gradients, before they are sharded over the replicas, if there are several
    replicas."""

    @property
    def backward(self) -> float:
        """Seconds of the backward without recomputation."""
        return self.input_grad + self.weight_grad

    def scaled(self, factor: float) -> UnitCost:
        """Return the costs of `factor` times as many samples."""
        return self._replace(
            forward=factor * self.forward,
            input_grad=factor * self.input_grad,
            weight_grad=factor * self.weight_grad,
            recompute=factor * self.recompute,
            saved=factor * self.saved,
            saved_recompute=factor * self.saved_recompute,
            message=factor * self.message,
        )

    def __add__(self, other: object) -> UnitCost:
        """Return the costs of this unit followed by another; the message is that of the latter."""
        assert isinstance(other, UnitCost)
        both = [a + b for a, b in zip(self, other, strict=True)]
        return UnitCost(*both)._replace(message=other.message)


NOTHING = UnitCost(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class ChainUnit:
    """A part of the model that is not cut: embedding, layer, half a layer, or head."""

    name: str
    costs: Mapping[tuple[int, float], UnitCost]
    """Costs by tensor-parallel degree and number of samples of a micro-batch on a replica."""

    def cost(self, tp: int, samples: float) -> UnitCost:
        """Return the costs for a number of samples: those of the next smaller number with costs
        (else the smallest), in proportion."""
        known = sorted(size for degree, size in self.costs if degree == tp)
        base = max((size for size in known if size <= samples), default=known[0])
        found = self.costs[tp, base]
        return found if base == samples else found.scaled(samples / base)


@dataclass(frozen=True)
class Links:
    """Bandwidths between devices, in bytes per second."""

    inside: float = inf
    """Bandwidth between two devices of a node."""
    between: float = inf
    """Bandwidth between devices of different nodes."""
    per_node: int = 8
    """Number of devices of a node."""
    latency: float = 0.0
    """Seconds of an empty message or collective."""
    matrix: Sequence[Sequence[float]] | None = None
    """Bandwidth by source and destination; None: `inside` and `between` hold."""

    def speed(self, source: int, target: int) -> float:
        """Return the bandwidth between two devices."""
        if self.matrix is not None:
            return self.matrix[source][target]
        return self.inside if source // self.per_node == target // self.per_node else self.between

    def all_reduce(self, size: float, devices: Sequence[int]) -> float:
        """Return the seconds of an all-reduce of `size` bytes in a ring of devices."""
        count = len(devices)
        if count == 1 or not size:
            return 0.0
        slowest = min(self.speed(*each) for each in pairwise([*devices, devices[0]]))
        return 2 * (count - 1) / count * size / slowest + self.latency

    def message(self, size: float, sources: Sequence[int], targets: Sequence[int]) -> float:
        """Return the seconds in which each device of the smaller side moves `size` bytes, in equal
        parts, to or from its devices of the larger side."""
        if not size:
            return 0.0
        count = max(len(sources), len(targets))
        pairs = [
            (sources[i * len(sources) // count], targets[i * len(targets) // count])
            for i in range(count)
        ]
        return size / min(self.speed(*pair) for pair in pairs) + self.latency


@dataclass(frozen=True)
class Operator:
    """A node of an operator graph, on one device."""

    name: str
    forward: float
    """Seconds of the forward for a micro-batch."""
    backward: float
    memory: float = 0.0
    """Bytes on its device."""
    output: float = 0.0
    """Bytes of its output for a micro-batch."""
    inputs: tuple[int, ...] = ()
    """Indices of the operators whose outputs it reads; each is less than its own."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A chain of units to be placed on devices."""

    units: tuple[ChainUnit, ...]
    devices: int
    microbatches: int
    """Number of micro-batches of a step."""
    samples: float = 1
    """Number of samples of a micro-batch, over all replicas of a stage: a stage of r replicas has
    samples / r of every micro-batch on each replica."""
    memory: float = inf
    """Bytes of a device."""
    links: Links = field(default_factory=Links)
    cuts: tuple[int, ...] | None = None
    """Positions at which the trainer can cut the chain: cut k is before unit k; None: all."""
    tried: tuple[int, ...] | None = None
    """Cuts that planners try; None: all of the `cuts`. A long chain takes them long."""
    whole_samples: bool = False
    """Whether a replica can only have a whole number of samples of a micro-batch."""
    operators: tuple[Operator, ...] = ()
    """Operator graph for planners that place a graph, in topological order; empty: the chain."""

    @property
    def length(self) -> int:
        """Number of units."""
        return len(self.units)

    @cached_property
    def block_cuts(self) -> tuple[int, ...]:
        """Positions at which the trainer can cut, without both ends."""
        every = self.cuts if self.cuts is not None else range(1, self.length)
        return tuple(cut for cut in every if 0 < cut < self.length)

    @cached_property
    def tensor_sizes(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that all units have costs of, ascending."""
        each = [{tp for tp, _ in unit.costs} for unit in self.units]
        return tuple(sorted(set.intersection(*each)))

    @cached_property
    def replica_counts(self) -> tuple[int, ...]:
        """Numbers of replicas that a stage can have, ascending."""
        every = range(1, self.devices + 1)
        whole = self.whole_samples
        return tuple(n for n in every if not whole or self.samples % n == 0)

    @cached_property
    def graph(self) -> tuple[Operator, ...]:
        """Operators of the graph; without one, the chain's units at tensor-parallel degree 1."""
        if self.operators:
            return self.operators
        costs = [unit.cost(1, self.samples) for unit in self.units]
        return tuple(
            Operator(
                *(unit.name, cost.forward, cost.backward),
                *(cost.weights + cost.states + cost.saved, cost.message),
                (index - 1,) if index else (),
            )
            for index, (unit, cost) in enumerate(zip(self.units, costs, strict=True))
        )

    def with_microbatches(self, count: int) -> Problem:
        """Return the problem with the same batch in `count` micro-batches."""
        samples = self.samples * self.microbatches / count
        whole = int(samples) if samples == int(samples) else samples
        return replace(self, microbatches=count, samples=whole)

    def cost(self, first: int, last: int, tp: int = 1, replicas: int = 1) -> UnitCost:
        """Return the costs of units `first` to `last` - 1 on a device, if none recomputes, for its
        share of a micro-batch. The message is that of the last unit."""
        key = first, last, tp, replicas
        if key not in self._found:
            self._found[key] = self._sum(first, last, tp, replicas)
        return self._found[key]

    def _sum(self, first: int, last: int, tp: int, replicas: int) -> UnitCost:
        if last == first + 1:
            return self._each(tp, replicas)[first]
        key = tp, replicas
        if key not in self._sums:
            self._sums[key] = [NOTHING, *accumulate(self._each(tp, replicas))]
        sums = self._sums[key]
        low, high = sums[first], sums[last]
        between = [b - a for a, b in zip(low, high, strict=True)]
        return UnitCost(*between)._replace(message=high.message)

    @cached_property
    def _found(self) -> dict[tuple[int, int, int, int], UnitCost]:
        """Costs of ranges of units, by arguments of :meth:`cost`."""
        return {}

    def _each(self, tp: int, replicas: int) -> list[UnitCost]:
        """Return the costs of each unit."""
        if (tp, replicas) not in self._costs:
            found = [unit.cost(tp, self.samples / replicas) for unit in self.units]
            self._costs[tp, replicas] = found
        return self._costs[tp, replicas]

    @cached_property
    def _costs(self) -> dict[tuple[int, int], list[UnitCost]]:
        """Costs of each unit, by tensor-parallel degree and replicas."""
        return {}

    @cached_property
    def _sums(self) -> dict[tuple[int, int], list[UnitCost]]:
        """Costs of the units before each position, by tensor-parallel degree and replicas."""
        return {}
