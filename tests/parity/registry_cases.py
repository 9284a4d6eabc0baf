"""Small training cases of every registered schedule; they iterate over the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from megapipe.errors import ScheduleError
from megapipe.schedule.generators import accepts, build, names
from megapipe.schedule.ir import Schedule
from tests.parity.ranks import Case

VARIANTS: list[dict[str, Any]] = [
    {"model": "llama", "tied": False},
    {"dp": 2, "masked": 0.3},
    {"tp": 2, "sequence_parallel": True, "kv_heads": 2},
    {"uneven": True, "debug": True, "model": "mixed"},
]
"""Values of the other fields of cases, in turn."""


OPTIONS = [("chunks", 3), ("chunks", 4), ("slices", 4), ("pairs", 2), ("group", 3), ("advance", 2)]
"""Fields of cases, and values for them."""
REPLICAS = [(2, 1), (1, 2), (3, 1)]
ARGUMENTS = {
    "chunks": "chunks",
    "group": "microbatch_group_size",
    "slices": "slices",
    "pairs": "chimera_pairs",
    "replicas": "ranks_per_stage",
    "advance": "extra_warmup",
}
"""Arguments of generators, by the field of a case that sets them."""


def schedule_of(case: Case) -> Schedule:
    """Build the schedule of a case with the registry."""
    return build(
        case.schedule,
        ranks=case.pp,
        microbatches=case.m,
        **{argument: getattr(case, field) for field, argument in ARGUMENTS.items()},
    )


def settings(name: str) -> Iterator[Case]:
    """Yield cases of the schedule: few ranks and many, few micro-batches and more, its options."""
    yield from _legal(name, [(2, 1)], {})
    yield from _legal(name, [(4, 5)], {})
    for option, value in OPTIONS:
        if ARGUMENTS[option] in accepts(name):
            yield from _legal(name, [(2, 5), (4, 5)], {option: value})
    if ARGUMENTS["replicas"] in accepts(name):
        for replicas in REPLICAS:
            yield from _legal(name, [(sum(replicas), 5)], {"replicas": replicas})


def smallest(name: str, ranks: int, least: int = 1) -> Iterator[Case]:
    """Yield the case with the fewest micro-batches on these ranks, from `least` on, if any is
    legal."""
    yield from _legal(name, [(ranks, least)], {})


def _legal(name: str, sizes: list[tuple[int, int]], options: dict[str, Any]) -> Iterator[Case]:
    """Yield, for each size, the first legal case with these ranks and at least these
    micro-batches."""
    for ranks, least in sizes:
        for m in range(least, least + 9):
            case = Case(pp=ranks, m=m, schedule=name, **options)
            try:
                stages = schedule_of(case).placement.stages
            except ScheduleError:
                continue
            yield replace(case, layers=stages)
            return


def many_microbatches(name: str) -> Iterator[Case]:
    """Yield a case with more than twice as many micro-batches as ranks."""
    yield from _legal(name, [(4, 9)], {})


def of(name: str, sizes: Callable[[str], Iterator[Case]] = settings) -> list[Case]:
    """Return training cases of one schedule, each on 8 processes at most."""
    cases: list[Case] = []
    for index, case in enumerate(sizes(name), start=names().index(name)):
        variant = VARIANTS[index % len(VARIANTS)]
        if variant.get("uneven"):
            variant = {**variant, "layers": case.layers + 1}
        cases.append(replace(case, **variant))
    return cases
