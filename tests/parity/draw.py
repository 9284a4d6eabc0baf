"""Draws, for each commit anew, the part of long lists of cases that a run takes.

The seed is the commit's tree: two runs of one commit take the same cases, and another commit takes
others. The variable MEGAPIPE_SEED (``--seed`` of pytest) repeats an earlier draw.
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
    """An item that can be drawn."""

    @property
    def id(self) -> str: ...

    @property
    def cost_s(self) -> float:
        """Seconds that it takes."""


Item = TypeVar("Item", bound=Drawable)


@functools.cache
def seed() -> str:
    """Return the seed of this run's draws."""
    return os.environ.get(VARIABLE) or git("rev-parse", "HEAD^{tree}") or "no commit"


def number(below: int, *names: object) -> int:
    """Draw a number below `below`, from the seed and the names of what is drawn."""
    return _digest(seed(), *names) % below


def draws(items: Sequence[Item], seeds: Iterable[str], budget_s: float) -> list[list[Item]]:
    """Return the items that a run with each of the seeds takes, one run after the other. A run
    takes those that have waited longest, up to `budget_s` seconds; the seed orders items that have
    waited equally long."""
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
    """Return the trees of the commits since the file exists, newest last; at most `most`."""
    began = git("log", "--format=%H", "--diff-filter=A", "--", str(path.relative_to(ROOT)))
    if not began:
        return []
    since = ["--first-parent", f"--max-count={most}", "HEAD", f"^{began.split()[-1]}"]
    return (git("log", "--format=%T", *since) or "").split()[::-1]


def _digest(*names: object) -> int:
    text = "\n".join(map(str, names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
