"""nnScaler (OSDI 2024): op-trans, op-assign and op-order, from which every plan is put together.

Op-trans divides an operation, op-assign says on which device a part runs, op-order says which of
two parts runs first where data do not. A plan is complete if they leave each device one order.
Recipes follow: 1F1B and GPipe, as the generators of :mod:`megapipe.schedule` have them; the
interlaced pipeline, whose embedding is divided over all devices of the pipeline; and co-shard,
whose parts of one layer run on one device one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from examples.sharding.models import MLP
from megapipe.errors import ConfigError
from megapipe.schedule.ir import Kind, Schedule, pack, packed
from megapipe.schedule.placement import loop


class Task(NamedTuple):
    """A part of the forward or backward of consecutive layers."""

    kind: str
    """F or B."""
    layers: tuple[int, int]
    """First layer, and the one after the last."""
    microbatch: int | None = None
    """None: the whole batch."""
    part: int | None = None
    """Part of every operation, if they are divided by heads or vocabulary; None: all of it."""

    def __str__(self) -> str:
        first, after = self.layers
        text = f"{self.kind} of layers {first}-{after - 1}, micro-batch {self.microbatch}"
        return text if self.part is None else f"{text}, part {self.part}"


class TaskGraph:
    """The tasks of a training step, with what the three primitives said of them."""

    def __init__(self, layers: int) -> None:
        self.tasks = {Task(kind, (0, layers)) for kind in "FB"}
        self.device: dict[Task, int] = {}
        self.orders: list[tuple[Task, Task]] = []

    def op_trans(self, divide: Callable[[Task], Sequence[Task]]) -> None:
        """Replace each task by the parts that `divide` returns."""
        self.tasks = {part for task in self.tasks for part in divide(task)}

    def op_assign(self, device: Callable[[Task], int]) -> None:
        """Put each task on a device."""
        self.device = {task: device(task) for task in self.tasks}

    def op_order(self, tasks: Sequence[Task]) -> None:
        """Run tasks in this order.

        Raises:
            ConfigError: a task that does not exist.
        """
        for task in tasks:
            if task not in self.tasks:
                raise ConfigError(f"op-order: {task} is no task of the graph")
        self.orders += pairwise(tasks)

    def needs(self) -> dict[Task, set[Task]]:
        """Return the tasks that come before each task, by data or by order."""
        found: dict[Task, set[Task]] = {task: set() for task in self.tasks}
        ends: dict[tuple[str, int, int | None], list[Task]] = {}
        for task in self.tasks:
            edge = task.layers[1] if task.kind == "F" else task.layers[0]
            ends.setdefault((task.kind, edge, task.microbatch), []).append(task)
        for task in self.tasks:
            edge = task.layers[0] if task.kind == "F" else task.layers[1]
            found[task] |= set(ends.get((task.kind, edge, task.microbatch), ()))
            if task.kind == "B":
                found[task].add(task._replace(kind="F"))
        for first, then in self.orders:
            found[then].add(first)
        return found

    def tables(self) -> list[list[Task]]:
        """Return the tasks of each device in the order in which it runs them.

        Raises:
            ConfigError: a circle of orders, or two tasks of a device that nothing puts in order.
        """
        needs = self.needs()
        try:
            order = list(TopologicalSorter(needs).static_order())
        except CycleError as error:
            chain = ", then ".join(map(str, error.args[1]))
            raise ConfigError(f"op-order: tasks wait for each other: {chain}") from None
        before: dict[Task, set[Task]] = {}
        for task in order:
            before[task] = needs[task].union(*(before[each] for each in needs[task]))
        lists: list[list[Task]] = [[] for _ in range(max(self.device.values()) + 1)]
        for task in order:
            own = lists[self.device[task]]
            if own and own[-1] not in before[task]:
                raise ConfigError(
                    f"op-order: device {self.device[task]} has {own[-1]} and {task} in no order"
                )
            own.append(task)
        return lists

    def starts(self, seconds: Callable[[Task], float]) -> dict[Task, float]:
        """Return when each task starts, if messages take no time."""
        needs = self.needs()
        found: dict[Task, float] = {}
        for own in self.tables():
            for first, then in pairwise(own):
                needs[then].add(first)
        for task in TopologicalSorter(needs).static_order():
            found[task] = max((found[each] + seconds(each) for each in needs[task]), default=0.0)
        return found


def pipeline(stages: int, microbatches: int, first: int = 0) -> TaskGraph:
    """Return the tasks of a pipeline of one layer per stage, on its devices, in no order yet.

    `first`: number of layers before stage 0, which stay whole.
    """
    graph = TaskGraph(first + stages)
    graph.op_trans(lambda task: [task._replace(microbatch=each) for each in range(microbatches)])
    cuts = [*([(0, first)] if first else []), *((first + s, first + s + 1) for s in range(stages))]
    graph.op_trans(lambda task: [task._replace(layers=each) for each in cuts])
    graph.op_assign(lambda task: max(task.layers[0] - first, 0))
    return graph


def _tasks(kind: str, layer: int, microbatches: int) -> list[Task]:
    return [Task(kind, (layer, layer + 1), each) for each in range(microbatches)]


def gpipe(stages: int, microbatches: int) -> TaskGraph:
    """Return GPipe (1811.06965): all forwards, then all backwards."""
    graph = pipeline(stages, microbatches)
    for stage in range(stages):
        graph.op_order([t for kind in "FB" for t in _tasks(kind, stage, microbatches)])
    return graph


def one_f_one_b(stages: int, microbatches: int, first: int = 0) -> TaskGraph:
    """Return 1F1B (2006.09503): stage s has at most stages - s micro-batches in flight."""
    graph = pipeline(stages, microbatches, first)
    for stage in range(stages):
        forwards, backwards = (_tasks(kind, first + stage, microbatches) for kind in "FB")
        graph.op_order(forwards)
        graph.op_order(backwards)
        ahead = stages - 1 - stage
        for microbatch, backward in enumerate(backwards):
            if microbatch + ahead < microbatches:
                graph.op_order([forwards[microbatch + ahead], backward])
            if microbatch + ahead + 1 < microbatches:
                graph.op_order([backward, forwards[microbatch + ahead + 1]])
    return graph


def interlaced(stages: int, microbatches: int) -> TaskGraph:
    """Return 1F1B with an embedding whose parts run on all devices between the stages' tasks.

    A part of the forward comes before the task that a device starts no earlier than stage 0 starts
    its forward, a part of the backward accordingly. So all devices run the parts in one order, and
    their collectives cannot wait for each other.
    """
    plain = one_f_one_b(stages, microbatches)
    starts = plain.starts(lambda task: 1.0)
    graph = pipeline(stages, microbatches, first=1)

    def divided(task: Task) -> list[Task]:
        embeds = task.layers == (0, 1)
        return [task._replace(part=each) for each in range(stages)] if embeds else [task]

    def device(task: Task) -> int:
        return task.layers[0] - 1 if task.part is None else task.part

    def moment(task: Task) -> tuple[float, int]:
        own = task._replace(layers=(0, 1), part=None)
        if task.part is None:
            return starts[own._replace(layers=(task.layers[0] - 1, task.layers[0]))], 2
        return (starts[own], 1) if task.kind == "F" else (starts[own] + 1.0, 0)

    graph.op_trans(divided)
    graph.op_assign(device)
    for each in range(stages):
        own = [task for task in graph.tasks if graph.device[task] == each]
        graph.op_order(sorted(own, key=moment))
    return graph


def as_schedule(graph: TaskGraph, name: str) -> Schedule:
    """Return a pipeline's tables as a schedule of the package; every layer is a stage."""
    tables = graph.tables()
    return Schedule(
        name=name,
        placement=loop(len(tables)),
        microbatches=len({task.microbatch for task in graph.tasks}),
        ops=tuple(
            packed(pack(Kind[t.kind], t.layers[0], t.microbatch or 0) for t in table)
            for table in tables
        ),
    )


def co_shard(mlp: MLP, parts: int) -> Callable[[Tensor], Tensor]:
    """Return an MLP that runs in parts of its width on one device, each recomputed in the
    backward: the memory of activations is that of one part.

    Raises:
        ConfigError: a width that the parts do not divide.
    """
    width = mlp.up.out_features
    if width % parts:
        raise ConfigError(f"co-shard: {parts} parts do not divide a width of {width}")

    def part(x: Tensor, at: slice) -> Tensor:
        wide = F.gelu(F.linear(x, mlp.up.weight[at], mlp.up.bias[at]))
        return F.linear(wide, mlp.down.weight[:, at])

    def run(x: Tensor) -> Tensor:
        y = mlp.down.bias.expand_as(x)
        for first in range(0, width, width // parts):
            at = slice(first, first + width // parts)
            y = y + checkpoint(part, x, at, use_reentrant=False)
        return y

    return run
