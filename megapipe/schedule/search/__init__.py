"""Schedules found under a cost model and a memory limit.

:func:`search` finds one, :func:`lower_bound` gives a time that none can beat. An order of
operations is made by rules (:mod:`~megapipe.schedule.search.greedy`), by beam search, from a
repeated pattern or by stretching a shorter order, and improved by local search;
:mod:`~megapipe.schedule.search.portfolio` divides the effort between these.
"""

from megapipe.schedule.search.instance import Accounting, MemoryLimit, lower_bound
from megapipe.schedule.search.search import PLACEMENTS, Progress, SearchResult, search

__all__ = [
    "PLACEMENTS",
    "Accounting",
    "MemoryLimit",
    "Progress",
    "SearchResult",
    "lower_bound",
    "search",
]
