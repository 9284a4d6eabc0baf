"""The parts of every measurement: its task, its clock, its notebook, and the memory's limits."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch
from common import seconds

from ladder.memory import Peak, fits, largest, release
from ladder.records import Missing, Notebook, Row
from ladder.sides import Side, single_mesh
from ladder.sizes import size_of

T = TypeVar("T")

FEWEST_STEPS = 5
"""Number of steps timed however little time is left."""


@dataclass(frozen=True)
class Work:
    """Task of a worker."""

    job: Literal["ours", "peer", "ablations"]
    size: str
    device: str
    file: str
    """File of the records."""
    until: float
    """Time of the clock (`time.time`) by which it should end."""
    steps: int
    compile: bool
    """Whether to time the compiled form too (ours), or only it (peer)."""
    rows: int | None = None
    """Size of the micro-batch; None: the largest that fits, of ours and the peer."""

    def command(self) -> list[str]:
        return [sys.executable, "-m", "ladder.worker", json.dumps(asdict(self))]


class Bench:
    """One task in this process."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.size = size_of(work.size)
        self.device = torch.device(work.device)
        self.notebook = Notebook(Path(work.file))
        self.mesh = single_mesh(self.device)

    def left(self) -> float:
        return self.work.until - time.time()

    def search(self, side: Side) -> int:
        """Return the sequences of the largest micro-batch that fits, found in a third of the
        time."""
        if self.work.rows is not None:
            return self.work.rows

        def enough(rows: int) -> bool:
            side.rows = rows
            return fits(side.step)

        start, most = self.size.start, self.size.most
        hurry = self.left() / 3
        return largest(enough, start=start, most=most, hurry=lambda: self.left() < 2 * hurry)

    def time_steps(self, side: Side, name: str, setting: str, rows: int, steps: int) -> bool:
        """Time `steps` steps at `rows` per micro-batch, at fewer rows if memory does not suffice.

        Returns False if it does not suffice for one row either.
        """
        times: list[float] = []
        losses: list[float] = []

        def run() -> None:
            times.clear()
            for _ in range(2):
                side.step()
            while len(times) < steps and (len(times) < FEWEST_STEPS or self.left() > 0):
                times.append(seconds(lambda: losses.append(side.step()), self.device))

        while rows:
            side.rows = rows
            peak = Peak(self.device)
            if fits(run):
                break
            rows -= max(1, rows // 8)
        else:
            return False
        self.notebook.add(
            Row(
                size=self.size.name,
                side=name,
                setting=setting,
                state=side.state,
                rows=rows,
                tokens=self.size.microbatches * rows * self.size.sequence,
                times=times,
                peak=peak.bytes(),
                loss=losses[-1],
            )
        )
        return True

    def attempt(self, run: Callable[[], T], what: str) -> T | None:
        """Return what `run` returns; if it fails, note why and return None."""
        results: list[T] = []
        why = None
        try:
            if not fits(lambda: results.append(run())):
                why = "out of memory"
        except Exception as error:
            why = str(error).strip().partition("\n")[0] or type(error).__name__
        release()
        if why:
            self.missing(what, why)
        return results[0] if results else None

    def missing(self, what: str, why: str) -> None:
        self.notebook.add(Missing(f"{self.size.name}: {what}", why))
