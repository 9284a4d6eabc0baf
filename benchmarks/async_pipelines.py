"""The bubble that training without a flush does not have: ``python benchmarks/async_pipelines.py``.

Real training of a tiny model whose operations sleep (:mod:`timed_operations`), so eight ranks show
their true idle times on two cores. Each policy trains in the processes in which synchronous 1F1B
has just been timed. The simulator knows the requested sleeps, and neither latency nor updates. It
predicts the time of a window in the steady state and that of a pause. If messages have a latency,
each is held back at its receiver until it is that old. The time that a message takes only to wake
up a waiting process is measured separately.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from common import Result, parser, report
from timed_operations import configured, lasting, rows
from torch import Tensor

from megapipe import TrainStep
from megapipe.config.config import Config
from megapipe.distributed.mesh import Grid
from megapipe.engine import pipeline
from megapipe.engine.channels import ProcessGroupChannels
from megapipe.layout.layout import Layout
from megapipe.schedule.async_schedules.async_schedule import AsyncSchedule
from megapipe.schedule.async_schedules.times import WindowTimes, window_times
from megapipe.schedule.cost import Cost
from megapipe.schedule.ir import Kind, Op
from megapipe.testing import World, run_world

WARM_UP = 2
"""Windows before timing starts, in addition to those in which the pipeline fills."""
APART = 4
"""Windows from one pause to the next."""
MESSAGES = 30
WINDOW, SPEED_UP, PAUSE, LATENCY = 1.03, 0.96, 1.10, 1.01


@dataclass(frozen=True)
class Case:
    """One way to train; each stage takes `seconds` for a forward, and as much for a backward."""

    weights: str
    schedule: str
    ranks: int
    microbatches: int
    seconds: float
    latency: float = 0.0
    """Latency of messages, in seconds."""

    def __str__(self) -> str:
        late = ", late messages" if self.latency else ""
        return f"{self.weights}, {self.schedule}, p={self.ranks}, m={self.microbatches}{late}"

    @property
    def cost(self) -> Cost:
        return Cost(F=self.seconds, I=self.seconds / 2, W=self.seconds / 2)

    @property
    def stages(self) -> int:
        """Number of stages of a rank."""
        return 2 if self.schedule == "two_group" else 1

    def synchronous(self) -> Case:
        """Return the case of 1F1B with as much work on a rank."""
        seconds = self.seconds * self.stages
        return replace(self, weights="synchronous", schedule="1f1b", seconds=seconds)

    def configured(self, steps: int) -> tuple[Config, Layout]:
        whole = self.weights in ("synchronous", "double_buffer")
        return configured(
            self.ranks,
            layers=self.ranks * self.stages,
            microbatches=self.microbatches,
            steps=steps,
            pipeline={"schedule": self.schedule, "weight_versions": self.weights},
            optimizer={"clip_scope": "global" if whole else "stage", "warmup_steps": 0},
        )


class Plan(NamedTuple):
    """Number of windows timed without a pause, and number of pauses."""

    windows: int
    pauses: int


class Trained(NamedTuple):
    """One rank's training."""

    ends: list[float]
    """Time at which each window ended on the rank."""
    losses: list[float]


class OfRank(NamedTuple):
    """Measurements of one rank."""

    message: float
    """Seconds from a send to the end of the receive, median; 0 on ranks that receive none."""
    trained: list[tuple[Trained, Trained]]
    """For each case, its training and the synchronous pipeline with the same work before it."""


def train(world: World, cases: Sequence[Case], plan: Plan, folder: Path) -> OfRank:
    message = way_of_a_message(world, cases[0].seconds)
    trained = [
        (
            train_one(world, case.synchronous(), plan, folder),
            train_one(world, case, plan, folder),
        )
        for case in cases
    ]
    return OfRank(message, trained)


def way_of_a_message(world: World, seconds: float) -> float:
    """Measure messages from rank 0, which sends one every `seconds`, to rank 1."""
    sent, found = torch.zeros(1, dtype=torch.float64), []
    for _ in range(MESSAGES):
        if world.rank == 0:
            time.sleep(seconds)
            sent[0] = time.perf_counter()
            dist.send(sent, 1)
        elif world.rank == 1:
            dist.recv(sent, 0)
            found.append(time.perf_counter() - sent.item())
    dist.barrier()
    return statistics.median(found) if found else 0.0


