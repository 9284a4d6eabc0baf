"""Start and end times of an MoE layer's tasks, scheduled by priorities or in a fixed order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from megapipe.errors import ScheduleError
from megapipe.schedule.moe_layer.tasks import EXCHANGES, Resource, Task

Order = Mapping[Resource, Sequence[int]]
"""Order of the tasks of each resource, as indices in the list of tasks."""


class TaskTime(NamedTuple):
    """The time of a task."""

    ready: float
    """Time at which the task can start, because all tasks in its `after` have ended."""
    start: float
    end: float


class TimedTasks(NamedTuple):
    """Tasks of a layer, and their times (`slots`) in the same order."""

    tasks: Sequence[Task]
    slots: Sequence[TaskTime]

    @property
    def seconds(self) -> float:
        """Seconds until the layer has ended; reductions can still be running then."""
        ends = (slot.end for task, slot in self._each() if task.what != "reduce")
        return max(ends, default=0.0)

    @property
    def exposed(self) -> float:
        """Seconds of the layer during which the device computes nothing (exposed exchanges)."""
        return self.seconds - sum(task.seconds for task in self.tasks if task.resource == "compute")

    @property
    def longest_wait(self) -> float:
        """Longest time that an exchange, ready to start, waits for reductions on its link."""
        return max(
            (self._wait(task, slot) for task, slot in self._each() if task.what in EXCHANGES),
            default=0.0,
        )

    @property
    def order(self) -> Order:
        """Order in which the tasks of each resource begin."""
        order: dict[Resource, list[int]] = defaultdict(list)
        for number in sorted(range(len(self.tasks)), key=lambda n: self.slots[n][1:]):
            order[self.tasks[number].resource].append(number)
        return order

    def _each(self) -> zip[tuple[Task, TaskTime]]:
        return zip(self.tasks, self.slots, strict=True)

    def _wait(self, waiting: Task, slot: TaskTime) -> float:
        return sum(
            max(0.0, min(slot.start, other.end) - max(slot.ready, other.start))
            for task, other in self._each()
            if task.what == "reduce" and task.resource == waiting.resource
        )


def by_priority(tasks: Sequence[Task], priority: Callable[[Task], float]) -> TimedTasks:
    """Schedule the tasks by list scheduling: a free resource begins the ready task with the lowest
    value of `priority`; of equal ones, the first in `tasks`."""
    return _timed(tasks, priority, {})


def in_order(tasks: Sequence[Task], order: Order) -> TimedTasks:
    """Schedule the tasks of each resource in the order `order`, each task as early as possible.

    Raises :class:`ScheduleError` if tasks are missing, listed twice or under another resource, or
    wait for each other in a cycle.
    """
    for resource in sorted({*order, *(task.resource for task in tasks)}):
        given = list(order.get(resource, ()))
        own = [number for number, task in enumerate(tasks) if task.resource == resource]
        if sorted(given) != own:
            raise ScheduleError(f"order of {resource}: {given} does not list each of {own} once")
    before = {next_: each for given in order.values() for each, next_ in pairwise(given)}
    return _timed(tasks, lambda task: 0, before)


def _timed(
    tasks: Sequence[Task], priority: Callable[[Task], float], before: Mapping[int, int]
) -> TimedTasks:
    """Schedule tasks one by one. Next comes the task that can start first; of several, the one with
    the lowest value of `priority`. If n is in `before`, task `before[n]` must precede task n on its
    resource."""
    slots: dict[int, TaskTime] = {}
    free: dict[Resource, float] = defaultdict(float)
    while len(slots) < len(tasks):
        ready = {
            number: max((slots[n].end for n in task.after), default=0.0)
            for number, task in enumerate(tasks)
            if number not in slots
            and all(n in slots for n in task.after)
            and (number not in before or before[number] in slots)
        }
        if not ready:
            left = [number for number in range(len(tasks)) if number not in slots]
            raise ScheduleError(f"tasks {left} wait for each other in this order: a deadlock")
        starts = {number: max(when, free[tasks[number].resource]) for number, when in ready.items()}
        number = min(starts, key=lambda n: (starts[n], priority(tasks[n]), n))
        end = starts[number] + tasks[number].seconds
        slots[number] = TaskTime(ready[number], starts[number], end)
        free[tasks[number].resource] = end
    return TimedTasks(tasks, [slots[number] for number in range(len(tasks))])
