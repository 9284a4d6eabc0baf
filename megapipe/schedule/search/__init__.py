"""Search for schedules under a cost model and a memory limit.

:func:`search` finds a schedule, :func:`lower_bound` returns a time that no schedule can beat.
Orders of operations are made by rules (:mod:`~megapipe.schedule.search.greedy`), by beam search,
from a repeated pattern, or by stretching an order for fewer micro-batches; local search improves
them. :mod:`~megapipe.schedule.search.portfolio` divides the effort between these methods.

Two searches use a constraint solver: :mod:`~megapipe.schedule.search.exact` finds the best order of
a small problem, :mod:`~megapipe.schedule.search.tessel` the shortest repeated pattern.
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
