"""Figures of how well predictions agree with measurements: level, order, choice, memory."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple, TypeVar

from published.assumptions import layers_of
from published.points import Point

T = TypeVar("T")
APART = 0.05
"""Layouts are a pair if their measured times differ by more than this part of the shorter one."""
FEWEST = 3
"""Layouts of one model below which order and choice say nothing."""
SPLITS, SEED = 200, 0


@dataclass(frozen=True)
class Prediction:
    """A priced point."""

    point: Point
    settings: tuple[str, ...]
    """The point's configuration; equal for repeated measurements of one layout and batch."""
    step_s: float
    tensors: float
    """Bytes of tensors on the device that needs most."""
    total: float
    """Bytes of tensors, CUDA's context, libraries and communicators."""
    capacity: float | None
    """Bytes of a device."""

    @property
    def ratio(self) -> float:
        """Predicted / measured time of a step."""
        assert self.point.step_s is not None
        return self.step_s / self.point.step_s

    @property
    def memory_ratio(self) -> float:
        """Predicted / measured memory, of tensors where the source counts only these."""
        assert self.point.memory is not None
        total = self.total if counts_all(self.point) else self.tensors
        return total / self.point.memory


def counts_all(point: Point) -> bool:
    """Whether a source counts all of a device's memory, as nvidia-smi does, and not only what
    torch has allocated."""
    return "bigscience" in point.source


class Level(NamedTuple):
    """Median of predicted / measured, and the spread about it."""

    n: int
    median: float
    middle: float
    """Median of abs(ratio / median - 1)."""
    p90: float
    """90th percentile of the same."""

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Level:
        level = statistics.median(ratios)
        spread = [abs(ratio / level - 1) for ratio in ratios]
        return cls(len(ratios), level, statistics.median(spread), percentile(spread, 0.9))


def percentile(values: Iterable[float], share: float) -> float:
    """Return the value below which `share` of the others are, by linear interpolation."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


class Choice(NamedTuple):
    """A layout in a set: seconds per sample, predicted and measured."""

    predicted: float
    measured: float
    """Median of the repeated measurements."""
    batch: int
    id: str


@dataclass(frozen=True)
class LayoutSet:
    """Measured layouts of one model on as many GPUs. Batches may differ; time is per sample."""

    rows: Sequence[Prediction]

    @property
    def source(self) -> str:
        return self.rows[0].point.origin

    @property
    def name(self) -> str:
        point = self.rows[0].point
        heads = "heads not given" if point.heads is None else f"{point.heads} heads"
        sizes = f"{layers_of(point)} x {point.hidden}, {heads}, {point.sequence:,} tokens"
        return f"{point.model}, {sizes}, {point.gpus} GPUs"

    @cached_property
    def choices(self) -> list[Choice]:
        """Layouts, each once."""
        found = []
        for same in grouped(self.rows, lambda row: row.settings).values():
            batch = same[0].point.global_batch
            measured = statistics.median(_seconds(row) for row in same)
            ids = ", ".join(row.point.id for row in same)
            found.append(Choice(same[0].step_s / batch, measured / batch, batch, ids))
        return found

    @cached_property
    def noise(self) -> float | None:
        """Part by which repeated measurements of a layout differ at most; None: no repeats."""
        groups = grouped(self.rows, lambda row: row.settings).values()
        apart = [
            max(map(_seconds, same)) / min(map(_seconds, same)) - 1
            for same in groups
            if len(same) > 1
        ]
        return max(apart, default=None)

    @property
    def tau(self) -> float:
        """Kendall's rank correlation of predicted and measured times."""
        return _tau(self.choices)

    @property
    def chosen(self) -> Choice:
        """The layout that the planner would choose; of equal ones the slowest."""
        return _chosen(self.choices)

    @property
    def best(self) -> Choice:
        return min(self.choices, key=lambda choice: choice.measured)

    @property
    def regret(self) -> float:
        """How much longer the chosen layout took than the best one, as a part of the latter."""
        return self.chosen.measured / self.best.measured - 1

    @property
    def regret_at_one_batch(self) -> float | None:
        """The largest regret of a choice among the layouts with one batch; None: no such choice."""
        groups = grouped(self.choices, lambda choice: choice.batch).values()
        found = [
            _chosen(own).measured / min(choice.measured for choice in own) - 1
            for own in groups
            if len(own) > 1
        ]
        return max(found, default=None)

    @cached_property
    def pairs(self) -> tuple[int, int]:
        """Pairs in the right order, and all pairs whose measured times differ by over 5%."""
        right = every = 0
        for a, b in combinations(self.choices, 2):
            if abs(a.measured - b.measured) > APART * min(a.measured, b.measured):
                every += 1
                right += (a.predicted - b.predicted) * (a.measured - b.measured) > 0
        return right, every


