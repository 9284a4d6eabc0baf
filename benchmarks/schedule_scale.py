"""Scaling of schedules: ``python benchmarks/schedule_scale.py``.

Every measurement is a fresh ``scripts/schedule.py simulate``, as users call it: it generates a
schedule, proves it (complete, ordered, within its promise, free of deadlock on its channels),
simulates it at exact costs, and counts its memory, its messages and why ranks are idle. Measured
are the processor time per operation, its growth with the size, and the peak memory of the process.
A rank that needs only its own list should not pay for the others.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from common import Result, parser, report

from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import (
    interleaved,
    names,
    one_f_one_b,
    zb_v,
    zero_bubble,
)
from megapipe.schedule.placement import Placement
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.search import search
from megapipe.schedule.timing.simulate import simulate

CLOSED = {"1f1b": None, "interleaved_1f1b": 2, "zb_h1": None, "zb_v": None}
"""Schedules that are written down directly, and their chunks."""
OWN_LIST: dict[str, Callable[[int, int], array[int]]] = {
    "1f1b": lambda ranks, m: one_f_one_b.rank_ops(0, ranks, m),
    "interleaved_1f1b": lambda ranks, m: interleaved.rank_ops(0, ranks, m, 2, ranks),
    "zb_h1": lambda ranks, m: zero_bubble.rank_ops(0, ranks, m),
    "zb_v": lambda ranks, m: zb_v.rank_ops(0, ranks, m),
}
"""Functions that make the list of rank 0 alone, for ranks and micro-batches."""
WHOLE, DECIMALS = "F=1,I=1,W=1,comm=0", "F=0.366,I=1.234,W=0.5,comm=0.05"
LONG_DECIMALS = "F=0.36612345678901234,I=1.2345678901234567,W=0.1,comm=0.05"
"""Costs of a full rank, so that a chunk takes half of each: as they are measured; and as programs
print them, with 17 digits, whose exact times need more than 64 bits."""
MICROSECONDS, OTHERS_MICROSECONDS = 2.5, 50.0
"""Targets per operation: for the schedules above, and for all others."""
SLOPE, SECONDS, MEBIBYTES, OWN_RATIO = 1.1, 20.0, 512.0, 1.5


class Sample(NamedTuple):
    ops: int
    seconds: float
    mebibytes: float
    """Peak memory of the process."""


def simulate_by_command(
    name: str, ranks: int, microbatches: int, costs: str, chunks: int | None
) -> Sample | None:
    """Run the command once in a separate process; None if the schedule is refused."""
    script = Path(__file__).resolve().parents[1] / "scripts" / "schedule.py"
    command = [sys.executable, str(script), "simulate", name, "--json", "--cost", costs]
    command += ["--ranks", f"{ranks}", "--microbatches", f"{microbatches}"]
    command += ["--chunks", f"{chunks}"] if chunks else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    told = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        return None
    return Sample(json.loads(told)["ops"], used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def fastest(
    rounds: int,
    name: str,
    ranks: int,
    microbatches: int,
    costs: str = WHOLE,
    chunks: int | None = None,
) -> Sample | None:
    """Return the fastest of several runs."""
    samples = [simulate_by_command(name, ranks, microbatches, costs, chunks) for _ in range(rounds)]
    return min((each for each in samples if each), key=lambda each: each.seconds, default=None)


def closed(name: str, sizes: Sequence[tuple[int, int]], rounds: int) -> list[Result]:
    """Return the claims on one schedule; `sizes` are (ranks, micro-batches), ascending."""
    by_costs = {
        costs: [fastest(rounds, name, *size, costs, CLOSED[name]) for size in sizes]
        for costs in (WHOLE, DECIMALS, LONG_DECIMALS)
    }
    ranks, microbatches = sizes[-1]
    results = []
    for costs, found in by_costs.items():
        samples = [sample for sample in found if sample is not None]
        last = samples[-1]
        at = f"{name}, p={ranks}, m={microbatches}, {last.ops / 1e6:.1f} M ops, {costs}"
        growth = f"{name}, {costs}: growth"
        results += [
            Result(f"{at}: per op", 1e6 * last.seconds / last.ops, MICROSECONDS, "us", "none"),
            Result(growth, slope(samples), SLOPE, "log/log", f"from p={sizes[0][0]}"),
            Result(f"{at}: time", last.seconds, SECONDS, "s", "none"),
            Result(f"{at}: memory", last.mebibytes, MEBIBYTES, "MiB", "none"),
        ]
    return results


def slope(samples: Sequence[Sample]) -> float:
    """Fit the logarithm of time to that of operations by least squares."""
    xs = [math.log(sample.ops) for sample in samples]
    ys = [math.log(sample.seconds) for sample in samples]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum(
        (a - x) ** 2 for a in xs
    )


def others(ranks: int, microbatches: int, rounds: int) -> list[Result]:
    """Measure all other registered schedules that this setting allows."""
    results = []
    for name in names():
        if name in CLOSED:
            continue
        sample = fastest(rounds, name, ranks, microbatches)
        if sample is None:
            continue
        value = 1e6 * sample.seconds / sample.ops
        claim = f"{name}, p={ranks}, m={microbatches}: per op"
        results.append(Result(claim, value, OTHERS_MICROSECONDS, "us", "none"))
    return results


def searched(ranks: int, microbatches: int, placement: str) -> Result:
    """Search at the default effort, with uneven costs; prove and simulate what is found."""
    start = time.process_time()
    found = search(ranks, microbatches, cost_of=_uneven, placements=[placement])
    proved = validate(found.schedule)
    simulate(found.schedule, _uneven(found.placement))
    value = 1e6 * (time.process_time() - start) / proved.ops
    claim = f"search, {placement}, p={ranks}, m={microbatches}: per op"
    return Result(claim, value, OTHERS_MICROSECONDS, "us", "")


def _uneven(placement: Placement) -> Cost:
    inner = (10,) * (placement.stages - 2)
    return Cost(F=(12, *inner, 14), I=(11, *inner, 13), W=(9, *inner, 12), latency=1)


def own_list(name: str, ranks: tuple[int, int], microbatches: int) -> Result:
    """Check that rank 0's list alone is as long for few ranks as for many, and takes as long."""

    def seconds(p: int) -> float:
        start = time.process_time()
        OWN_LIST[name](p, microbatches)
        return time.process_time() - start

    few, many = (min(seconds(p) for _ in range(20)) for p in ranks)
    claim = f"{name}, p={ranks[1]}, m={microbatches}: one rank's list"
    return Result(claim, many / few, OWN_RATIO, "x", f"p={ranks[0]}")


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=2, help="processes per measurement (2)")
    given = options.parse_args(argv)
    if given.rounds < 1:
        options.error("--rounds must be at least 1")
    sizes = [(32, 512), (64, 1024), (128, 2048), (256, 4096)]
    rounds = given.rounds
    if given.quick:
        sizes, rounds = [(2, 4), (4, 8)], 1
    results = []
    for name in CLOSED:
        results += closed(name, sizes, rounds)
    results += [own_list(name, (4, sizes[-1][0]), sizes[-1][1]) for name in OWN_LIST]
    if not given.quick:
        results += others(64, 512, rounds)
        results += [searched(64, 512, placement) for placement in ("single", "v")]
    report("Schedules at scale", results, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
