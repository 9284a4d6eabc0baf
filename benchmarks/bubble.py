"""Measured pipelines against the simulator: ``python benchmarks/bubble.py``.

Stages sleep instead of computing, so eight ranks show their true bubbles on two cores; messages of
64 KiB go through the real channels. The simulator knows the requested sleeps and no latency. If
torch.distributed.pipelining has the schedule, its step is timed in the same processes by turns. The
fastest of several steps counts, and only if every operation ran in the schedule's order, the loss
is right, and as many messages were sent as the schedule needs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch
import torch.distributed as dist
from common import Result, parser, report
from pipelines import TORCH, Ours, Sleeper, Theirs, whole_inputs

from megapipe.distributed.mesh import Grid
from megapipe.engine.recorder import Record, timeline
from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import build, names
from megapipe.schedule.ir import Kind, Schedule
from megapipe.schedule.memory import messages
from megapipe.schedule.timing.simulate import simulate
from megapipe.testing import World, run_world

LENGTH = 8192
"""Values of a row: with two rows per micro-batch a message has 64 KiB."""
UNEVEN = (
    "1f1b",
    "interleaved_1f1b",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "v_half",
    "v_min",
    "zb_1p",
    "zb_2p",
)
"""Schedules that are measured at every setting; all others only at the first."""
WARM_UP = 2


@dataclass(frozen=True)
class Case:
    """One schedule at one setting."""

    name: str
    ranks: int
    microbatches: int
    times: str
    """``F=I=W``, ``I=2F``, or ``one slow stage`` (the middle one takes twice as long)."""
    shortest: float
    """Seconds of the shortest operation."""

    def __str__(self) -> str:
        return f"{self.name}, p={self.ranks}, m={self.microbatches}, {self.times}"

    def schedule(self) -> Schedule:
        return build(self.name, ranks=self.ranks, microbatches=self.microbatches)

    def cost(self, schedule: Schedule) -> Cost:
        """Return the costs of the operations in seconds."""
        smallest = min(schedule.sizes or [Fraction(1)]) / schedule.slices
        unit = self.shortest / float(smallest)
        if self.times != "one slow stage":
            return Cost(F=unit, I=unit * (2 if self.times == "I=2F" else 1), W=unit)
        stages = schedule.placement.stages
        each = tuple(unit * (2 if stage == stages // 2 else 1) for stage in range(stages))
        return Cost(F=each, I=each, W=each)


class Step(NamedTuple):
    """Start and end of a step on a rank, on the clock that the ranks share."""

    start: float
    end: float


class Measured(NamedTuple):
    """Measurements of one rank. `theirs` is empty if torch does not have the schedule."""

    ours: list[Step]
    theirs: list[Step]
    record: Record
    messages: int
    """Messages per step."""
    losses: tuple[float, ...]
    """This rank's share of the loss, ours and theirs."""


def measure(world: World, cases: Sequence[Case], steps: int) -> list[Measured]:
    return [measure_case(world, case, steps) for case in cases]


def measure_case(world: World, case: Case, steps: int) -> Measured:
    mesh = world.mesh(Grid(pp=world.size))
    schedule = case.schedule()
    table = case.cost(schedule).table(schedule.placement.stages)
    mine = schedule.placement.stages_of(world.rank)
    sleepers = [
        {stage: Sleeper([float(row[stage]) for row in table]) for stage in mine} for _ in range(2)
    ]
    ours = Ours(mesh, schedule, LENGTH, sleepers[0])
    sides: list[Ours | Theirs] = [ours]
    if case.name in TORCH:
        args = case.name, schedule.placement, case.microbatches, LENGTH, sleepers[1]
        sides.append(Theirs(world.rank, *args))
    times: list[list[Step]] = [[], []]
    for index in range(WARM_UP + steps):
        for side, step in enumerate(sides):
            for sleeper in sleepers[side].values():
                sleeper.on = index >= WARM_UP
            dist.barrier()
            start = time.perf_counter()
            step.step()
            times[side].append(Step(start, time.perf_counter()))
    for side in range(len(sides)):
        for stage, sleeper in sleepers[side].items():
            _check_ran(schedule, stage, world.rank, sleeper, WARM_UP + steps)
    assert ours.recorder is not None
    return Measured(
        ours=times[0][WARM_UP:],
        theirs=times[1][WARM_UP:],
        record=ours.recorder.record(),
        messages=ours.messages() // (WARM_UP + steps),
        losses=tuple(side.loss() for side in sides),
    )


