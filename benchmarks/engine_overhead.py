"""The cost of the engine itself: ``python benchmarks/engine_overhead.py``.

A step of stages without work runs through the real gloo channels. Measured are Python and C calls
per operation as ``sys.setprofile`` counts them (exactly repeatable), and time per operation. The
peer is torch.distributed.pipelining with the same schedule, in the same processes and taking turns.
With more ranks than cores the time is mostly that of waiting for a core.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from common import Result, parser, report
from pipelines import Ours, Theirs

from megapipe.distributed.mesh import Grid
from megapipe.schedule.generators import build
from megapipe.testing import World, run_world

LENGTH = 128
"""Values of a row: messages of 1 KiB, so that their transfer does not hide the rest."""
CALLS, TIME = 0.5, {"1f1b": 1.0, "zb_v": 0.6}
"""Targets, as shares of what torch takes."""


class Cost(NamedTuple):
    """Cost of one rank's step."""

    python: int
    """Calls of Python functions."""
    c: int
    """Calls of C functions from Python."""
    seconds: float


def calls(function: Callable[[], object]) -> tuple[int, int]:
    """Count calls of Python functions and of C functions while `function` runs in this thread."""
    counts = {"call": 0, "c_call": 0}

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event in counts:
            counts[event] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return counts["call"] - 1, counts["c_call"] - 1  # function itself; setprofile(None)


def measure(
    world: World, names: Sequence[str], microbatches: int, rounds: int
) -> list[tuple[int, Cost, Cost]]:
    """Return for each schedule this rank's number of operations, and their cost to us and to
    torch."""
    return [measure_one(world, name, microbatches, rounds) for name in names]


def measure_one(world: World, name: str, microbatches: int, rounds: int) -> tuple[int, Cost, Cost]:
    mesh = world.mesh(Grid(pp=world.size))
    schedule = build(name, ranks=world.size, microbatches=microbatches)
    ours = Ours(mesh, schedule, LENGTH)
    theirs = Theirs(world.rank, name, schedule.placement, microbatches, LENGTH)
    sides: tuple[Any, Any] = (ours, theirs)
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds + 2):
        for side in (0, 1) if i % 2 else (1, 0):
            dist.barrier()
            start = time.perf_counter()
            sides[side].step()
            times[side].append(time.perf_counter() - start)
    assert ours.loss() == theirs.loss(), "they did not compute the same"
    costs = []
    for side, seconds in zip(sides, times, strict=True):
        dist.barrier()
        costs.append(Cost(*calls(side.step), min(seconds[2:])))
    return len(schedule.ops[world.rank]), costs[0], costs[1]


def compare(name: str, measured: Sequence[tuple[int, Cost, Cost]]) -> list[Result]:
    """Return claims on means over the ranks; all have the same number of operations."""
    ops = sum(count for count, _, _ in measured)

    def per_op(field: str, side: int) -> float:
        return sum(getattr(costs[side], field) for costs in measured) / ops

    results = []
    for field, what, unit, scale, share in (
        ("python", "Python calls", "calls", 1.0, CALLS),
        ("c", "C calls", "calls", 1.0, CALLS),
        ("seconds", "time", "us", 1e6, TIME[name]),
    ):
        theirs = scale * per_op(field, 2)
        results.append(
            Result(
                claim=f"{name}, p={len(measured)}: {what} per operation",
                value=scale * per_op(field, 1),
                target=share * theirs,
                unit=unit,
                peer=f"torch, {theirs:.4g}",
            )
        )
    return results


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--ranks", type=int, default=2, help="processes (2)")
    options.add_argument("--rounds", type=int, default=100, help="timed steps of each (100)")
    given = options.parse_args(argv)
    if given.ranks < 2 or given.rounds < 1:
        options.error("--ranks must be at least 2 and --rounds at least 1")
    microbatches, rounds = (4, 2) if given.quick else (32, given.rounds)
    by_rank = run_world(given.ranks, measure, list(TIME), microbatches, rounds)
    results = []
    for name, measured in zip(TIME, zip(*by_rank, strict=True), strict=True):
        results += compare(name, measured)
    report("Engine overhead", results, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
