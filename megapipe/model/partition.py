"""Partition of a model into pipeline stages.

A model is a chain of units: layers, and if the model has `ends`, an embedding before and a head
after the layers. A stage layout is a string such as ``"E L*3 | L*4 | L*4 | L*3 H"``: stages in
order, each made of ``E`` (embedding), ``L`` or ``L*n`` (layers) and ``H`` (final norm and head).
Layer counts and the default partition by cost are converted to such a string too, and
:func:`parse_layout` proves that every unit is placed exactly once.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, combinations, pairwise
from math import lcm

from megapipe.errors import ConfigError
from megapipe.schedule.cost import Time
from megapipe.schedule.placement import Placement

_ITEM = re.compile(r"\s*(?:(?P<name>[EH])|L(?:\s*\*\s*(?P<count>[1-9][0-9]{0,5}(?![0-9])))?)\s*")


@dataclass(frozen=True)
class StageSpec:
    """Contents of one virtual stage: layers, and whether the embedding comes before and the head
    after them."""

    embedding: bool
    layers: range
    head: bool


def parse_layout(text: str, layers: int, *, ends: bool = True) -> tuple[StageSpec, ...]:
    """Parse a stage layout. `layers`: the model's number of layers. `ends`: whether the model has
    an embedding and a head.

    Raises :class:`ConfigError` unless the embedding is first, the head last, each occurs once, no
    stage is empty, and the layers add up.
    """
    stages = [_items(part, stage, text) for stage, part in enumerate(text.split("|"))]
    order = [item for stage in stages for item in stage]
    if ends:
        _check_once(order, "E", 0, "embedding", "first", text)
        _check_once(order, "H", len(order) - 1, "head", "last", text)
    elif not all(isinstance(item, int) for item in order):
        raise _error(text, "has E or H, but this model has only layers (L, L*n)")
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
    """Return stages as a stage layout; the inverse of :func:`parse_layout`."""
    return " | ".join(_stage_text(spec.embedding, len(spec.layers), spec.head) for spec in specs)


def from_counts(counts: Sequence[int], *, ends: bool = True) -> str:
    """Return the stage layout with `counts` layers per stage. With `ends` the first stage has the
    embedding, and the last one the head."""
    if not counts or min(counts) < 0:
        raise ConfigError(
            f"pipeline.stage_layout={list(counts)}: expected one layer count per stage, none "
            "negative"
        )
    return _join(counts, ends=ends)


def balanced(
    costs: Sequence[Time],
    placement: Placement,
    *,
    ends: bool = True,
    speeds: Sequence[Fraction] | None = None,
) -> str:
    """Return the stage layout with least work for the busiest rank, then for the slowest stage.

    `costs`: costs of the layers, with `ends` the embedding's before and the head's after them.
    `speeds`: relative speeds of the ranks, by which work takes time; default: all are equal.

    A rank runs all of its stages for each micro-batch, so the rank with the largest sum sets the
    pace of a long step. The slowest stage determines warm-up and drain. With one stage per rank
    both are the same. Ties go to the smallest sum of squared stage costs. If stages have equal
    costs, the last of them gets the next layer: fewer micro-batches wait there for their backward.

    For layers of equal cost the result is optimal if every stage has at most two holders, as in
    pipelines of one or two directions. For other layers the search begins with the partition whose
    slowest stage is fastest, and moves borders by one unit as long as that helps.

    Raises :class:`ConfigError` if there are more stages than units.
    """
    units = in_whole_units(costs)
    layers, stages = len(units) - 2 * ends, placement.stages
    if stages > len(units):
        what = ", embedding and head" if ends else ""
        raise ConfigError(
            f"{stages} pipeline stages (parallel.pp x pipeline.chunks) for {layers} layers{what}: "
            f"at most {len(units)} stages can hold something"
        )
    inner = units[1:-1] if ends else units
    slowness = [1 / speed for speed in speeds or [Fraction(1)] * placement.ranks]
    if len(set(inner)) > 1:
        evened = _evened(units, stages)
        if len(set(slowness)) > 1:
            holders = map(placement.holders, range(stages))
            slowest = [max(slowness[rank] for rank in ranks) for ranks in holders]
            evened = _evened_over_unequal(units, slowest)
        borders = _moved(units, placement, evened, slowness)
        return _join(_layer_counts(borders, layers, ends=ends), ends=ends)
    parts = (inner[0], units[0], units[-1]) if ends else (inner[0], 0, 0)
    quickest = _deal(layers, placement, parts, None, slowness, ends=ends)
    assert quickest is not None
    most = max(rank_loads(placement, stage_costs(quickest, *parts), slowness))
    evener = _deal(layers, placement, parts, most, slowness, ends=ends)
    return _join(evener or quickest, ends=ends)


def stage_costs(counts: Sequence[int], layer: Time, embedding: Time, head: Time) -> list[Time]:
    """Return each stage's cost: its `counts` layers, the first also with embedding, the last with
    head."""
    costs: list[Time] = [count * layer for count in counts]
    costs[0] += embedding
    costs[-1] += head
    return costs


def in_whole_units(costs: Sequence[Time]) -> list[int]:
    """Return the costs in a common unit, in which all of them are whole numbers."""
    exact = [Fraction(cost) for cost in costs]
    unit = lcm(*(cost.denominator for cost in exact))
    return [int(cost * unit) for cost in exact]


def _evened(units: Sequence[int], stages: int) -> list[int]:
    """Minimize the slowest stage's cost. Return borders: the first unit of each stage, and at the
    end the number of units.

    The cost of the slowest stage is a sum over neighbouring units; bisection finds the smallest
    possible sum.
    """
    ends = [0, *accumulate(units)]
    limits = sorted({b - a for a, b in combinations(ends, 2)})

    def fill(limit: int) -> list[int] | None:
        borders = [0]
        for stage in range(stages):
            first, left = borders[-1], stages - stage - 1
            stop = bisect_right(ends, ends[first] + limit) - 1
            stop = min(stop, len(units) - left)  # leave a unit for each later stage
            if stop <= first:
                return None
            borders.append(stop)
        return borders if borders[-1] == len(units) else None

    smallest = bisect_left(range(len(limits)), True, key=lambda i: fill(limits[i]) is not None)
    found = fill(limits[smallest])
    assert found is not None
    return found


def _evened_over_unequal(units: Sequence[int], slowness: Sequence[Fraction]) -> list[int]:
    """Minimize the slowest stage's time if stages are unequal; return borders, as :func:`_evened`.
    `slowness`: time of each stage per cost.

    After each stage, the best borders are known for every number of units that are placed.
    """
    ends = [0, *accumulate(units)]
    best: dict[int, tuple[Fraction, list[int]]] = {0: (Fraction(0), [0])}
    for slow in slowness:
        longer: dict[int, tuple[Fraction, list[int]]] = {}
        for first, (most, borders) in best.items():
            for stop in range(first + 1, len(ends)):
                time = max(most, (ends[stop] - ends[first]) * slow)
                if stop not in longer or time < longer[stop][0]:
                    longer[stop] = time, [*borders, stop]
        best = longer
    return best[len(units)][1]


def _moved(
    units: Sequence[int], placement: Placement, borders: list[int], slowness: Sequence[Fraction]
) -> list[int]:
    """Move stage borders by one unit while that improves the busiest rank's cost, or in a tie the
    slowest stage's, or in a tie the sum of squares."""
    ends = [0, *accumulate(units)]

    def worth(borders: Sequence[int]) -> tuple[Time, Time, Time]:
        costs = [ends[b] - ends[a] for a, b in pairwise(borders)]
        times = _stage_times(placement, costs, slowness)
        loads = rank_loads(placement, costs, slowness)
        return max(loads), max(times), sum(time * time for time in times)

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
    """Return the number of layers per stage. `borders`: index of each stage's first unit, then the
    number of units. Units are the layers and, with `ends`, the embedding and the head."""
    at = [min(max(border - ends, 0), layers) for border in borders]
    return [b - a for a, b in pairwise(at)]


