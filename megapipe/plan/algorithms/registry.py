"""The published planners by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple

from megapipe.errors import ConfigError
from megapipe.plan.algorithms import planners
from megapipe.plan.algorithms.pipeline import PlannedPipeline
from megapipe.plan.algorithms.problem import Problem

Plan = Callable[[Problem], PlannedPipeline | None]
"""Function that returns a plan, or None if the algorithm finds none that fits."""


class Algorithm(NamedTuple):
    """A published planner. A module of the folder `planners` lists its own in ``ALGORITHMS``."""

    name: str
    """Name for ``--algorithm``."""
    source: str
    """Publication, as in "PipeDream (Narayanan et al., SOSP'19)"."""
    objective: str
    """Figure that the algorithm minimizes, in a few words."""
    plan: Plan
    optimal: bool = False
    """Whether the plan is the best one for the algorithm's own objective and restrictions."""
    enumerates: bool = False
    """Whether the algorithm chooses the number of micro-batches itself. For the others a command
    tries several numbers."""


@cache
def algorithms() -> Mapping[str, Algorithm]:
    """Return all planners of the folder `planners` by name, sorted."""
    found: dict[str, Algorithm] = {}
    for module in iter_modules(planners.__path__, f"{planners.__name__}."):
        for made in import_module(module.name).ALGORITHMS:
            assert made.name not in found, f"two planners are named {made.name}"
            found[made.name] = made
    return dict(sorted(found.items()))


def algorithm(name: str) -> Algorithm:
    """Return a planner.

    Raises:
        ConfigError: an unknown name.
    """
    known = algorithms()
    if name not in known:
        near = get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"--algorithm {name}: {hint}expected one of {', '.join(known)}")
    return known[name]
