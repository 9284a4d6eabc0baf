"""One judge of all plans: the project's simulator with the problem's costs.

A stage of r replicas splits every micro-batch evenly over them. Neighbouring units of a stage with
different tensor-parallel degrees gather samples in the forward or in the backward. Messages, and
the all-reduce of a stage's gradients, run beside operations as the schedule allows. Optimizer
states are sharded over replicas. The update is not counted: it takes about as long in each plan.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import NamedTuple

from megapipe.plan.algorithms.pipeline import PlannedPipeline, PlannedStage
from megapipe.plan.algorithms.problem import Problem, UnitCost
from megapipe.schedule.cost import Cost
from megapipe.schedule.ir import Kind, Schedule
from megapipe.schedule.load import load
from megapipe.schedule.timing.simulate import Timeline, simulate


class StageLoad(NamedTuple):
    """Time and memory of a stage on one of its devices."""

    forward: float
    """Seconds of a micro-batch."""
    input_grad: float
    """Seconds of a micro-batch, with the recomputed forward."""
    weight_grad: float
    reduce: float
    """Seconds of the all-reduces of the stage's gradients."""
    fixed: float
    """Bytes of weights, gradients and optimizer states."""
    saved: float
    """Bytes that a micro-batch in flight holds."""
    rebuilt: float
    """Bytes that recomputing the largest unit takes besides `saved`."""

    @property
    def backward(self) -> float:
        """Seconds of the whole backward."""
        return self.input_grad + self.weight_grad


class Judged(NamedTuple):
    """Time and memory of a plan."""

    seconds: float
    """Seconds of a step without the update."""
    peaks: tuple[float, ...]
    """Peak bytes of a device of each pipeline rank."""
    fits: bool
    """Whether all peaks are within the memory of a device."""
    timeline: Timeline


def judge(problem: Problem, plan: PlannedPipeline) -> Judged:
    """Simulate a plan's schedule; return the seconds of a step and the peak bytes.

    Raises:
        ValueError: a plan that does not suit the problem.
        ScheduleError: the plan's schedule does not support its sizes.
    """
    if plan.microbatches != problem.microbatches:
        problem = problem.with_microbatches(plan.microbatches)
    if (mistake := plan.mistake(problem)) is not None:
        raise ValueError(mistake)
    schedule = schedule_of(plan)
    loads = [stage_load(problem, each) for each in plan.stages]
    latency = dict[tuple[int, int], float]()
    for before, after in pairwise(plan.stages):
        source, target = plan.groups.index(before.devices), plan.groups.index(after.devices)
        if source != target:
            seconds = message_seconds(problem, before, after)
            for pair in ((source, target), (target, source)):
                latency[pair] = max(seconds, latency.get(pair, 0.0))
    cost = Cost(
        F=tuple(each.forward for each in loads),
        I=tuple(each.input_grad for each in loads),
        W=tuple(each.weight_grad for each in loads),
        reduce=tuple(each.reduce for each in loads),
        latency=latency,
    )
    timeline = simulate(schedule, cost)
    peaks = tuple(_peak(schedule, rank, loads) for rank in range(len(plan.groups)))
    fits = max(peaks) <= problem.memory
    return Judged(float(timeline.makespan), peaks, fits, timeline)


def schedule_of(plan: PlannedPipeline) -> Schedule:
    """Return the schedule of a plan.

    Raises:
        ValueError: its placement differs from that of the plan's stages.
    """
    schedule, ranks = plan.schedule, len(plan.groups)
    row = tuple(plan.groups.index(each.devices) for each in plan.stages)
    if isinstance(schedule, str):
        chunks = {} if len(row) == ranks else {"chunks": len(row) // ranks}
        schedule = load(schedule, ranks=ranks, microbatches=plan.microbatches, **chunks)
    if schedule.placement.table[0] != row or schedule.whole_microbatches != plan.microbatches:
        raise ValueError(f"schedule {schedule.name} does not have stages on ranks {row}")
    return schedule


def stage_load(problem: Problem, stage: PlannedStage) -> StageLoad:
    """Return the time and the memory of a stage on one of its devices."""
    forward = first = second = reduce = fixed = saved = rebuilt = 0.0
    begin, count = stage.first, len(stage.devices)
    for choice, alike in groupby(stage.choices):
        end, replicas = begin + len(list(alike)), count // choice.tp
        cost = problem.cost(begin, end, choice.tp, replicas)
        forward += cost.forward
        first += cost.input_grad + choice.recompute * cost.recompute
        second += cost.weight_grad
        reduce += problem.links.all_reduce(cost.gradients, stage.devices[:: choice.tp])
        fixed += fixed_bytes(cost, replicas)
        saved += cost.saved_recompute if choice.recompute else cost.saved
        if choice.recompute:
            each = (problem.cost(at, at + 1, choice.tp, replicas) for at in range(begin, end))
            rebuilt = max(rebuilt, *(own.saved - own.saved_recompute for own in each))
        if end < stage.last:
            gathered, spread = resharding_seconds(problem, stage, end - 1)
            forward, first = forward + gathered, first + spread
        begin = end
    return StageLoad(forward, first, second, reduce, fixed, saved, rebuilt)


def fixed_bytes(cost: UnitCost, replicas: int) -> float:
    """Return the bytes that units take on a device besides activations."""
    sharded = cost.states + (cost.reduced if replicas > 1 else 0.0)
    return cost.weights + sharded / replicas


def message_seconds(problem: Problem, before: PlannedStage, after: PlannedStage) -> float:
    """Return the seconds of a micro-batch's message between two stages on different devices."""
    unit = before.last - 1
    tp, next_tp = before.choices[-1].tp, after.choices[0].tp
    replicas = min(before.replicas(unit), after.replicas(unit + 1))
    size = problem.cost(unit, unit + 1, tp, replicas).message
    return problem.links.message(size, before.devices[::tp], after.devices[::next_tp])


def resharding_seconds(problem: Problem, stage: PlannedStage, unit: int) -> tuple[float, float]:
    """Return the seconds in which the forward and the backward move values between a unit and the
    next one, for a micro-batch. Replicas that have become fewer gather each other's samples in the
    forward, replicas that have become more gather gradients in the backward."""
    tp, next_tp = (stage.choices[at - stage.first].tp for at in (unit, unit + 1))
    if tp == next_tp:
        return 0.0, 0.0
    few, many = max(tp, next_tp), min(tp, next_tp)
    size = problem.cost(unit, unit + 1, tp, len(stage.devices) // few).message
    seconds = problem.links.all_reduce(size, stage.devices[:few:many]) / 2
    return (seconds, 0.0) if next_tp > tp else (0.0, seconds)


def _peak(schedule: Schedule, rank: int, loads: list[StageLoad]) -> float:
    """Return the peak bytes of a rank: the program's order says what is in flight at once."""
    held = most = 0.0
    for op in schedule.rank_ops(rank):
        own = loads[op.stage]
        if op.kind == Kind.F:
            held += own.saved
        most = max(most, held + (own.rebuilt if op.kind in (Kind.B, Kind.I) else 0.0))
        if op.kind in (Kind.B, Kind.W):
            held -= own.saved
    return most + sum(loads[stage].fixed for stage in schedule.placement.stages_of(rank))
