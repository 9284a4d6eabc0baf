"""Which source each sample of a run is from: a function of the sample's number alone.

In a stretch of the run in which the weights stay as they are, samples come in periods of 65,536.
Each source has its share of a period, rounded to whole samples, and these are spread evenly: sample
j of n is due at (j + 1/2) / n of the period, and what is due first comes first. So every batch is
close to the mixture, and a table of one period tells source and draw of any sample. A stretch ends
where weights change, or where a source is used up.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.errors import DataError

PERIOD = 2**16
"""Samples of a period: weights are kept to 1/65,536 of the whole, and no source has less."""


class Draw(NamedTuple):
    """The sample of a source that comes at some place of the run."""

    source: int
    number: int
    """Samples of this source that came before."""


class MixtureRecipe(NamedTuple):
    """The mixture that a user asks for, of n sources."""

    weights: Sequence[tuple[int, Sequence[float]]]
    """First sample and weights [n], in order, the first one of sample `start`; not all weights are
    0."""
    most: Sequence[int | None]
    """Samples that there are of each source, at most [n]; None: any number."""
    start: int = 0
    """The first sample; those before it were dealt by another recipe."""
    before: Sequence[int] = ()
    """Those of each source [n]; none by default."""

    @property
    def text(self) -> str:
        """As JSON, which :meth:`of` reads."""
        return json.dumps(self._asdict())

    @staticmethod
    def of(text: str) -> MixtureRecipe:
        """From JSON. Raises ValueError, TypeError or KeyError for anything else."""
        given = json.loads(text)
        weights = [(int(first), [float(w) for w in some]) for first, some in given.pop("weights")]
        return MixtureRecipe(weights, **given)

    def at(self, sample: int) -> Sequence[float]:
        """The weights in force at a sample."""
        return next(some for first, some in reversed(self.weights) if first <= sample)

    def goes_on(self, since: int, like: MixtureRecipe) -> bool:
        """Whether both deal alike what comes from sample `since` on."""
        coming = [[change for change in r.weights if change[0] > since] for r in (self, like)]
        now = list(self.at(since)) == list(like.at(since))
        return now and coming[0] == coming[1] and list(self.most) == list(like.most)


def weight_plan(
    weights: Sequence[float | Sequence[Sequence[float]]],
) -> list[tuple[int, list[float]]]:
    """The steps at which weights change, the first one 0, with those of all sources from then on.

    Each of `weights` is a constant, or pairs of a step and the weight from it on, from step 0.
    """
    plans = [[(0, w)] if isinstance(w, (int, float)) else w for w in weights]
    steps = sorted({step for plan in plans for step, _ in plan})
    return [
        (int(step), [next(w for since, w in reversed(plan) if since <= step) for plan in plans])
        for step in steps
    ]


def tempered(weights: Sequence[float], temperature: float) -> list[float]:
    """Weights to the power of 1 / temperature, the largest being 1."""
    highest = max(weights)
    return [(weight / highest) ** (1 / temperature) for weight in weights]


class _Table:
    """One period of a mixture."""

    def __init__(self, weights: npt.NDArray[np.float64]) -> None:
        self.counts = _shares(weights)
        source = np.repeat(np.arange(len(weights)), self.counts)
        within = np.concatenate([np.arange(count) for count in self.counts])
        due = np.argsort((within + 0.5) / self.counts[source], kind="stable")
        self.source = source[due].astype(np.uint16)
        self.number = within[due].astype(np.int32)

    def taken(self, samples: int) -> npt.NDArray[np.int64]:
        """Draws of each source [n] among the first `samples`."""
        periods, rest = divmod(samples, PERIOD)
        some = np.bincount(self.source[:rest], minlength=len(self.counts))
        return periods * self.counts + some

    def samples_with(self, source: int, draws: int) -> int:
        """Samples up to and with the draw of `source` whose count is `draws`, 1 or more."""
        periods, within = divmod(draws - 1, int(self.counts[source]))
        at = np.flatnonzero((self.source == source) & (self.number == within))[0]
        return periods * PERIOD + int(at) + 1


@dataclass(frozen=True)
class _Stretch:
    """Samples from `first` on, up to the next stretch."""

    first: int
    before: npt.NDArray[np.int64]
    """Draws of each source before it [n]."""
    table: _Table | None
    """None: no source has anything left."""


class Mixture:
    """Deals the samples of a run to its sources.

    Args:
        recipe: weights, and how much there is.
        names: of the sources, for errors.
    """

    def __init__(self, recipe: MixtureRecipe, names: Sequence[str]) -> None:
        self.names = names
        self.recipe = recipe
        self._stretches = _stretches(recipe)
        self._firsts = [stretch.first for stretch in self._stretches]

    def __call__(self, sample: int) -> Draw:
        """Where sample `sample`, counted from 0, is from. Raises DataError where all is used up."""
        stretch = self._stretch(sample)
        if stretch.table is None:
            raise self._used_up(stretch.first)
        periods, at = divmod(sample - stretch.first, PERIOD)
        table, source = stretch.table, int(stretch.table.source[at])
        number = stretch.before[source] + periods * table.counts[source] + table.number[at]
        return Draw(source, int(number))

    def taken(self, samples: int) -> list[int]:
        """Draws of each source [n] among the first `samples` of the run."""
        stretch = self._stretch(samples)
        counts = stretch.before
        if stretch.table is not None:
            counts = counts + stretch.table.taken(samples - stretch.first)
        return [int(count) for count in counts]

    def check(self, samples: int) -> None:
        """Raise DataError if there are fewer than `samples`."""
        for stretch in self._stretches:
            if stretch.table is None and samples > stretch.first:
                raise self._used_up(stretch.first)

    def _stretch(self, sample: int) -> _Stretch:
        return self._stretches[bisect.bisect_right(self._firsts, sample) - 1]

    def _used_up(self, samples: int) -> DataError:
        return DataError(
            f"data.mixture: tokens and epochs of {', '.join(self.names)} are used up after "
            f"{samples} samples: expected more of them, or fewer train.steps"
        )


def _shares(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """A period divided by weights [n], by largest remainders; what is not 0 gets 1 at least."""
    exact = weights / weights.sum() * PERIOD
    counts = np.maximum(np.floor(exact), weights > 0).astype(np.int64)
    while (left := PERIOD - int(counts.sum())) != 0:
        remainders = np.where(weights > 0, exact - counts, -np.inf)
        if left > 0:
            counts[np.argsort(-remainders, kind="stable")[:left]] += 1
        else:  # shares that were raised to 1 are taken off the largest
            counts[int(np.argmax(counts))] -= 1
    return counts


def _stretches(recipe: MixtureRecipe) -> list[_Stretch]:
    changes = [*(first for first, _ in recipe.weights[1:]), None]
    most = np.array([np.iinfo(np.int64).max if m is None else m for m in recipe.most])
    at = recipe.start
    before = np.array(recipe.before or [0] * len(most), np.int64)
    found: list[_Stretch] = []
    for (_, weights), change in zip(recipe.weights, changes, strict=True):
        while change is None or at < change:
            live = np.where(before < most, np.asarray(weights, np.float64), 0.0)
            if not live.any():
                found.append(_Stretch(at, before, None))
                if change is None:
                    return found
                at = change
                break
            table = _Table(live)
            found.append(_Stretch(at, before, table))
            ends = [] if change is None else [change]
            for source in np.flatnonzero((live > 0) & (most < np.iinfo(np.int64).max)):
                draws = int(most[source] - before[source])
                ends.append(at + table.samples_with(int(source), draws))
            if not ends:
                return found
            before = before + table.taken(min(ends) - at)
            at = min(ends)
    return found
