"""What of long lists a run has: it is drawn anew for each commit.

The seed is the tree of the commit, so two runs of one commit are the same, and another commit has
other cases. The variable MEGAPIPE_SEED (``--seed`` of pytest) repeats the draw of any.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from tests.running.processes import ROOT
from tests.running.revision import git

VARIABLE = "MEGAPIPE_SEED"


class Drawable(Protocol):
    """What can be drawn."""

    @property
    def id(self) -> str: ...

    @property
    def cost_s(self) -> float:
        """Seconds that it takes."""


Item = TypeVar("Item", bound=Drawable)


@functools.cache
def seed() -> str:
    """What this run draws by."""
    return os.environ.get(VARIABLE) or git("rev-parse", "HEAD^{tree}") or "no commit"


def number(below: int, *names: object) -> int:
    """A number from 0 on, by the seed and the names of what is drawn."""
    return _digest(seed(), *names) % below


def draws(items: Sequence[Item], seeds: Iterable[str], budget_s: float) -> list[list[Item]]:
    """What a run of each of the seeds has, one after the other: the items that have waited longest,
    as many as take `budget_s` seconds, in an order by the seed where they have waited equally
    long."""
    waited = dict.fromkeys((each.id for each in items), 0)
    found = []
    for given in seeds:
        left, taken = budget_s, []
        for each in sorted(items, key=lambda each: (-waited[each.id], _digest(given, each.id))):
            if each.cost_s <= left:
                taken.append(each)
                left -= each.cost_s
        waited = {name: runs + 1 for name, runs in waited.items()}
        waited |= dict.fromkeys((each.id for each in taken), 0)
        found.append(taken)
    return found


def trees_since(path: Path, most: int) -> list[str]:
    """The trees of the commits since there is a file, this one's last; at most so many."""
    began = git("log", "--format=%H", "--diff-filter=A", "--", str(path.relative_to(ROOT)))
    if not began:
        return []
    since = ["--first-parent", f"--max-count={most}", "HEAD", f"^{began.split()[-1]}"]
    return (git("log", "--format=%T", *since) or "").split()[::-1]


def _digest(*names: object) -> int:
    text = "\n".join(map(str, names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