def train_one(world: World, case: Case, plan: Plan, folder: Path) -> Trained:
    _, layout = case.configured(1)
    stream = layout.async_schedule
    first = _first(stream)
    steps = first + plan.windows
    paused: set[int] = set()
    if stream is not None:
        paused = {steps + i * APART for i in range(plan.pauses)}
        steps += plan.pauses * APART + stream.ahead + 1
    config, layout = case.configured(steps)
    mesh = world.mesh(Grid(pp=case.ranks))
    durations = {Kind.F: case.seconds, Kind.I: case.seconds / 2, Kind.W: case.seconds / 2}
    late = held_back(folder, case) if case.latency else nullcontext()
    with lasting(durations, mesh), late:
        step = TrainStep(config, layout, mesh)
    ends, results = [], []
    mesh.barrier()
    for number in range(steps):
        results += step.train(number, rows, settle=number in paused)
        ends.append(time.perf_counter())
    results += step.settle()
    return Trained(ends, [result.loss for result in results])


def _first(stream: AsyncSchedule | None) -> int:
    """Return the first window whose time counts."""
    return WARM_UP + (0 if stream is None else stream.ahead + 1)


class _Stamping:
    """A sender's end of a channel that writes down when each message is sent."""

    def __init__(self, end: Any, stamps: np.ndarray[Any, Any]) -> None:
        self._end, self._stamps, self._count = end, stamps, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)

    def send(self, message: Op, tensor: Tensor) -> None:
        self._stamps[self._count] = time.perf_counter()
        self._count += 1
        self._end.send(message, tensor)


class _Waiting:
    """A receiver's end that holds each message back until it is `latency` old."""

    def __init__(self, end: Any, stamps: np.ndarray[Any, Any], latency: float) -> None:
        self._end, self._stamps, self._latency, self._count = end, stamps, latency, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)

    def receive(self) -> Tensor:
        tensor: Tensor = self._end.receive()
        due = self._stamps[self._count] + self._latency
        self._count += 1
        time.sleep(max(0.0, due - time.perf_counter()))
        return tensor


def held_back(folder: Path, case: Case) -> mock._patch[Any]:
    """Patch pipelines to get channels with the latency of the case. The ranks share the times of
    messages in files in the folder."""

    def connect(mesh: Any, *given: Any, **options: Any) -> ProcessGroupChannels:
        channels: Any = ProcessGroupChannels(mesh, *given, **options)

        def stamps(source: int, target: int) -> np.ndarray[Any, Any]:
            path = folder / f"{case} {source} to {target}"
            with path.open("a+b") as file:
                file.truncate(8 * 10_000)
            return np.memmap(path, dtype=np.float64, mode="r+")

        own = mesh.pp.index
        for peer, end in channels.outgoing.items():
            channels.outgoing[peer] = _Stamping(end, stamps(own, peer))
        for peer, end in channels.incoming.items():
            channels.incoming[peer] = _Waiting(end, stamps(peer, own), case.latency)
        return channels

    return mock.patch.object(pipeline, "ProcessGroupChannels", connect)


class Measured(NamedTuple):
    """Measured times, in seconds."""

    step: float
    """Time of a step of synchronous 1F1B."""
    window: float
    pause: float
    message: float


def pace(ends: Sequence[float]) -> float:
    return statistics.median(after - before for before, after in pairwise(ends))


def summary(
    case: Case, plan: Plan, ranks: Sequence[tuple[Trained, Trained]], message: float
) -> Measured:
    """Return medians; each window ends at the mean of its ends on the ranks."""
    waiting, streaming = (
        [statistics.fmean(ends) for ends in zip(*(rank[i].ends for rank in ranks), strict=True)]
        for i in (0, 1)
    )
    stream = case.configured(1)[1].async_schedule
    assert stream is not None
    first = _first(stream)
    last = first + plan.windows - 1
    window = pace(streaming[first - 1 : last + 1])
    pauses = [
        streaming[number + 2] - streaming[number - 1] - 3 * window
        for number in range(last + 1, last + 1 + plan.pauses * APART, APART)
    ]
    return Measured(pace(waiting[WARM_UP - 1 :]), window, statistics.median(pauses), message)


