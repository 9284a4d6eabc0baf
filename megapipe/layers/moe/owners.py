"""The experts of a layer that a rank owns, which need not be neighbours and may change.

A rank has the experts that it owns in ascending order, so all follows from the map of owners. A
layer has one object that has it, which its parameters share (:mod:`megapipe.layers.parameter`):
after a change nothing else has to be told which experts these are of.
"""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.experts.map import ExpertMap


class ExpertOwners:
    """Those of one layer, as the rank sees them that is `rank` of the ranks of the map."""

    def __init__(self, present: ExpertMap, rank: int) -> None:
        self.map = present
        """The map in force."""
        self.rank = rank

    def ranges(self) -> Iterator[range]:
        """The experts that this rank owns, in order, neighbouring numbers together."""
        first, *others = self.map.owned(self.rank)
        run = range(first, first + 1)
        for expert in others:
            if expert == run.stop:
                run = range(run.start, expert + 1)
            else:
                yield run
                run = range(expert, expert + 1)
        yield run
