"""Memory in which a run holds small arrays of its files."""

from __future__ import annotations

from collections.abc import Iterable

from megapipe.data.stored.array import StoredArray


class MemoryBudget:
    """The memory that is left for arrays that are held; a run has one for all of its data sets.

    Args:
        together: bytes of all arrays.
        each: of the largest one that is held.
    """

    def __init__(self, together: int = 2**25, each: int = 2**22) -> None:
        self._left = together
        self._each = each

    def hold(self, arrays: Iterable[StoredArray]) -> None:
        """Read those that are small, as far as there is room, once: then they are as fast as any
        array, and what becomes of their files makes no difference. Others are read as before."""
        for array in arrays:
            if not array.held and array.nbytes <= min(self._each, self._left):
                array.hold()
                self._left -= array.nbytes