def measured(cases: Sequence[Case], plan: Plan) -> Iterator[tuple[Case, Measured]]:
    """Measure the cases of one number of ranks."""
    longest = sum(
        case.microbatches * case.seconds * case.stages * 10 * (plan.windows + APART * plan.pauses)
        for case in cases
    )
    with tempfile.TemporaryDirectory() as folder:
        by_rank = run_world(
            cases[0].ranks, train, cases, plan, Path(folder), timeout_s=120 + longest
        )
    message = max(found.message for found in by_rank)
    trained = zip(*(found.trained for found in by_rank), strict=True)
    losses: dict[Case, list[float]] = {}
    for case, ranks in zip(cases, trained, strict=True):
        found = [trained.losses for _, trained in ranks]
        assert all(each == found[0] for each in found), "ranks do not agree on the losses"
        same = losses.setdefault(replace(case, latency=0.0), found[0])
        assert same == found[0], "late messages change the training"
        yield case, summary(case, plan, ranks, message)


def simulated(case: Case) -> WindowTimes:
    stream = case.configured(1)[1].async_schedule
    assert stream is not None
    return window_times(stream, case.cost)


def claims(cases: Sequence[Case], plan: Plan) -> Iterator[Result]:
    """Yield the claims on the cases of one number of ranks."""
    known: dict[Case, Measured] = {}
    for case, found in measured(cases, plan):
        known[case] = found
        prompt = replace(case, latency=0.0)
        if case.latency and prompt in known:
            without = known[prompt].window
            peer = f"without latency, {without:.4f} s"
            yield Result(f"{case}: window", found.window / without, LATENCY, "x", peer)
            continue
        wanted = simulated(case)
        yield Result(
            claim=f"{case}: window",
            value=found.window / float(wanted.window),
            target=WINDOW,
            unit="x",
            peer=f"simulator, {float(wanted.window):.3f} s; {found.message * 1e3:.1f} ms a message",
        )
        yield Result(
            claim=f"{case}: speed-up",
            value=found.step / found.window,
            target=SPEED_UP * (case.microbatches + case.ranks - 1) / case.microbatches,
            unit="x",
            peer=f"synchronous 1f1b, {found.step:.3f} s",
            at_least=True,
        )
        yield Result(
            claim=f"{case}: pause",
            value=found.pause / float(wanted.pause),
            target=PAUSE,
            unit="x",
            peer=f"simulator, {float(wanted.pause):.3f} s",
        )


def cases(ranks: int, seconds: float) -> list[Case]:
    chosen = []
    for microbatches in (ranks, 2 * ranks):
        chosen += [
            Case(weights, schedule, ranks, microbatches, seconds)
            for weights, schedule in (
                ("stash", "1f1b"),
                ("double_buffer", "1f1b"),
                ("double_group", "two_group"),
            )
        ]
        weights = "stash" if microbatches == ranks else "double_buffer"
        eager = Case(weights, "eager_1f1b", ranks, microbatches, seconds)
        chosen += [eager, replace(eager, latency=seconds / 10)]
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="processes (4 8)")
    options.add_argument("--ms", type=float, default=20.0, help="F and B of a stage (20 ms)")
    options.add_argument("--windows", type=int, default=8, help="timed windows (8)")
    options.add_argument("--pauses", type=int, default=3, help="timed pauses (3)")
    options.add_argument("--only", metavar="WEIGHTS", help="measure this policy alone")
    given = options.parse_args(argv)
    if min(given.ranks) < 2 or given.windows < 1 or given.pauses < 1 or given.ms <= 0:
        options.error("--ranks must be at least 2, --windows and --pauses 1, and --ms above 0")
    plan, ranks, seconds = Plan(given.windows, given.pauses), given.ranks, given.ms / 1e3
    if given.quick:
        plan, ranks, seconds = Plan(2, 1), [2], 0.001
    results: list[Result] = []
    for size in ranks:
        chosen = [case for case in cases(size, seconds) if given.only in (None, case.weights)]
        results += claims(chosen, plan)
    report("Streams", results, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
