"""Partition of a model into pipeline stages.

A model is a chain of units: its layers, and where it has them (`ends`) an embedding before and a
head after these. A layout is a string such as ``"E L*3 | L*4 | L*4 | L*3 H"``: stages in order,
each made of ``E`` (embedding), ``L`` or ``L*n`` (layers) and ``H`` (final norm and head); that of
a model without ends has layers only. It is the only way a partition is described: layer counts and
the default by cost are written as such a string too, and whatever the origin, :func:`parse_layout`
proves that every unit is placed exactly once.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, combinations, pairwise

from megapipe.errors import ConfigError
from megapipe.schedule.cost import Time
from megapipe.schedule.placement import Placement

_ITEM = re.compile(r"\s*(?:(?P<name>[EH])|L(?:\s*\*\s*(?P<count>[1-9][0-9]{0,5}(?![0-9])))?)\s*")


@dataclass(frozen=True)
class StageSpec:
    """The units of one virtual stage: which layers of the model, and whether the embedding before
    the first layer and the head after the last one."""

    embedding: bool
    layers: range
    head: bool


def parse_layout(text: str, layers: int, *, ends: bool = True) -> tuple[StageSpec, ...]:
    """The stages that `text` describes, for a model of `layers` layers, with `ends` or without.

    Raises :class:`ConfigError` unless the embedding comes first, the head last, each once, no
    stage is empty, and the layers add up.
    """
    stages = [_items(part, stage, text) for stage, part in enumerate(text.split("|"))]
    order = [item for stage in stages for item in stage]
    if ends:
        _check_once(order, "E", 0, "embedding", "first", text)
        _check_once(order, "H", len(order) - 1, "head", "last", text)
    elif not all(isinstance(item, int) for item in order):
        raise _error(text, "has E or H, and this model is made of layers (L, L*n) only")
    specs = []
    placed = 0
    for items in stages:
        count = sum(item for item in items if isinstance(item, int))
        specs.append(StageSpec("E" in items, range(placed, placed + count), "H" in items))
        placed += count
    if placed != layers:
        has = "model.layers is" if ends else "the model has"
        raise _error(text, f"places {placed} layers, but {has} {layers}")
    return tuple(specs)


def format_layout(specs: Sequence[StageSpec]) -> str:
    """The layout string of `specs`, the inverse of :func:`parse_layout`."""
    return " | ".join(_stage_text(spec.embedding, len(spec.layers), spec.head) for spec in specs)


def from_counts(counts: Sequence[int], *, ends: bool = True) -> str:
    """The layout with `counts` layers per stage, with `ends` the embedding in the first and the
    head in the last."""
    if not counts or min(counts) < 0:
        raise ConfigError(
            f"pipeline.layout={list(counts)}: expected one layer count per stage, none negative"
        )
    return _join(counts, ends=ends)


def balanced(costs: Sequence[Time], placement: Placement, *, ends: bool = True) -> str:
    """The layout with the least work for the busiest rank, and then for the slowest stage.

    `costs` are those of the chain's units; with `ends` the first is the embedding and the last the
    head. In a long step every rank runs all of its stages for each micro-batch, so the rank with
    the largest sum of them sets the pace; the slowest stage sets how long the pipeline takes to
    fill and to drain. With one stage per rank they are the same. Among equals, the smallest sum of
    squared stage costs counts, and of stages that cost the same the later one is given the next
    layer: fewer micro-batches wait there for their backward.

    Where all layers cost the same, the layout is optimal if every stage has at most two holders:
    for pipelines in one direction, and in two. Where they differ, it begins with the least possible
    slowest stage, and borders are then moved unit by unit as long as that helps.

    Raises :class:`ConfigError` for more stages than there are units.
    """
    units = [Fraction(cost) for cost in costs]
    layers, stages = len(units) - 2 * ends, placement.stages
    if stages > len(units):
        what = ", embedding and head" if ends else ""
        raise ConfigError(
            f"{stages} pipeline stages (parallel.pp x pipeline.chunks) for {layers} layers{what}: "
            f"at most {len(units)} stages can hold something"
        )
    inner = units[1:-1] if ends else units
    if len(set(inner)) > 1:
        borders = _moved(units, placement, _evened(units, stages))
        return _join(_layer_counts(borders, layers, ends=ends), ends=ends)
    parts = (inner[0], units[0], units[-1]) if ends else (inner[0], Fraction(0), Fraction(0))
    quickest = _deal(layers, placement, parts, None, ends=ends)
    assert quickest is not None
    most = max(rank_loads(placement, stage_costs(quickest, *parts)))
    return _join(_deal(layers, placement, parts, most, ends=ends) or quickest, ends=ends)


def stage_costs(counts: Sequence[int], layer: Time, embedding: Time, head: Time) -> list[Time]:
    """Costs of stages of so many layers, the first with the embedding, the last with the head."""
    costs: list[Time] = [count * layer for count in counts]
    costs[0] += embedding
    costs[-1] += head
    return costs


def _evened(units: Sequence[Fraction], stages: int) -> list[int]:
    """The first unit of each stage, and their number: the slowest stage is the least there is.

    Every limit on a stage's cost is a sum of neighbours, so it is found among those by bisection.
    """
    ends = [Fraction(0), *accumulate(units)]
    limits = sorted({b - a for a, b in combinations(ends, 2)})

    def fill(limit: Fraction) -> list[int] | None:
        borders = [0]
        for stage in range(stages):
            first, left = borders[-1], stages - stage - 1
            stop = bisect_right(ends, ends[first] + limit) - 1
            stop = min(stop, len(units) - left)  # a unit for each stage that follows
            if stop <= first:
                return None
            borders.append(stop)
        return borders if borders[-1] == len(units) else None

    place = bisect_left(range(len(limits)), True, key=lambda i: fill(limits[i]) is not None)
    found = fill(limits[place])
    assert found is not None
    return found


def _moved(units: Sequence[Fraction], placement: Placement, borders: list[int]) -> list[int]:
    """Move borders by one unit while the busiest rank, the slowest stage or the squares shrink."""
    ends = [Fraction(0), *accumulate(units)]

    def worth(borders: Sequence[int]) -> tuple[Time, Time, Time]:
        costs = [ends[b] - ends[a] for a, b in pairwise(borders)]
        return max(rank_loads(placement, costs)), max(costs), sum(cost * cost for cost in costs)

    best = worth(borders)
    improved = True
    while improved:
        improved = False
        for i in range(1, len(borders) - 1):
            for by in (1, -1):
                other = [*borders[:i], borders[i] + by, *borders[i + 1 :]]
                if other[i - 1] < other[i] < other[i + 1] and worth(other) < best:
                    borders, best, improved = other, worth(other), True
    return borders


def _layer_counts(borders: Sequence[int], layers: int, *, ends: bool) -> list[int]:
    """Layers of each stage; `borders` are the first unit of each, and the number of units."""
    at = [min(max(border - ends, 0), layers) for border in borders]
    return [b - a for a, b in pairwise(at)]


def rank_loads(placement: Placement, costs: Sequence[Time]) -> list[Time]:
    """Cost of the stages of each rank, added up over all directions: what the rank computes for one
    micro-batch of each direction."""
    loads: list[Time] = [0] * placement.ranks
    for row in placement.table:
        for rank, cost in zip(row, costs, strict=True):
            loads[rank] += cost
    return loads


def _deal(
    layers: int,
    placement: Placement,
    parts: tuple[Time, Time, Time],
    most: Time | None,
    *,
    ends: bool,
) -> list[int] | None:
    """Layers of each stage, dealt one at a time: to the cheapest stage of the least loaded rank,
    or, with `most`, to the cheapest stage whose ranks stay within it (None if there is none)."""
    layer, stages = parts[0], placement.stages
    counts = [int(not ends or 0 < stage < stages - 1) for stage in range(stages)]
    costs = stage_costs(counts, *parts)
    loads = rank_loads(placement, costs)
    times = [Counter(row[stage] for row in placement.table) for stage in range(stages)]
    for _ in range(layers - sum(counts)):
        best: tuple[Time, Time, int] | None = None
        for stage in range(stages):
            load = max(loads[rank] + layer * often for rank, often in times[stage].items())
            if most is not None:
                if load > most:
                    continue
                load = 0
            candidate = (load, costs[stage], -stage)
            best = candidate if best is None else min(best, candidate)
        if best is None:
            return None
        stage = -best[2]
        counts[stage] += 1
        costs[stage] += layer
        for rank, often in times[stage].items():
            loads[rank] += layer * often
    return counts


def _join(counts: Sequence[int], *, ends: bool) -> str:
    last = len(counts) - 1
    return " | ".join(
        _stage_text(ends and i == 0, count, ends and i == last) for i, count in enumerate(counts)
    )


def _stage_text(embedding: bool, layers: int, head: bool) -> str:
    count = "" if layers == 0 else "L" if layers == 1 else f"L*{layers}"
    return " ".join(filter(None, ("E" * embedding, count, "H" * head)))


def _items(part: str, stage: int, text: str) -> list[str | int]:
    """The items of one stage in order: "E", "H", or a number of layers."""
    items: list[str | int] = []
    at = 0
    while at < len(part):
        match = _ITEM.match(part, at)
        if match is None:
            if not part[at:].strip():
                break
            raise _error(text, f"stage {stage}: {part[at:].strip()!r} is none of E, L, L*n, H")
        items.append(match["name"] or int(match["count"] or 1))
        at = match.end()
    if not items:
        raise _error(text, f"stage {stage} is empty; every stage must hold something")
    return items


def _check_once(
    order: list[str | int], name: str, place: int, what: str, where: str, text: str
) -> None:
    if order.count(name) != 1:
        raise _error(text, f"has {order.count(name)} times {name} (the {what}), expected once")
    if order[place] != name:
        raise _error(text, f"{name} (the {what}) must come {where}")


def _error(text: str, problem: str) -> ConfigError:
    shown = text if len(text) <= 60 else text[:57] + "..."
    return ConfigError(f"pipeline.layout={shown!r}: {problem}")
