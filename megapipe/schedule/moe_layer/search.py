"""The order of a layer's tasks in which it is through first."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product
from typing import NamedTuple

from megapipe.schedule.moe_layer.tasks import Resource, Task, What
from megapipe.schedule.moe_layer.times import TimedTasks, by_priority, in_order

EXACT_CHUNKS = 4
"""Up to so many chunks every order is looked at."""

FORWARD: tuple[What, ...] = ("encode", "dispatch", "decode", "experts", "combine")
RULES = {"dispatch_first": FORWARD, "combine_first": FORWARD[::-1]}
"""Orders by what goes first where several tasks are ready: all chunks leave before the first comes
back, or each comes back before more leave."""


def by_rule(tasks: Sequence[Task], rule: str) -> TimedTasks:
    """List scheduling by one of :data:`RULES`."""
    return by_priority(tasks, lambda task: RULES[rule].index(task.what))


def training_order(tasks: Sequence[Task]) -> TimedTasks:
    """The order of training: in its turn a chunk is computed and begins its way back; before that
    the chunks after it go on, by one hop each, and after that those before it."""
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


def with_reductions(timed: TimedTasks, link: Resource, pieces: Sequence[float]) -> TimedTasks:
    """The same tasks with a reduction, in pieces of so many seconds, that could begin at once and
    makes way for them: a piece begins where nothing else is ready, and is not interrupted."""
    starts = {task: slot.start for task, slot in zip(timed.tasks, timed.slots, strict=True)}
    reductions = [Task("reduce", i, link, seconds) for i, seconds in enumerate(pieces)]
    return by_priority([*timed.tasks, *reductions], lambda task: starts.get(task, math.inf))


def fastest(tasks: Sequence[Task]) -> TimedTasks:
    """The best list of priorities; up to :data:`EXACT_CHUNKS` chunks the best of all orders, for
    which a resource may wait although a task is ready."""
    best = min(_by_lists(tasks), key=lambda timed: timed.seconds)
    if 1 + max(task.chunk for task in tasks) > EXACT_CHUNKS:
        return best
    return _Search(tasks, best).best


def _by_lists(tasks: Sequence[Task]) -> Iterator[TimedTasks]:
    """With every list of priorities of the kinds of tasks of each resource."""
    kinds: dict[Resource, list[What]] = defaultdict(list)
    for task in tasks:
        if task.what not in kinds[task.resource]:
            kinds[task.resource].append(task.what)
    for lists in product(*map(permutations, kinds.values())):
        place = dict(zip(kinds, lists, strict=True))
        yield by_priority(tasks, _place_in(place))


def _place_in(lists: dict[Resource, tuple[What, ...]]) -> Callable[[Task], float]:
    return lambda task: lists[task.resource].index(task.what)


class _State(NamedTuple):
    """Some tasks have their times."""

    ends: tuple[float | None, ...]
    """Of each task, if it has."""
    free: dict[Resource, float]
    """When each resource has done all of these."""


class _Search:
    """Every order of tasks, but for those that cannot be better than one that is known.

    Tasks get their times one by one, each as early as its resource can after those before. A state
    is left where the work that remains takes it past the best order, or where another with the same
    tasks done is nowhere later.
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
        """Seconds from the end of a task to that of the last that has to follow it."""
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
            there = _State(ends, {**state.free, task.resource: end})
            if self._least(there) < self.best.seconds * (1 - 1e-12) and self._new(there):
                self._visit([*sequence, number], there)

    def _ready(self, task: Task, state: _State) -> float:
        return max((state.ends[n] or 0.0 for n in task.after), default=0.0)

    def _least(self, state: _State) -> float:
        """No order that begins so ends earlier."""
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
        """Whether no state with the same tasks done was nowhere later; if so, it is one from now
        on."""
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
