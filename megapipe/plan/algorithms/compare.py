"""Choices of published planners for one problem, and whether the trainer can run them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

from megapipe.errors import ScheduleError
from megapipe.plan.algorithms.judge import Judged, fixed_bytes, judge
from megapipe.plan.algorithms.pipeline import PlannedPipeline, PlannedStage
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.registry import Algorithm
from megapipe.plan.algorithms.stages import uniform_shapes
from megapipe.schedule.generators import names
from megapipe.schedule.ir import Schedule
from megapipe.schedule.load import load

Keys = dict[str, str | int | bool | list[int]]
"""Configuration keys with their values."""


class Choice(NamedTuple):
    """A planner's choice for a problem."""

    algorithm: Algorithm
    plan: PlannedPipeline | None
    """None: the algorithm finds no plan."""
    judged: Judged | None
    obstacle: str | None
    """Why the trainer cannot run the plan; None if it can."""

    @property
    def seconds(self) -> float:
        """Seconds of a step; infinite if there is no plan, or if it does not fit."""
        return self.judged.seconds if self.judged is not None and self.judged.fits else inf


def choose(algorithm: Algorithm, problem: Problem) -> Choice:
    """Run a planner. Unless it chooses the number of micro-batches itself, run it for each of
    :func:`microbatch_counts` and take the fastest plan that fits, else the smallest one."""
    counts = microbatch_counts(problem)
    if algorithm.enumerates:
        counts = counts[:1]
    found = list[tuple[bool, float, int, PlannedPipeline, Judged]]()
    for count in counts:
        plan = algorithm.plan(problem.with_microbatches(count))
        if plan is not None:
            judged = judge(problem, plan)
            value = judged.seconds if judged.fits else max(judged.peaks)
            found.append((not judged.fits, value, len(found), plan, judged))
    if not found:
        return Choice(algorithm, None, None, None)
    *_, plan, judged = min(found, key=lambda each: each[:3])
    return Choice(algorithm, plan, judged, obstacle(problem, plan))