def rank_loads(
    placement: Placement, costs: Sequence[Time], slowness: Sequence[Time] | None = None
) -> list[Time]:
    """Return each pipeline rank's time per micro-batch: the sum over its stages, for all directions
    of a bidirectional pipeline.

    `costs`: cost of each stage. `slowness`: time of each rank per cost; default: 1.
    """
    loads: list[Time] = [0] * placement.ranks
    for row in placement.table:
        for rank, cost in zip(row, costs, strict=True):
            loads[rank] += cost
    if slowness is None:
        return loads
    return [load * slow for load, slow in zip(loads, slowness, strict=True)]


def _stage_times(
    placement: Placement, costs: Sequence[Time], slowness: Sequence[Fraction]
) -> list[Time]:
    """Return each stage's time on the slowest rank that holds it."""
    return [
        cost * max(slowness[rank] for rank in placement.holders(stage))
        for stage, cost in enumerate(costs)
    ]


def _deal(
    layers: int,
    placement: Placement,
    parts: tuple[Time, Time, Time],
    most: Time | None,
    slowness: Sequence[Fraction],
    *,
    ends: bool,
) -> list[int] | None:
    """Assign layers to stages one by one; return the number of layers per stage.

    Without `most`, the cheapest stage of the least loaded rank gets the next layer. With `most`,
    the maximum load of a rank, the cheapest stage that keeps its ranks within it gets the layer.
    Return None if no stage does. `parts`: costs of a layer, the embedding and the head. `slowness`:
    time of each rank per cost.
    """
    layer, stages = parts[0], placement.stages
    counts = [int(not ends or 0 < stage < stages - 1) for stage in range(stages)]
    costs = _stage_times(placement, stage_costs(counts, *parts), slowness)
    loads = rank_loads(placement, stage_costs(counts, *parts), slowness)
    of_layer = _stage_times(placement, [layer] * stages, slowness)
    times = [Counter(row[stage] for row in placement.table) for stage in range(stages)]
    for _ in range(layers - sum(counts)):
        best: tuple[Time, Time, int] | None = None
        for stage in range(stages):
            load = max(
                loads[rank] + layer * slowness[rank] * often for rank, often in times[stage].items()
            )
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
        costs[stage] += of_layer[stage]
        for rank, often in times[stage].items():
            loads[rank] += layer * slowness[rank] * often
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
    """Return the items of one stage in order: "E", "H", or a number of layers."""
    items: list[str | int] = []
    at = 0
    while at < len(part):
        match = _ITEM.match(part, at)
        if match is None:
            if not part[at:].strip():
                break
            raise _error(text, f"stage {stage}: {part[at:].strip()!r} is not E, L, L*n or H")
        items.append(match["name"] or int(match["count"] or 1))
        at = match.end()
    if not items:
        raise _error(text, f"stage {stage} is empty; every stage must hold something")
    return items


def _check_once(
    order: list[str | int], name: str, index: int, what: str, expected: str, text: str
) -> None:
    if order.count(name) != 1:
        raise _error(text, f"has {order.count(name)} times {name} (the {what}), expected once")
    if order[index] != name:
        raise _error(text, f"{name} (the {what}) must come {expected}")


def _error(text: str, problem: str) -> ConfigError:
    shown = text if len(text) <= 60 else text[:57] + "..."
    return ConfigError(f"pipeline.stage_layout={shown!r}: {problem}")
