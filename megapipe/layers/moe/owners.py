"""Experts of a layer that a rank owns, which need not be adjacent and may change.

A rank holds its owned experts in ascending order, so the map of owners determines their local
indices. The parameters of a layer share one :class:`ExpertOwners`
(:mod:`megapipe.layers.parameter`), so a new map in this object applies to all parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.experts.map import ExpertMap


class ExpertOwners:
    """Expert owners of one layer, from the point of view of rank `rank` of the map."""

    def __init__(self, present: ExpertMap, rank: int) -> None:
        self.map = present
        """Current map of owners and replicas."""
        self.rank = rank

    def ranges(self) -> Iterator[range]:
        """Yield the owned experts in ascending order; consecutive experts form one range."""
        first, *others = self.map.owned(self.rank)
        run = range(first, first + 1)
        for expert in others:
            if expert == run.stop:
                run = range(run.start, expert + 1)
            else:
                yield run
                run = range(expert, expert + 1)
        yield run
