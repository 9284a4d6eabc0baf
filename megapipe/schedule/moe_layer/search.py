"""Search for the order of an MoE layer's tasks with which the layer takes the shortest time."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product
from typing import NamedTuple

from megapipe.schedule.moe_layer.tasks import Resource, Task, What
from megapipe.schedule.moe_layer.times import TimedTasks, by_priority, in_order

EXACT_CHUNKS = 4
"""Maximum number of chunks for which all orders are tried."""

FORWARD: tuple[What, ...] = ("encode", "dispatch", "decode", "experts", "combine")
RULES = {"dispatch_first": FORWARD, "combine_first": FORWARD[::-1]}
"""Priorities of tasks, highest first. dispatch_first dispatches all chunks before the first one is
combined; combine_first combines a chunk before more chunks are dispatched."""


def by_rule(tasks: Sequence[Task], rule: str) -> TimedTasks:
    """Schedule the tasks by list scheduling with one of :data:`RULES`."""
    return by_priority(tasks, lambda task: RULES[rule].index(task.what))


def training_order(tasks: Sequence[Task]) -> TimedTasks:
    """Schedule the tasks in the order that training uses. It computes one chunk after the other.
    Before a chunk is computed, later chunks start their next exchange of dispatch; after it, this
    chunk starts its combine, and earlier chunks start their next exchange of combine."""
    hops = Counter(task.what for task in tasks if task.chunk == 0)
    taken: Counter[tuple[What, int]] = Counter()
    turns: dict[Resource, list[tuple[int, int, int]]] = defaultdict(list)
    for number, task in enumerate(tasks):
        hop = taken[task.what, task.chunk]
        taken[task.what, task.chunk] += 1
        turn = {
            "encode": task.chunk - hops["dispatch"],
            "dispatch": task.chunk - hops["dispatch"] + hop,
            "combine": task.chunk + hop,
        }.get(task.what, task.chunk)
        turns[task.resource].append((turn, FORWARD.index(task.what), number))
    order = {link: [number for _, _, number in sorted(each)] for link, each in turns.items()}
    return in_order(tasks, order)


def with_reductions(
    timed: TimedTasks, link: Resource, bucket_seconds: Sequence[float]
) -> TimedTasks:
    """Add a gradient reduction on `link` with the lowest priority. `bucket_seconds` has the
    time of each bucket; a bucket starts when no other task of the link is ready, and is not
    interrupted."""
    starts = {task: slot.start for task, slot in zip(timed.tasks, timed.slots, strict=True)}
    reductions = [Task("reduce", i, link, seconds) for i, seconds in enumerate(bucket_seconds)]
    return by_priority([*timed.tasks, *reductions], lambda task: starts.get(task, math.inf))


def fastest(tasks: Sequence[Task]) -> TimedTasks:
    """Return the fastest schedule. With at most :data:`EXACT_CHUNKS` chunks, search all orders,
    even those in which a resource waits although a task is ready. With more chunks, try only list
    scheduling with every fixed priority of task kinds."""
    best = min(_by_lists(tasks), key=lambda timed: timed.seconds)
    if 1 + max(task.chunk for task in tasks) > EXACT_CHUNKS:
        return best
    return _Search(tasks, best).best


def _by_lists(tasks: Sequence[Task]) -> Iterator[TimedTasks]:
    """Yield a schedule for each combination of priorities: the task kinds of every resource in each
    possible order."""
    kinds: dict[Resource, list[What]] = defaultdict(list)
    for task in tasks:
        if task.what not in kinds[task.resource]:
            kinds[task.resource].append(task.what)
    for lists in product(*map(permutations, kinds.values())):
        priorities = dict(zip(kinds, lists, strict=True))
        yield by_priority(tasks, _priority_in(priorities))


def _priority_in(lists: dict[Resource, tuple[What, ...]]) -> Callable[[Task], float]:
    return lambda task: lists[task.resource].index(task.what)


class _State(NamedTuple):
    """A search state, in which some tasks are scheduled."""

    ends: tuple[float | None, ...]
    """End of each task; None: it is not scheduled yet."""
    free: dict[Resource, float]
    """Time from which each resource is free."""


class _Search:
    """Branch-and-bound search over all orders of tasks.

    Tasks are scheduled one by one, each as early as possible after the earlier tasks of its
    resource. A state is abandoned if its lower bound is not below the best order's time, or if a
    known state dominates it: the same tasks are scheduled, and none of its times is later.
    """

    def __init__(self, tasks: Sequence[Task], known: TimedTasks) -> None:
        self.best = known
        self._tasks = tasks
        self._seen: dict[int, list[tuple[float, ...]]] = defaultdict(list)
        self._resources = sorted({task.resource for task in tasks})
        self._following = [
            [m for m, t in enumerate(tasks) if n in t.after] for n in range(len(tasks))
        ]
        self._tails = [0.0] * len(tasks)
        """Seconds from the end of each task to the end of the last task that depends on it."""
        for number in reversed(range(len(tasks))):
            after = (tasks[m].seconds + self._tails[m] for m in self._following[number])
            self._tails[number] = max(after, default=0.0)
        self._visit([], _State((None,) * len(tasks), dict.fromkeys(self._resources, 0.0)))

    def _visit(self, sequence: list[int], state: _State) -> None:
        if len(sequence) == len(self._tasks):
            order: dict[Resource, list[int]] = defaultdict(list)
            for number in sequence:
                order[self._tasks[number].resource].append(number)
            self.best = in_order(self._tasks, order)
            return
        starts = {
            number: max(state.free[task.resource], self._ready(task, state))
            for number, task in enumerate(self._tasks)
            if state.ends[number] is None and all(state.ends[n] is not None for n in task.after)
        }
        for number in sorted(starts, key=lambda n: starts[n]):
            task, end = self._tasks[number], starts[number] + self._tasks[number].seconds
            ends = (*state.ends[:number], end, *state.ends[number + 1 :])
            child = _State(ends, {**state.free, task.resource: end})
            if self._least(child) < self.best.seconds * (1 - 1e-12) and self._new(child):
                self._visit([*sequence, number], child)

    def _ready(self, task: Task, state: _State) -> float:
        return max((state.ends[n] or 0.0 for n in task.after), default=0.0)

    def _least(self, state: _State) -> float:
        """Return a lower bound of the seconds of all orders that continue a state."""
        least = 0.0
        left: dict[Resource, list[int]] = defaultdict(list)
        for number, (task, end) in enumerate(zip(self._tasks, state.ends, strict=True)):
            if end is None:
                left[task.resource].append(number)
            else:
                least = max(least, end + self._tails[number])
        for resource, numbers in left.items():
            work = sum(self._tasks[n].seconds for n in numbers)
            tail = min(self._tails[n] for n in numbers)
            least = max(least, state.free[resource] + work + tail)
        return least

    def _new(self, state: _State) -> bool:
        """Whether no known state dominates a state (see the class); if so, record the state."""
        done = sum(1 << n for n, end in enumerate(state.ends) if end is not None)
        awaited = (
            end
            for n, end in enumerate(state.ends)
            if end is not None and any(state.ends[m] is None for m in self._following[n])
        )
        latest = max(end for end in state.ends if end is not None)
        times = (*(state.free[r] for r in self._resources), *awaited, latest)
        seen = self._seen[done]
        if any(all(a <= b for a, b in zip(old, times, strict=True)) for old in seen):
            return False
        seen[:] = [old for old in seen if any(a < b for a, b in zip(old, times, strict=True))]
        seen.append(times)
        return True
