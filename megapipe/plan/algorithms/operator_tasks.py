"""Exact schedules of few tasks on few devices: where and when each of them runs.

Tasks are put in order one after the other; each begins as soon as its device is free and its
inputs have arrived. Every schedule without needless waiting has such an order. Of the beginnings
with the same tasks, those that no other one dominates are continued, so the shortest schedule is
found without looking at all orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from megapipe.plan.algorithms.ideals import Ideals, members, order_all


class Task(NamedTuple):
    """An operation of an operator graph."""

    seconds: float
    inputs: tuple[int, ...] = ()
    """Indices of tasks; each is less than the task's own."""
    output: float = 0.0
    """Bytes that are sent to each other device that needs them."""
    group: int = 0
    """Tasks of a group run on the same device."""


@dataclass(frozen=True)
class Timed:
    """Tasks with devices and times; only those that are in order so far have one."""

    devices: dict[int, int]
    """Device by group."""
    ends: dict[int, float]
    """End by task, in the order in which the tasks were added."""
    free: tuple[float, ...]
    """Time from which each device is free."""
    used: tuple[float, ...]
    """Bytes of the groups on each device."""

    @property
    def makespan(self) -> float:
        """Time at which the last task ends."""
        return max(self.free)

    def order(self, tasks: Sequence[Task], device: int) -> list[int]:
        """Return the tasks of a device in the order in which they run."""
        return [task for task in self.ends if self.devices[tasks[task].group] == device]


class TaskProblem(NamedTuple):
    """Tasks to be scheduled."""

    tasks: Sequence[Task]
    devices: int
    sizes: Sequence[float] = ()
    """Bytes of each group; default: 0."""
    memory: float = inf
    """Bytes of a device."""
    transfer: Callable[[float, int, int], float] = lambda size, source, target: 0.0
    """Function that returns the seconds of a message of some bytes between two devices."""

    def arrival(self, timed: Timed, task: int, device: int) -> float:
        """Return the time at which a task's output is on a device."""
        own = self.tasks[task]
        return timed.ends[task] + self.transfer(own.output, timed.devices[own.group], device)

    def add(self, timed: Timed, task: int, device: int) -> Timed | None:
        """Return the schedule with one more task on a device; None if that does not fit."""
        own, used = self.tasks[task], list(timed.used)
        if timed.devices.get(own.group, device) != device:
            return None
        if own.group not in timed.devices and self.sizes:
            used[device] += self.sizes[own.group]
            if used[device] > self.memory:
                return None
        arrivals = (self.arrival(timed, each, device) for each in own.inputs)
        free = list(timed.free)
        free[device] = max(free[device], *arrivals, 0.0) + own.seconds
        devices = {**timed.devices, own.group: device}
        return Timed(devices, {**timed.ends, task: free[device]}, tuple(free), tuple(used))


def best_schedule(problem: TaskProblem) -> Timed | None:
    """Return the schedule with the least makespan; None if the groups do not fit the devices."""
    ideals = Ideals([task.inputs for task in problem.tasks])
    groups = [
        sum(1 << task for task, each in enumerate(problem.tasks) if each.group == own.group)
        for own in problem.tasks
    ]

    def extend(timed: Timed, task: int) -> Iterator[Timed]:
        for device in range(problem.devices):
            if (longer := problem.add(timed, task, device)) is not None:
                yield longer

    def costs(ideal: int, timed: Timed) -> tuple[float, ...]:
        """Return all that later tasks depend on. A group that goes on makes its device matter:
        twice, with both signs, so that only the same device is as good."""
        found = [*timed.free, *timed.used]
        for task in members(ideal):
            if ideals.users[task] & ~ideal:
                every = range(problem.devices)
                found += [problem.arrival(timed, task, device) for device in every]
            if groups[task] & ~ideal:
                device = timed.devices[problem.tasks[task].group]
                found += [device, -device]
        return tuple(found)

    start = Timed({}, {}, (0.0,) * problem.devices, (0.0,) * problem.devices)
    return min(
        order_all(ideals, start, extend, costs), key=lambda each: each.makespan, default=None
    )
