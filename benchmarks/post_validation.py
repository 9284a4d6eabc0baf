"""The bubble that post-validation removes: ``python benchmarks/post_validation.py``.

Waiting for the global gradient norm makes every step as long as the schedule's makespan. Without
the wait, steps follow each other as closely as their operations allow. Real training steps of a
small model run one after the other, once with ``optimizer.post_validation`` and once without. Each
operation sleeps until it has lasted a given time, so four ranks show their true bubbles on two
cores. The simulator knows these times: it predicts the step that waits by the makespan, the other
by the pace of many steps in one list. Both trainings must give the same losses and norms.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from common import Result, parser, report
from timed_operations import configured, lasting, rows

from megapipe import TrainStep
from megapipe.config.config import Config
from megapipe.distributed.mesh import Grid
from megapipe.layout.layout import Layout
from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import build
from megapipe.schedule.ir import MICROBATCH_SHIFT, Kind, Schedule, packed
from megapipe.schedule.timing.simulate import simulate
from megapipe.testing import World, run_world
from megapipe.train.update import StepResult

WARM_UP = 2
"""Steps before the pace is measured."""
SPEED, SAVED, SLACK = 0.96, 0.9, 1.02
"""Least share of the predicted pace, and of the predicted saving; most of the predicted ratio."""


@dataclass(frozen=True)
class Case:
    """One schedule; every F, I and W takes `seconds`."""

    name: str
    ranks: int
    microbatches: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.name}, p={self.ranks}, m={self.microbatches}, F=I=W"

    def schedule(self) -> Schedule:
        return build(self.name, ranks=self.ranks, microbatches=self.microbatches)

    @property
    def cost(self) -> Cost:
        return Cost(F=self.seconds, I=self.seconds, W=self.seconds)

    def configure(self, steps: int, *, trust: bool) -> tuple[Config, Layout]:
        return configured(
            self.ranks,
            layers=self.schedule().placement.stages,
            microbatches=self.microbatches,
            steps=steps,
            pipeline={"schedule": self.name},
            optimizer={"max_grad_norm": 1e6, "post_validation": trust, "warmup_steps": 0},
        )


class Pace(NamedTuple):
    """Pace of training, in seconds per step."""

    waiting: float
    """Seconds with the norm before the update."""
    trusting: float
    """Seconds with the norm after it."""

    @property
    def saved(self) -> float:
        return self.waiting - self.trusting

    @property
    def ratio(self) -> float:
        return self.trusting / self.waiting


class Trained(NamedTuple):
    """One rank's steps."""

    ends: list[float]
    """Time at which each ended, on the clock that the ranks share."""
    results: list[StepResult]


def train(world: World, case: Case, steps: int) -> tuple[Trained, Trained]:
    """Train with the wait, and without."""
    waiting, trusting = (train_one(world, case, steps, trust=trust) for trust in (False, True))
    return waiting, trusting


def train_one(world: World, case: Case, steps: int, *, trust: bool) -> Trained:
    config, layout = case.configure(steps, trust=trust)
    mesh = world.mesh(Grid(pp=case.ranks))
    with lasting(dict.fromkeys((Kind.F, Kind.I, Kind.W), case.seconds), mesh):
        step = TrainStep(config, layout, mesh)
    ends, results = [], []
    for index in range(steps):
        results += step.train(index, rows)
        ends.append(time.perf_counter())
    results += step.settle()
    assert step.post_validation is None or step.post_validation.undone == 0
    return Trained(ends, results)


def chained(schedule: Schedule, steps: int) -> Schedule:
    """Chain the operations of several steps, one after the other on each rank."""
    step = schedule.microbatches << MICROBATCH_SHIFT
    return replace(
        schedule,
        microbatches=steps * schedule.microbatches,
        ops=tuple(
            packed(code + i * step for i in range(steps) for code in ops) for ops in schedule.ops
        ),
        direction=schedule.direction and steps * schedule.direction,
        sizes=schedule.sizes and steps * schedule.sizes,
    )


def pace(ends: Sequence[Sequence[float]]) -> float:
    """Return seconds per step, the median after the warm-up of the ranks' means;
    ends[rank][step]."""
    steps = list(zip(*ends, strict=True))
    times = [statistics.fmean(step) for step in steps[WARM_UP - 1 :]]
    return statistics.median(after - before for before, after in pairwise(times))


def predicted(case: Case, steps: int) -> Pace:
    schedule = case.schedule()
    alone, many = simulate(schedule, case.cost), simulate(chained(schedule, steps), case.cost)
    lengths = [len(ops) for ops in schedule.ops]
    ends = [
        [float(own[(i + 1) * length - 1]) for i in range(steps)]
        for own, length in zip(many.ends, lengths, strict=True)
    ]
    return Pace(float(alone.makespan), pace(ends))


def measured(case: Case, steps: int) -> Pace:
    timeout_s = 60 + 4 * steps * len(case.schedule().ops[0]) * case.seconds
    ranks = run_world(case.ranks, train, case, steps, timeout_s=timeout_s)
    for waiting, trusting in ranks:
        assert len(waiting.results) == steps
        assert waiting.results == trusting.results, "not the same training"
    waiting_s, trusting_s = (pace([rank[mode].ends for rank in ranks]) for mode in (0, 1))
    return Pace(waiting_s, trusting_s)


def claims(case: Case, steps: int) -> list[Result]:
    wanted, found = predicted(case, steps), measured(case, steps)
    return [
        Result(
            claim=f"{case}: time per step",
            value=found.ratio,
            target=SLACK * wanted.ratio,
            unit="x",
            peer=f"waiting for the norm, {found.waiting:.3f} s",
        ),
        Result(
            claim=f"{case}: time saved",
            value=found.saved / wanted.saved,
            target=SAVED,
            unit="x",
            peer=f"simulator, {wanted.saved:.3f} s",
            at_least=True,
        ),
        Result(
            claim=f"{case}: speed",
            value=wanted.trusting / found.trusting,
            target=SPEED,
            unit="x",
            peer=f"simulator, {wanted.trusting:.3f} s",
            at_least=True,
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--ms", type=float, default=20.0, help="each operation (20 ms)")
    options.add_argument("--steps", type=int, default=8, help="timed steps (8)")
    given = options.parse_args(argv)
    if given.steps < 1 or given.ms <= 0:
        options.error("--steps must be at least 1 and --ms above 0")
    cases = [Case(name, 4, 8, given.ms / 1e3) for name in ("zb_2p", "zb_v")]
    steps = WARM_UP + given.steps
    if given.quick:
        cases, steps = [Case("zb_2p", 2, 4, 0.001)], WARM_UP + 1
    results = [result for case in cases for result in claims(case, steps)]
    report("Post-validation", results, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
