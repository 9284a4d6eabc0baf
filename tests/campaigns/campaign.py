"""A campaign: many trials of one kind of harm, each drawn from a seed and its own number.

A trial does not depend on how many others there are, so the seed and the number replay it alone.
"""

from __future__ import annotations

import random
import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

T = TypeVar("T")
Record = Mapping[str, Any]
"""Measurements of a trial that has passed, by name."""


class Figure(NamedTuple):
    """A line of the report."""

    what: str
    value: str
    target: str = ""
    met: bool = True


class Campaign(ABC, Generic[T]):
    """Trials in `folder`, which is empty at first; what they share is made when it is first needed.

    `T` is a trial, whose text says what is done.
    """

    name: ClassVar[str]
    full: ClassVar[int]
    """Trials of the whole campaign."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def trial(self, seed: int, number: int) -> T:
        """Return the trial of this number."""
        return self.draw(number, random.Random(f"{self.name} {seed} {number}"))

    @abstractmethod
    def draw(self, number: int, rng: random.Random) -> T:
        """Draw a trial; `number` may decide its kind, and `rng` everything else."""

    @abstractmethod
    def run(self, trial: T, folder: Path) -> Record:
        """Run a trial in `folder`, which is empty. What it raises is the trial's failure."""

    @abstractmethod
    def figures(self, records: Sequence[Record]) -> list[Figure]:
        """Return the report on the trials that have passed; there is at least one."""


def limit(what: str, value: float, most: float, unit: str = "") -> Figure:
    """Return a figure that is to be at most `most`."""
    return Figure(what, f"{value:.3g}{unit}", f"<= {most:g}{unit}", value <= most)


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value that `percent` percent of the values do not exceed; of one value, that
    value."""
    if len(values) < 2:
        return max(values)
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