def _check_ran(schedule: Schedule, stage: int, rank: int, sleeper: Sleeper, steps: int) -> None:
    """Check that the stage ran a forward and both halves of a backward of every micro-batch and
    slice."""
    homes = schedule.placement.table
    here = sum(
        homes[schedule.direction_of(microbatch)][stage] == rank
        for microbatch in range(schedule.microbatches)
    )
    for kind in (Kind.F, Kind.I, Kind.W):
        ran, wanted = sleeper.ops[kind], here * schedule.slices * steps
        assert ran == wanted, f"stage {stage}: {ran} {kind.name} ran instead of {wanted}"


def run(ranks: int, cases: Sequence[Case], steps: int) -> Iterator[Result]:
    """Yield the claims on cases of one number of ranks."""
    predicted = [
        float(simulate(schedule, case.cost(schedule)).makespan)
        for case in cases
        for schedule in [case.schedule()]
    ]
    timeout_s = 60 + 10 * len(cases) + 4 * steps * sum(predicted)
    by_rank = run_world(ranks, measure, cases, steps, timeout_s=timeout_s)
    for case, seconds, measured in zip(cases, predicted, zip(*by_rank, strict=True), strict=True):
        _check(case, measured)
        ours = fastest(rank.ours for rank in measured)
        yield Result(
            claim=f"{case}: speed",
            value=seconds / ours,
            target=0.97 if case.name == "1f1b" else 0.96,
            unit="x",
            peer=f"simulator, {seconds:.3f} s",
            at_least=True,
        )
        if case.name in TORCH:
            theirs = fastest(rank.theirs for rank in measured)
            peer = f"torch, {theirs:.3f} s"
            yield Result(f"{case}: time", ours / theirs, 1.01, "x", peer)


def _check(case: Case, measured: Sequence[Measured]) -> None:
    """Check that the step was the schedule's: its order (or timeline refuses), messages and
    loss."""
    schedule = case.schedule()
    timeline(schedule, [rank.record for rank in measured])
    sent, wanted = sum(rank.messages for rank in measured), messages(schedule)
    assert sent == wanted, f"{case}: {sent} messages instead of {wanted}"
    loss = float(whole_inputs(case.microbatches, LENGTH).sum(dtype=torch.float64))
    for losses in zip(*(rank.losses for rank in measured), strict=True):
        assert sum(losses) == loss, f"{case}: loss {sum(losses)} instead of {loss}"


def fastest(ranks: Iterable[Sequence[Step]]) -> float:
    """Return seconds from the first rank's start to the last one's end, for the fastest step."""
    return min(
        max(step.end for step in steps) - min(step.start for step in steps)
        for steps in zip(*ranks, strict=True)
    )


def cases(*, quick: bool, shortest: float) -> list[Case]:
    if quick:
        return [Case(name, 2, 4, "F=I=W", 0.001) for name in ("1f1b", "zb_v")]
    chosen = []
    for name in names():
        case = Case(name, 4, 8, "F=I=W", shortest)
        try:
            case.schedule()
        except ScheduleError:
            continue
        chosen.append(case)
    for ranks, microbatches, times in (
        (4, 16, "I=2F"),
        (4, 16, "one slow stage"),
        (8, 32, "F=I=W"),
    ):
        chosen += [Case(name, ranks, microbatches, times, shortest) for name in UNEVEN]
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--only", metavar="SCHEDULE", help="measure this schedule alone")
    options.add_argument("--ms", type=float, default=20.0, help="shortest operation (20 ms)")
    options.add_argument("--steps", type=int, default=3, help="timed steps per case (3)")
    given = options.parse_args(argv)
    if given.steps < 1 or given.ms <= 0:
        options.error("--steps must be at least 1 and --ms above 0")
    chosen = [
        case
        for case in cases(quick=given.quick, shortest=given.ms / 1e3)
        if given.only in (None, case.name)
    ]
    results: list[Result] = []
    for ranks in sorted({case.ranks for case in chosen}):
        results += run(ranks, [case for case in chosen if case.ranks == ranks], given.steps)
    report("Bubble", results, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
