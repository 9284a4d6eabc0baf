"""Tasks of operators that are split over devices, and their simulation, whole or in part.

An operator's replicas have some rows of its samples each, and the devices of a replica some columns
of its output. So every device of an operator has one task. Tasks run on a device in the order in
which their inputs arrive. A change of one operator cannot affect a task whose inputs arrive before
those of the operator's tasks, before or after the change. :class:`Simulator` keeps these tasks and
simulates the rest (the delta simulation of FlexFlow, Jia et al., 1807.05358). The result is the
same, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from megapipe.plan.algorithms.problem import Links, Operator


class Split(NamedTuple):
    """How an operator is split over devices."""

    devices: tuple[int, ...]
    tp: int = 1
    """Number of devices of a replica."""

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return len(self.devices) // self.tp


Strategy = tuple[Split, ...]
"""How each operator is split."""
Task = tuple[int, int]
"""An operator and the index of one of its devices."""
Seconds = Callable[[int, Split], float]
"""Function that returns the seconds of each of an operator's tasks."""


class Arrival(NamedTuple):
    """A task with the time at which all its inputs have arrived; tasks run in this order."""

    time: float
    operator: int
    part: int
    """Index in the devices of the operator."""


class Simulator:
    """The simulation of a graph of operators, which remembers the last strategy."""

    def __init__(self, graph: Sequence[Operator], seconds: Seconds, links: Links) -> None:
        self._graph, self._seconds, self._links = graph, seconds, links
        self._strategy: Strategy | None = None
        self._order: list[tuple[Arrival, float]] = []
        """Tasks of the last strategy in the order in which they ran, each with its end."""
        self.simulated = 0
        """Number of tasks that were simulated."""

    def time(self, strategy: Strategy) -> float:
        """Return the time at which the last task ends; simulate only what differs from the last
        strategy."""
        if strategy != self._strategy:
            kept = self._unaffected(strategy)
            self._order = self._run(strategy, kept)
            self._strategy = strategy
        return max(end for _, end in self._order)

    def _unaffected(self, strategy: Strategy) -> list[tuple[Arrival, float]]:
        """Return the tasks that run as they did in the last strategy."""
        if self._strategy is None:
            return []
        both = zip(self._strategy, strategy, strict=True)
        changed = {node for node, (old, new) in enumerate(both) if old != new}
        earliest = [inf] * len(self._graph)
        for arrival, end in self._order:
            earliest[arrival.operator] = min(earliest[arrival.operator], end)
        limit = min(arrival.time for arrival, _ in self._order if arrival.operator in changed)
        for node in changed:  # its new tasks need a part of each input
            inputs = self._graph[node].inputs
            limit = min(limit, max((earliest[source] for source in inputs), default=0.0))
        return [each for each in self._order if each[0].time < limit]

    def _run(
        self, strategy: Strategy, kept: list[tuple[Arrival, float]]
    ) -> list[tuple[Arrival, float]]:
        """Simulate the tasks that are not `kept`."""
        inputs = {
            (node, part): list(self._messages(strategy, node, part))
            for node, split in enumerate(strategy)
            for part in range(len(split.devices))
        }
        users: dict[Task, list[Task]] = {task: [] for task in inputs}
        for task, own in inputs.items():
            for source, _ in own:
                users[source].append(task)
        left = {task: len(own) for task, own in inputs.items()}
        ends: dict[Task, float] = {}
        free: dict[int, float] = {}
        queue = [Arrival(0.0, *task) for task, count in left.items() if not count]
        order: list[tuple[Arrival, float]] = []

        def finish(arrival: Arrival, end: float) -> None:
            task = arrival[1:]
            ends[task] = free[strategy[arrival.operator].devices[arrival.part]] = end
            order.append((arrival, end))
            for user in users[task]:
                left[user] -= 1
                if not left[user]:
                    time = max(ends[source] + seconds for source, seconds in inputs[user])
                    heappush(queue, Arrival(time, *user))

        for each in kept:
            finish(*each)
        while queue:
            arrival = heappop(queue)
            time, node, part = arrival
            if (node, part) not in ends:
                start = max(time, free.get(strategy[node].devices[part], 0.0))
                self.simulated += 1
                finish(arrival, start + self._seconds(node, strategy[node]))
        return order

    def _messages(self, strategy: Strategy, node: int, part: int) -> Iterator[tuple[Task, float]]:
        """Yield the tasks that a task needs, with the seconds of their messages: the rows that both
        replicas have, of the columns that the sender has."""
        receiver = strategy[node]
        own = part // receiver.tp
        for source in self._graph[node].inputs:
            sender = strategy[source]
            low = own * sender.replicas // receiver.replicas
            high = -(-(own + 1) * sender.replicas // receiver.replicas)
            for other in range(low * sender.tp, high * sender.tp):
                first, start = other // sender.tp, sender.devices[other]
                begin = max(first / sender.replicas, own / receiver.replicas)
                end = min((first + 1) / sender.replicas, (own + 1) / receiver.replicas)
                size = self._graph[source].output * (end - begin) / sender.tp
                speed = self._links.speed(start, receiver.devices[part])
                away = start != receiver.devices[part]
                yield (source, other), away * (size / speed + self._links.latency)