def microbatch_counts(problem: Problem) -> Sequence[int]:
    """Return the numbers of micro-batches that suit uniform pipelines best in closed form: two
    with any tensor-parallel degree, and one with the smallest degree alone."""
    batch = problem.microbatches * problem.samples
    if not problem.whole_samples:
        return [problem.microbatches]
    most = 4 * problem.devices
    sizes = [n for n in range(1, most + 1) if n & (n - 1) == 0 or n == problem.samples]
    counts = [int(batch // n) for n in sizes if batch % n == 0]
    every = [problem.with_microbatches(count) for count in counts]
    found = sorted(every, key=lambda each: _uniform_seconds(each, each.tensor_sizes))[:2]
    found.append(min(every, key=lambda each: _uniform_seconds(each, each.tensor_sizes[:1])))
    return list(dict.fromkeys(each.microbatches for each in found))


def _uniform_seconds(problem: Problem, sizes: Sequence[int]) -> float:
    """Return the time of the best uniform pipeline whose stages all cost the mean."""
    m, least = problem.microbatches, inf
    for shape in uniform_shapes(problem, sizes):
        cost = problem.cost(0, problem.length, shape.tp, shape.replicas)
        fixed = fixed_bytes(cost, shape.replicas) / shape.stages
        for saved, again in ((cost.saved, 0.0), (cost.saved_recompute, cost.recompute)):
            if fixed + min(m, shape.stages) * saved / shape.stages > problem.memory:
                continue
            period = (cost.forward + cost.backward + again) / shape.stages
            reduce = problem.links.all_reduce(
                cost.gradients / shape.stages, range(0, shape.devices, shape.tp)
            )
            least = min(least, (m + shape.stages - 1) * period + reduce)
    return least


def obstacle(problem: Problem, plan: PlannedPipeline) -> str | None:
    """Say why the trainer cannot run a plan; None if it can."""
    if not set(plan.cuts) <= set(problem.block_cuts):
        return "it cuts within a layer"
    if not all(each.is_uniform for each in plan.stages):
        return "tp differs within a stage"
    if len({each.choices[0].tp for each in plan.stages}) > 1:
        return "tp differs by stage"
    if len({len(each.devices) for each in plan.stages}) > 1:
        return "replicas differ by stage"
    if isinstance(plan.schedule, Schedule) and not _is_registered(plan.schedule, plan):
        return "its order of operations is not a registered schedule"
    size = len(plan.stages[0].devices)
    in_order = [tuple(range(n * size, (n + 1) * size)) for n in range(len(plan.groups))]
    if list(plan.groups) != in_order:
        return "its devices are not in the order of ranks"
    return None


def _is_registered(schedule: Schedule, plan: PlannedPipeline) -> bool:
    """Whether a schedule is the one that its name stands for."""
    if schedule.name not in names():
        return False
    chunks, rest = divmod(len(plan.stages), len(plan.groups))
    if rest:
        return False
    sizes = {"ranks": len(plan.groups), "microbatches": plan.microbatches}
    try:
        made = load(schedule.name, **sizes, **({"chunks": chunks} if chunks > 1 else {}))
    except ScheduleError:
        return False
    return made.placement == schedule.placement and made.ops == schedule.ops


def keys_of(problem: Problem, plan: PlannedPipeline) -> Keys:
    """Return the configuration keys of a plan that the trainer can run."""
    ranks, first = len(plan.groups), plan.stages[0]
    replicas, tp = first.replicas(0), first.choices[0].tp
    samples = problem.samples * problem.microbatches / plan.microbatches
    found: Keys = {
        "parallel.dp": replicas,
        "parallel.tp": tp,
        "parallel.pp": ranks,
        "parallel.sequence_parallel": tp > 1,
        "train.microbatch": round(samples / replicas),
    }
    if ranks > 1:
        found["pipeline.schedule"] = _name(plan)
        found["pipeline.stage_layout"] = "|".join(_layout(problem, each) for each in plan.stages)
        if len(plan.stages) > ranks:
            found["pipeline.chunks"] = len(plan.stages) // ranks
    again = [sum(_recomputes(problem, each)) for each in plan.stages]
    found["activations.policy"] = "full" if any(again) else "keep"
    if any(again):
        found["activations.num_blocks"] = again if len(again) > 1 else again[0]
    return found


def _name(plan: PlannedPipeline) -> str:
    return plan.schedule if isinstance(plan.schedule, str) else plan.schedule.name


def _layers(problem: Problem, stage: PlannedStage) -> Iterator[tuple[int, int]]:
    """Yield the layers of a stage as units: the first one, and the one after the last."""
    for first, last in pairwise(problem.block_cuts):
        if stage.first <= first and last <= stage.last:
            yield first, last


def _recomputes(problem: Problem, stage: PlannedStage) -> Iterator[bool]:
    """Yield whether each layer of a stage recomputes; a layer does if one of its halves does."""
    for first, last in _layers(problem, stage):
        own = stage.choices[first - stage.first : last - stage.first]
        yield any(choice.recompute for choice in own)


def _layout(problem: Problem, stage: PlannedStage) -> str:
    """Return a stage as a part of ``pipeline.stage_layout``."""
    layers = len(list(_layers(problem, stage)))
    parts = ["E"] * (stage.first == 0) + [f"L*{layers}"] * bool(layers)
    return " ".join(parts + ["H"] * (stage.last == problem.length))


def words(problem: Problem, plan: PlannedPipeline) -> str:
    """Describe a plan: its stages with their units, replicas and tensor-parallel degrees, from the
    first to the last, and its micro-batches."""
    stages = [
        (
            f"{len(each.choices)}",
            *_ranges(each.replicas(unit) for unit in range(each.first, each.last)),
            *_ranges(choice.tp for choice in each.choices),
        )
        for each in plan.stages
    ]
    units = _joined([each[0] for each in stages])
    dp, tp = (_joined([each[column] for each in stages]) for column in (1, 2))
    again = _joined([str(sum(c.recompute for c in each.choices)) for each in plan.stages])
    name = _name(plan)
    said = [f"{len(plan.stages)} x {units} units", f"dp {dp}", f"tp {tp}"]
    if again != "0":
        said.append(f"recompute {again}")
    said.append(f"{plan.microbatches} micro-batches")
    return ", ".join([*said, name] if len(plan.stages) > 1 else said)


def _ranges(values: Iterable[int]) -> tuple[str]:
    """Return values as their range, as in 1 or 1..8."""
    every = sorted(set(values))
    return (str(every[0]) if len(every) == 1 else f"{every[0]}..{every[-1]}",)


def _joined(values: Sequence[str]) -> str:
    """Join values, equal neighbours once, as in 8,7x6,9."""
    if len(set(values)) == 1:
        return values[0]
    found = list[tuple[str, int]]()
    for each in values:
        if found and found[-1][0] == each:
            found[-1] = each, found[-1][1] + 1
        else:
            found.append((each, 1))
    return ",".join(each if count == 1 else f"{each}x{count}" for each, count in found)
