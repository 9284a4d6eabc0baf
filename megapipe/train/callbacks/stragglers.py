"""``log.straggler_window``: scores of slow ranks, and lines about stragglers."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from statistics import median

import torch

from megapipe.distributed.mesh import ParallelMesh
from megapipe.schedule.ir import Schedule
from megapipe.schedule.timing.simulate import simulate
from megapipe.train.callbacks.callback import Callback, Run, Step
from megapipe.train.compute_times import ComputeTimes
from megapipe.watch.stragglers import Change, Score, Scorer, Stragglers, TimingWindow

SETTLING = 5
"""Number of first steps of a start or schedule that are not measured: kernels are compiled then."""


class StragglerWatch(Callback):
    """Scores the ranks of `mesh` in timing windows of `every` steps; never if `every` is 0 or there
    is one rank.

    Recorded or profiled steps are not measured. The loop runs each step within :meth:`timed`.
    """

    def __init__(self, mesh: ParallelMesh, every: int) -> None:
        self._every = every if mesh.world > 1 else 0
        self._own = ComputeTimes(mesh.journal.own_time, mesh.device)
        self._stragglers = Stragglers()
        self._schedule: Schedule | None = None
        self._settling = SETTLING
        self._counts = False
        """Whether the current step is measured."""
        self._empty()
        self.slowest: Score | None = None
        """Largest straggler score, on rank 0 after the last step of a timing window; else None."""

    def begin(self, run: Run) -> None:
        if self._every:
            process = f"process {os.getpid()} on {socket.gethostname()}"
            run.mesh.store.set(_key(run.mesh.rank), process)
            self._settle(run)

    @contextlib.contextmanager
    def timed(self, step: Step) -> Iterator[None]:
        """Measure compute time in a step, except in the first, recorded or profiled steps."""
        self._counts = self._every > 0 and not (self._settling or step.record or step.profile)
        with self._own.step() if self._counts else contextlib.nullcontext():
            yield

    def after_step(self, run: Run, step: Step) -> None:
        self.slowest = None
        if run.train_step.schedule is not self._schedule:
            self._settle(run)
        elif self._counts:
            self._take(run, step)
        else:
            self._settling = max(0, self._settling - 1)

    def after_rewind(self, run: Run, step: int) -> None:
        self._settle(run)

    def _settle(self, run: Run) -> None:
        """Restart the measurement, with the current schedule."""
        self._settling = SETTLING
        self._own.drop()
        self._empty()
        schedule = run.train_step.schedule
        if self._every and run.mesh.rank == 0 and schedule is not self._schedule:
            self._scorer = _scorer(run)
        self._schedule = schedule

    def _empty(self) -> None:
        self._first: int | None = None
        """First step of the timing window."""
        self._steps = 0
        self._own_s: list[float] = []
        """Compute time of this rank in each step of the timing window, as far as it is known."""
        self._step_s: list[float] = []
        """Total time of each step of the timing window."""

    def _take(self, run: Run, step: Step) -> None:
        self._first = self._first or step.number
        self._steps += 1
        self._own_s += self._own.known()
        self._step_s += [result.seconds for result in step.results]
        if self._steps == self._every:
            self._judge(run, self._first)
            self._empty()

    def _judge(self, run: Run, first: int) -> None:
        """Score the ranks by the timing window that begins at step `first`. Collective."""
        own = TimingWindow.of(self._own_s) if self._own_s else TimingWindow(0.0, 0.0, 0)
        numbers = [round(1e9 * own.seconds), round(1e9 * own.spread), own.steps]
        windows = [
            TimingWindow(seconds / 1e9, spread / 1e9, steps)
            for seconds, spread, steps in run.mesh.gather_numbers(torch.tensor(numbers)).tolist()
        ]
        known = all(window.steps for window in windows) and self._step_s
        if run.mesh.rank > 0 or not known:
            return
        scores = self._scorer.scores(windows)
        self.slowest = max(scores, key=lambda score: score.value)
        for change in self._stragglers.changes(first, self._every, scores):
            run.note(_describe(run, change, median(self._step_s)))


def _scorer(run: Run) -> Scorer:
    """Build the scorer of all ranks from their stages and the FLOPs of their operations."""
    step, mesh = run.train_step, run.mesh
    busy = list(map(float, simulate(step.schedule, run.layout.cost).busy))
    stages, work = [], []
    for rank in range(mesh.world):
        pp = mesh.grid.coordinates_of(rank).pp
        runs = range(step.placement.ranks) if run.layout.in_process else [pp]
        stages.append(tuple(step.placement.stages_of(each) for each in runs))
        work.append(sum(busy[each] for each in runs))
    return Scorer(stages, work)


def _key(rank: int) -> str:
    """Return the store key of a rank's process id and host name."""
    return f"megapipe/stragglers/{rank}"


def _describe(run: Run, change: Change, step_s: float) -> str:
    """Describe in one line how the straggler status of a rank has changed."""
    score, mesh = change.score, run.mesh
    process = mesh.store.get(_key(score.rank)).decode()
    rank = f"rank {score.rank} ({mesh.grid.coordinates_of(score.rank).words}; {process})"
    others = "other ranks would need for its stages" if score.alone else "its peers"
    compared = f"it computes {score.value:.2f} times as long as {others}"
    if change.what == "fine":
        return f"{rank} is no longer a straggler: since step {change.since} {compared}"
    lost = min(1.0, (score.own_s - score.expected_s) / step_s)
    return (
        f"{rank} is {'still ' * (change.what == 'still')}a straggler since step {change.since}: "
        f"{compared}, {1e3 * score.own_s:.3g} ms of a step of {1e3 * step_s:.3g} ms and not "
        f"{1e3 * score.expected_s:.3g} ms; up to {lost:.0%} of the job's time is lost by it"
    )
