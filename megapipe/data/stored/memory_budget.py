"""Limit on the memory for small arrays that a run reads completely from their files."""

from __future__ import annotations

from collections.abc import Iterable

from megapipe.data.stored.array import StoredArray


class MemoryBudget:
    """Decides which arrays are held in memory; all data sets of a run share one budget.

    Args:
        together: maximum bytes of all held arrays.
        each: maximum bytes of a single held array.
    """

    def __init__(self, together: int = 2**25, each: int = 2**22) -> None:
        self._left = together
        self._each = each

    def hold(self, arrays: Iterable[StoredArray]) -> None:
        """Read small arrays into memory, while the budget lasts. Access to them is then fast, and
        later damage to their files has no effect. Other arrays stay in their files."""
        for array in arrays:
            if not array.is_in_memory and array.nbytes <= min(self._each, self._left):
                array.hold()
                self._left -= array.nbytes
