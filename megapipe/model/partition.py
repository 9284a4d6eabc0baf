"""Partition of a model into pipeline stages.

A layout is a string such as ``"E L*3 | L*4 | L*4 | L*3 H"``: stages in order, each made of ``E``
(embedding), ``L`` or ``L*n`` (layers) and ``H`` (final norm and head). It is the only way a
partition is described: layer counts and the default by cost are written as such a string too,
and whatever the origin, :func:`parse_layout` proves that every layer is placed exactly once.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megapipe.errors import ConfigError

_ITEM = re.compile(r"\s*(?:(?P<name>[EH])|L(?:\s*\*\s*(?P<count>[1-9][0-9]{0,5}(?![0-9])))?)\s*")


@dataclass(frozen=True)
class StageSpec:
    """What one virtual stage holds: global layer numbers, and which ends of the model."""

    embedding: bool
    layers: range
    head: bool


def parse_layout(text: str, layers: int) -> tuple[StageSpec, ...]:
    """The stages that `text` describes, for a model of `layers` layers.

    Raises :class:`ConfigError` unless the embedding comes first, the head last, each once, no
    stage is empty, and the layers add up.
    """
    stages = [_items(part, stage, text) for stage, part in enumerate(text.split("|"))]
    order = [item for stage in stages for item in stage]
    _check_once(order, "E", 0, "embedding", "first", text)
    _check_once(order, "H", len(order) - 1, "head", "last", text)
    specs = []
    placed = 0
    for items in stages:
        count = sum(item for item in items if isinstance(item, int))
        specs.append(StageSpec("E" in items, range(placed, placed + count), "H" in items))
        placed += count
    if placed != layers:
        raise _error(text, f"places {placed} layers, but model.layers is {layers}")
    return tuple(specs)


def format_layout(specs: Sequence[StageSpec]) -> str:
    """The layout string of `specs`, the inverse of :func:`parse_layout`."""
    return " | ".join(_stage_text(spec.embedding, len(spec.layers), spec.head) for spec in specs)


def from_counts(counts: Sequence[int]) -> str:
    """The layout with `counts` layers per stage, embedding in the first and head in the last."""
    if not counts or min(counts) < 0:
        raise ConfigError(
            f"pipeline.layout={list(counts)}: expected one layer count per stage, none negative"
        )
    return _join(counts)


def even(layers: int, stages: int, embedding_cost: float, head_cost: float) -> str:
    """The layout whose most expensive stage is cheapest, where a layer costs 1.

    Among several, the one with the smallest sum of squared stage costs, then of squared layer
    counts, then the one with the fewest layers in the first stage. Stages between the first and
    the last differ by at most one layer, the larger ones later, where fewer micro-batches wait
    for their backward.
    """
    if stages > layers + 2:
        raise ConfigError(
            f"{stages} pipeline stages (parallel.pp x pipeline.chunks) for {layers} layers, "
            f"embedding and head: at most {layers + 2} stages can hold something"
        )
    if stages == 1:
        return _join([layers])
    inner = stages - 2
    best: tuple[float, float, int, int, int] | None = None
    for first in range(layers - inner + 1):
        rest = layers - first
        for last in range(rest - inner + 1) if inner else (rest,):
            ends = (embedding_cost + first, last + head_cost)
            if best is not None and max(ends) > best[0]:
                continue
            small, larger = divmod(rest - last, inner) if inner else (0, 0)
            most = max(*ends, small + (larger > 0))
            between = (inner - larger) * small**2 + larger * (small + 1) ** 2
            squares = ends[0] ** 2 + ends[1] ** 2 + between
            candidate = (most, squares, first**2 + last**2 + between, first, last)
            best = candidate if best is None else min(best, candidate)
    assert best is not None  # stages <= layers + 2: the first and the last may hold no layer
    *_, first, last = best
    small, larger = divmod(layers - first - last, inner) if inner else (0, 0)
    return _join([first, *[small] * (inner - larger), *[small + 1] * larger, last])


def _join(counts: Sequence[int]) -> str:
    end = len(counts) - 1
    return " | ".join(_stage_text(i == 0, count, i == end) for i, count in enumerate(counts))


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
