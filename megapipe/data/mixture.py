"""The source of each sample of a run, as a function of the sample's number only.

While the weights are constant, samples come in periods of 65,536. Each source has its share of a
period, rounded to n whole samples, which are spread evenly: sample j of n is due at (j + 1/2) / n
of the period, and samples are taken in the order in which they are due. So every batch is close to
the mixture, and a table of one period gives source and draw of any sample. A stretch is a sequence
of equal periods; it ends where weights change, or where a source is used up.
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
"""Number of samples of a period. So weights are rounded to multiples of 1/65,536; a positive weight
is at least 1/65,536."""


class Draw(NamedTuple):
    """Origin of a sample of the run: index of the source, and number of the draw in that source."""

    source: int
    number: int
    """Number of earlier samples of the same source, over all epochs."""


class MixtureRecipe(NamedTuple):
    """Everything that determines which of n sources each sample of a run is drawn from."""

    weights: Sequence[tuple[int, Sequence[float]]]
    """Pairs of a sample number and the weights [n] from this sample on, which are not all 0. The
    numbers ascend from `start`."""
    most: Sequence[int | None]
    """Maximum number of samples of each source [n]; None: no limit."""
    start: int = 0
    """Number of the first sample for which the recipe holds. Earlier recipes of the run held for
    earlier samples."""
    before: Sequence[int] = ()
    """Number of samples drawn from each source before sample `start`, [n]; default: 0 each."""

    @property
    def text(self) -> str:
        """The recipe as JSON; :meth:`of` is the inverse."""
        return json.dumps(self._asdict())

    @staticmethod
    def of(text: str) -> MixtureRecipe:
        """Read a recipe from JSON. Raises ValueError, TypeError or KeyError for other content."""
        given = json.loads(text)
        weights = [(int(first), [float(w) for w in some]) for first, some in given.pop("weights")]
        return MixtureRecipe(weights, **given)

    def at(self, sample: int) -> Sequence[float]:
        """Return the weights at sample number `sample`."""
        return next(some for first, some in reversed(self.weights) if first <= sample)

    def equals_from(self, since: int, other: MixtureRecipe) -> bool:
        """Whether both recipes have equal limits, and from sample `since` on equal weights."""
        coming = [[change for change in r.weights if change[0] > since] for r in (self, other)]
        now = list(self.at(since)) == list(other.at(since))
        return now and coming[0] == coming[1] and list(self.most) == list(other.most)


def weight_plan(
    weights: Sequence[float | Sequence[Sequence[float]]],
) -> list[tuple[int, list[float]]]:
    """Return pairs of a step and the weights of all sources from it on; the first step is 0.

    Each element of `weights` describes one source: a constant weight, or a list of pairs of a step
    and the weight from this step on, the first step being 0.
    """
    plans = [[(0, w)] if isinstance(w, (int, float)) else w for w in weights]
    steps = sorted({step for plan in plans for step, _ in plan})
    return [
        (int(step), [next(w for since, w in reversed(plan) if since <= step) for plan in plans])
        for step in steps
    ]


def tempered(weights: Sequence[float], temperature: float) -> list[float]:
    """Return the weights to the power of 1 / temperature, scaled so that the largest is 1."""
    highest = max(weights)
    return [(weight / highest) ** (1 / temperature) for weight in weights]


class _Table:
    """The sources of the samples of one period of a mixture with n sources."""

    def __init__(self, weights: npt.NDArray[np.float64]) -> None:
        self.counts = _shares(weights)
        source = np.repeat(np.arange(len(weights)), self.counts)
        within = np.concatenate([np.arange(count) for count in self.counts])
        due = np.argsort((within + 0.5) / self.counts[source], kind="stable")
        self.source = source[due].astype(np.uint16)
        self.number = within[due].astype(np.int32)

    def taken(self, samples: int) -> npt.NDArray[np.int64]:
        """Return how many of the first `samples` samples come from each source [n]."""
        periods, rest = divmod(samples, PERIOD)
        some = np.bincount(self.source[:rest], minlength=len(self.counts))
        return periods * self.counts + some

    def samples_with(self, source: int, draws: int) -> int:
        """Return how many samples must be taken until `draws` of them come from `source`."""
        periods, within = divmod(draws - 1, int(self.counts[source]))
        at = np.flatnonzero((self.source == source) & (self.number == within))[0]
        return periods * PERIOD + int(at) + 1


@dataclass(frozen=True)
class _Stretch:
    """Samples from `first` up to the next stretch, with constant weights."""

    first: int
    before: npt.NDArray[np.int64]
    """Number of draws of each source before the stretch [n]."""
    table: _Table | None
    """Table of the stretch's period; None if no source has samples left."""


class Mixture:
    """Assigns the samples of a run to its sources.

    Args:
        recipe: weights, and the maximum number of samples of each source.
        names: names of the sources, for errors.
    """

    def __init__(self, recipe: MixtureRecipe, names: Sequence[str]) -> None:
        self.names = names
        self.recipe = recipe
        self._stretches = _stretches(recipe)
        self._firsts = [stretch.first for stretch in self._stretches]

    def __call__(self, sample: int) -> Draw:
        """Return source and draw of sample number `sample` of the run, from 0. Raises DataError if
        all sources are used up."""
        stretch = self._stretch(sample)
        if stretch.table is None:
            raise self._used_up(stretch.first)
        periods, at = divmod(sample - stretch.first, PERIOD)
        table, source = stretch.table, int(stretch.table.source[at])
        number = stretch.before[source] + periods * table.counts[source] + table.number[at]
        return Draw(source, int(number))

    def taken(self, samples: int) -> list[int]:
        """Return how many of the run's first `samples` samples come from each source [n]."""
        stretch = self._stretch(samples)
        counts = stretch.before
        if stretch.table is not None:
            counts = counts + stretch.table.taken(samples - stretch.first)
        return [int(count) for count in counts]

    def check(self, samples: int) -> None:
        """Raise DataError if the mixture has fewer than `samples` samples."""
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
    """Divide a period in proportion to weights [n], by largest remainders. A positive weight gets
    at least one sample."""
    exact = weights / weights.sum() * PERIOD
    counts = np.maximum(np.floor(exact), weights > 0).astype(np.int64)
    while (left := PERIOD - int(counts.sum())) != 0:
        remainders = np.where(weights > 0, exact - counts, -np.inf)
        if left > 0:
            counts[np.argsort(-remainders, kind="stable")[:left]] += 1
        else:  # shares were raised to 1 sample: take the excess from the largest share
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
