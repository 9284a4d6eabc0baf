"""Small training cases of every registered schedule: what trains iterates the registry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from parity import Case

from megapipe.errors import ScheduleError
from megapipe.schedule.generators import accepts, build, names
from megapipe.schedule.ir import Schedule

VARIANTS: list[dict[str, Any]] = [
    {"model": "llama", "tied": False},
    {"dp": 2, "masked": 0.3},
    {"tp": 2, "sequence_parallel": True, "kv_heads": 2},
    {"uneven": True, "debug": True, "model": "mixed"},
]
"""What the rest of a case is, in turn."""


def schedule_of(case: Case) -> Schedule:
    """The schedule of a case, as the registry makes it."""
    return build(
        case.schedule,
        ranks=case.pp,
        microbatches=case.m,
        chunks=case.chunks,
        group=case.group,
        slices=case.slices,
        pairs=case.pairs,
    )


def settings(name: str) -> Iterator[Case]:
    """The schedule's sizes: few ranks and many, few micro-batches and many, its options."""
    taken = accepts(name)
    more: list[dict[str, Any]] = [{}]
    if "chunks" in taken:
        more += [{"chunks": 3}, {"chunks": 4}]
    if "slices" in taken:
        more += [{"slices": 4}]
    if "pairs" in taken:
        more += [{"pairs": 2}]
    if "group" in taken:
        more += [{"group": 3}]
    for p, least in ((2, 1), (4, 5), (4, 9)):
        for options in more if least == 5 else [{}]:
            for m in range(least, least + 9):
                case = Case(pp=p, m=m, schedule=name, **options)
                try:
                    stages = schedule_of(case).placement.stages
                except ScheduleError:
                    continue
                yield replace(case, layers=stages)
                break


def of(name: str) -> list[Case]:
    """Training cases of one schedule, each on 8 processes at most."""
    cases = []
    for index, case in enumerate(settings(name)):
        variant = VARIANTS[index % len(VARIANTS)]
        if variant.get("uneven"):
            variant = {**variant, "layers": case.layers + 1}
        cases.append(replace(case, **variant))
    return cases


def all_cases() -> list[Case]:
    """Those of every registered schedule; none may be without."""
    result = []
    for name in names():
        cases = of(name)
        assert cases, f"no small setting of {name} is legal"
        result += cases
    return result
