"""The share of time that a run makes progress while ranks are killed at random, and a model of it.

The model is that of J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps" (2006), for failures at exponential times; steps between saves are those of J. W.
Young, "A first order approximation to the optimum checkpoint interval" (1974). Its constants are
measured on the same run: the time between kills, from a kill to training, of a step, of a save.
"""

from __future__ import annotations

import math
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megapipe.checkpoint.folders import committed
from tests.campaigns import runs
from tests.campaigns.campaign import Campaign, Figure, Record, limit
from tests.campaigns.runs import Layout
from tests.parity.jobs import ENDLESS, Job

LAYOUT = Layout(4, {"parallel.dp": "2", "parallel.pp": "2"})
MEAN_S = 60.0
"""Mean time between kills."""
KILLS = 20
LEAST = 0.78
POINTS = 0.03
CALIBRATION = 60, 10
"""Steps of the run by which the interval is chosen, and from one save to the next."""


class Costs(NamedTuple):
    """Measurements of a run, in seconds."""

    wall: float
    """Seconds from the end of the first step to that of the last one."""
    steps: int
    """Steps that were done for good in that time."""
    step: float
    """Median seconds from one step to the next, where no start comes between."""
    stall: float
    """Seconds by which the steps from one save to the next take longer, all together: for the save,
    for the removal of an older one, and where the machine has been slow."""
    restart: float
    """Seconds from a kill until a step begins, if no other kill came before that; NaN: there is
    none."""

    @property
    def goodput(self) -> float:
        """Share of the time in which steps were done for good."""
        return self.steps * self.step / self.wall


def measure(records: Sequence[Record], kills: Sequence[float], every: int) -> Costs:
    """Measure costs from the log of a run that saves after `every` steps, and from the times of the
    kills."""
    steps: list[Record] = []
    gaps, restarts = [], []
    starts = False
    for record in records:
        starts |= record["kind"] == "note" and record["text"].startswith("resumed from")
        if record["kind"] != "step":
            continue
        if starts:
            last = max((kill for kill in kills if kill < record["time"]), default=math.nan)
            if not any(before["time"] > last for before in steps):
                restarts.append(record["time"] - last)
        elif steps:
            gaps.append(record["time"] - steps[-1]["time"])
        steps.append(record)
        starts = False
    step = statistics.median(gaps)
    return Costs(
        wall=steps[-1]["time"] - steps[0]["time"],
        steps=steps[-1]["step"] - steps[0]["step"],
        step=step,
        stall=every * (statistics.fmean(gaps) - step),
        restart=statistics.fmean(restarts) - step if restarts else math.nan,
    )


def expected(costs: Costs, between_kills: float, interval: float) -> float:
    """Return Daly's goodput with `interval` seconds of training between two saves."""
    failures = math.expm1((interval + costs.stall) / between_kills)
    return interval / (between_kills * math.exp(costs.restart / between_kills) * failures)


@dataclass(frozen=True)
class Storm:
    kills: int
    seed: int

    def __str__(self) -> str:
        return f"{self.kills} kills"


class Goodput(Campaign[Storm]):
    name = "goodput"
    full = 1

    def __init__(
        self,
        folder: Path,
        *,
        layout: Layout = LAYOUT,
        mean_s: float = MEAN_S,
        kills: int = KILLS,
    ) -> None:
        super().__init__(folder)
        self._layout, self._mean_s, self._kills = layout, mean_s, kills

    def draw(self, number: int, rng: random.Random) -> Storm:
        return Storm(self._kills, rng.randrange(1 << 60))

    def run(self, trial: Storm, folder: Path) -> Record:
        rng = random.Random(trial.seed)
        given = {**self._layout.settings, **ENDLESS, "checkpoint.keep": "2"}
        whole = folder / "whole"
        whole.mkdir()
        steps, every = CALIBRATION
        few = {**given, "train.stop_after": str(steps), "checkpoint.every": str(every)}
        args = runs.settings(folder, whole, few)
        outcome = runs.forked(whole, self._layout.ranks, runs.plan(whole), *args)
        assert set(outcome.codes) == {0}, outcome.text
        first = measure(runs.lines(whole), [], every)
        interval = math.sqrt(2 * max(first.stall, 0.0) * self._mean_s)
        every = max(1, round(interval / first.step))
        args = runs.settings(folder, folder, {**given, "checkpoint.every": str(every)})
        longest = 100.0 + 20 * self._mean_s * (trial.kills + 1)
        with Job(folder, longest) as job:
            runs.launched(job, self._layout.ranks, runs.plan(folder), *args, restarts=1000)
            until(job, lambda: bool(committed(runs.checkpoints(folder))))
            *before, last = waits(self._mean_s, trial.kills + 1, rng)
            kills = [self._kill(job, rng, seconds) for seconds in before]
            until(job, lambda: runs.resumed(folder, kills[-1]) is not None)
            time.sleep(last)
            job.processes[0].send_signal(signal.SIGTERM)
            outcome = job.end()
        assert outcome.codes == [75], outcome.text
        runs.assert_checkpoints(folder)
        costs = measure(runs.lines(folder), kills, every)
        model = expected(costs, costs.wall / len(kills), every * costs.step)
        return {"every": every, "kills": len(kills), "model": model, "costs": costs}

    def _kill(self, job: Job, rng: random.Random, seconds: float) -> float:
        """Kill a rank after a time, as soon as there is one; returns when."""
        time.sleep(seconds)
        until(job, lambda: bool(job.pids()))
        os.kill(rng.choice(sorted(job.pids().values())), signal.SIGKILL)
        return time.time()

    def figures(self, records: Sequence[Record]) -> list[Figure]:
        figures = []
        for record in records:
            costs, model = record["costs"], record["model"]
            measured = costs.goodput
            between = costs.wall / record["kills"]
            figures += [
                Figure(f"goodput at {between:.0f} s between {record['kills']} kills",
                       f"{measured:.1%}", f">= {LEAST:.0%}", measured >= LEAST),
                limit(f"points from the model's {model:.1%}", 100 * abs(measured - model),
                      100 * POINTS),
                Figure("its constants: restart; step; waits from save to save; steps between saves",
                       f"{costs.restart:.2f} s; {costs.step:.4f} s; {costs.stall:.4f} s; "
                       f"{record['every']}"),
            ]  # fmt: skip
        return figures


def waits(mean_s: float, count: int, rng: random.Random) -> list[float]:
    """Return exponential times of exactly this mean, in random order: one from each of `count`
    equally likely parts of the distribution. The mean of 20 freely drawn times is off by a
    fifth."""
    times = [-math.log(1 - (i + 0.5) / count) for i in range(count)]
    rng.shuffle(times)
    return [mean_s * count * each / math.fsum(times) for each in times]


def until(job: Job, true: Callable[[], bool]) -> None:
    """Wait for something, as long as the job goes on and may."""
    while not true():
        assert job.processes[0].poll() is None, job.text
        assert time.monotonic() < job.began + job.limit_s, job.text
        time.sleep(0.1)
