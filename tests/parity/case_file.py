"""The cases of a matrix as a file. ``python -m tests.parity.pair_runs find`` writes it, which takes
minutes; a run draws some of the cases."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.parity import draw

FOLDER = Path(__file__).parent / "pair_cases"
BUDGETS_S = {"parity": 90.0, "stale": 30.0}
"""Seconds that each matrix takes in a run."""
COMMITS = 60
"""Number of commits after which all cases should have run."""
SHARE = 0.95
"""Share of the cases that :data:`COMMITS` commits should run."""
UNMEASURED_S = 3.0
"""Seconds that count for a case before it has been measured."""


@dataclass(frozen=True)
class PairCase:
    """A case of a matrix."""

    values: Mapping[str, Any]
    """Value of each dimension; missing ones are plain. Tuples are lists."""
    seconds: float | None = None
    """Seconds on two idle cores, without the start of the processes."""

    @functools.cached_property
    def id(self) -> str:
        """Eight letters and digits that stand for the values."""
        text = json.dumps(self.values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def cost_s(self) -> float:
        return UNMEASURED_S if self.seconds is None else self.seconds


Impossible = Mapping[str, Any]
"""Two dimensions with values that no case can have together."""


def path_of(matrix: str) -> Path:
    return FOLDER / f"{matrix}.jsonl"


def read(matrix: str) -> tuple[list[PairCase], list[Impossible]]:
    """Read the file of a matrix; nothing if there is none."""
    if not path_of(matrix).exists():
        return [], []
    lines = path_of(matrix).read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    cases = [PairCase(each["values"], each["s"]) for each in entries if "values" in each]
    return cases, [each["impossible"] for each in entries if "impossible" in each]


def write(matrix: str, cases: Sequence[PairCase], impossible: Sequence[Impossible]) -> None:
    """Write the file of a matrix: a line for each case and for each impossible pair."""
    ordered = sorted(cases, key=lambda each: each.id)
    lines = [json.dumps({"s": each.seconds, "values": each.values}) for each in ordered]
    lines += [json.dumps({"impossible": each}) for each in impossible]
    FOLDER.mkdir(exist_ok=True)
    path_of(matrix).write_text("\n".join(lines) + "\n", encoding="utf-8")


def drawn(matrix: str) -> list[PairCase]:
    """Return the cases of this run."""
    return _draws(matrix)[-1]


def share_line(matrix: str) -> str:
    """Describe the share of the cases that the last commits have run, this run included."""
    cases, _ = read(matrix)
    every = _draws(matrix)
    recent = every[-COMMITS:]
    had = {each.id for run in recent for each in run}
    return (
        f"{matrix} matrix: {len(every[-1])} of {len(cases)} cases, and the last {len(recent)} "
        f"commits have {100 * len(had) / max(1, len(cases)):.1f}%"
    )


@functools.cache
def _draws(matrix: str) -> list[list[PairCase]]:
    """Return the cases of the last commits, and as the last ones those of this run."""
    before = [
        tree for tree in draw.trees_since(path_of(matrix), 2 * COMMITS) if tree != draw.seed()
    ]
    return draw.draws(read(matrix)[0], [*before, draw.seed()], BUDGETS_S[matrix])
