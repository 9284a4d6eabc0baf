"""The parts that all benchmarks share: their command line, fair timing, and the form of results.

A benchmark measures a few claims. It prints them as a table, and with ``--json FILE`` writes a list
of ``{claim, value, target, unit, peer, met, at_least}``; a value that is not a number is null. A
claim that is not met is a result, not an error: the exit code is 0.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Result:
    """A measured claim."""

    claim: str
    value: float
    target: float
    unit: str
    peer: str
    """Side with which the value is compared."""
    at_least: bool = False
    """Whether the target is a lower bound; otherwise it is an upper one."""

    @property
    def met(self) -> bool:
        return self.value >= self.target if self.at_least else self.value <= self.target

    def as_json(self) -> dict[str, str | float | bool | None]:
        return {
            "claim": self.claim,
            "value": self.value if math.isfinite(self.value) else None,  # JSON has no such numbers
            "target": self.target,
            "unit": self.unit,
            "peer": self.peer,
            "met": self.met,
            "at_least": self.at_least,
        }


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark."""
    options = argparse.ArgumentParser(description=description, allow_abbrev=False)
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options.add_argument(
        "--quick", action="store_true", help="toy sizes: shows that it runs, measures nothing"
    )
    return options


def report(title: str, results: Sequence[Result], file: Path | None) -> None:
    """Print the table; write the JSON if a file is given."""
    table = Table(title=title, title_justify="left")
    for heading in ("claim", "value", "target", "unit", "peer", "met"):
        table.add_column(heading, justify="right" if heading in ("value", "target") else "left")
    for result in results:
        bound = f"{'>=' if result.at_least else '<='} {result.target:.4g}"
        met = "yes" if result.met else "no"
        table.add_row(result.claim, f"{result.value:.4g}", bound, result.unit, result.peer, met)
    Console().print(table)
    if file is not None:
        text = json.dumps([result.as_json() for result in results], indent=2)
        file.write_text(text + "\n", encoding="utf-8")


def quiet(most: float, limit_s: float = 180.0) -> float:
    """Return the load of the last minute, once it is at most `most` or after `limit_s` seconds: it
    includes earlier programs for a while."""
    end = time.monotonic() + limit_s
    while (load := os.getloadavg()[0]) > most and time.monotonic() < end:
        time.sleep(5.0)
    return round(load, 2)


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Time one call, with everything that it starts on the device.

    On the CPU it is processor time, so that other processes disturb it less.
    """
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    synchronise(device)
    start = clock()
    function()
    synchronise(device)
    return clock() - start


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Comparison:
    """Seconds per round of two sides, timed in turn."""

    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median over the rounds of ours / theirs: what slows both sides of a round cancels."""
        return statistics.median(a / b for a, b in zip(self.ours, self.theirs, strict=True))


def compare(ours: Callable[[], float], theirs: Callable[[], float], *, rounds: int) -> Comparison:
    """Time two sides, each of which returns the seconds of one round.

    A first round of each warms up and is dropped; the sides go first by turns.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds + 1):
        for side in (0, 1) if i % 2 else (1, 0):
            times[side].append((ours, theirs)[side]())
    return Comparison(tuple(times[0][1:]), tuple(times[1][1:]))