def layout_sets(rows: Iterable[Prediction]) -> list[LayoutSet]:
    """Return the sets of at least three layouts."""
    found = [LayoutSet(own) for own in grouped(rows, _set_key).values()]
    return [own for own in found if len(own.choices) >= FEWEST]


def _set_key(row: Prediction) -> Hashable:
    point = row.point
    sizes = point.layers, point.hidden, point.heads, point.kv_heads, point.ffn, point.vocab
    return point.source, point.model, sizes, point.sequence, point.gpu, point.gpus, point.precision


class Splits(NamedTuple):
    """Errors of the held-out halves, with one factor per device fitted on the other halves."""

    middle: list[float]
    """Median error of each half."""
    p90: list[float]


def held_out(rows: Sequence[Prediction], group: Callable[[Prediction], Hashable]) -> Splits:
    """Split the rows at random, keeping each `group` together. A device's factor is the median of
    measured / predicted of the fitted half; a device without rows there has the factor 1."""
    groups = list(grouped(rows, group).values())
    chance, found = random.Random(SEED), Splits([], [])
    for _ in range(SPLITS):
        chance.shuffle(groups)
        half = len(groups) // 2
        fitted = [row for own in groups[:half] for row in own]
        factors = {
            device: 1 / statistics.median(row.ratio for row in own)
            for device, own in grouped(fitted, lambda row: row.point.gpu).items()
        }
        errors = [
            abs(row.ratio * factors.get(row.point.gpu, 1.0) - 1)
            for own in groups[half:]
            for row in own
        ]
        found.middle.append(statistics.median(errors))
        found.p90.append(percentile(errors, 0.9))
    return found


class Verdicts(NamedTuple):
    """Shares of their devices that layouts need, with the ids of their rows."""

    ran: list[tuple[float, str]]
    failed: list[tuple[float, str]]
    """Layouts that ran out of memory."""

    @classmethod
    def of(cls, rows: Iterable[Prediction]) -> Verdicts:
        """Judge rows, except those whose source says neither memory nor recomputation."""
        found = cls([], [])
        for row in rows:
            point = row.point
            if row.capacity is not None and (point.memory is not None or point.recompute):
                (found.ran if point.ran else found.failed).append(
                    (row.total / row.capacity, point.id)
                )
        return found

    def wrong(self, margin: float) -> list[str]:
        """Return the rows that are judged wrongly if a `margin` of the device has to be left."""
        most = 1 - margin
        refused = [id for share, id in self.ran if share > most]
        return refused + [id for share, id in self.failed if share <= most]


def _chosen(choices: Iterable[Choice]) -> Choice:
    return min(choices, key=lambda choice: (choice.predicted, -choice.measured))


def _tau(choices: Sequence[Choice]) -> float:
    signs = 0
    for a, b in combinations(choices, 2):
        order = (a.predicted - b.predicted) * (a.measured - b.measured)
        signs += (order > 0) - (order < 0)
    return signs / (len(choices) * (len(choices) - 1) / 2)


def _seconds(row: Prediction) -> float:
    assert row.point.step_s is not None
    return row.point.step_s


def grouped(values: Iterable[T], key: Callable[[T], Hashable]) -> Mapping[Hashable, list[T]]:
    """Group values by a key."""
    found: dict[Hashable, list[T]] = defaultdict(list)
    for value in values:
        found[key(value)].append(value)
    return found
