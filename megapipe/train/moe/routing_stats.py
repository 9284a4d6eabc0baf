"""Routing totals of a step, from the routing statistics of micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megapipe.layers.moe.routing import LOAD
from megapipe.layers.moe.specs import NUM_STATS
from megapipe.layers.scratch import Scratch
from megapipe.observe.routing_record import RoutingRecord


def summed_loads(
    sizes: Mapping[int, int], scratches: Sequence[Scratch], device: torch.device
) -> list[Tensor]:
    """Sum the routing statistics of each layer over micro-batches; zeros for layers of other ranks.
    `sizes` is the number of statistics of each layer."""
    found: list[Tensor] = []
    if not sizes:
        return found
    loads = [scratch.by_layer(LOAD) for scratch in scratches]
    for layer, numbers in sizes.items():
        total = torch.zeros(numbers, dtype=torch.float64, device=device)
        for load in loads:
            if layer in load:
                total += load[layer]
        found.append(total)
    return found


def by_layer(
    experts: Mapping[int, int], values: Sequence[float]
) -> Iterator[tuple[int, Sequence[float], Sequence[float], Sequence[float]]]:
    """Split the vector of :func:`summed_loads` by layer. Yield the layer, the layer's statistics,
    the choice counts of its experts, and the choice counts for the next step's auxiliary loss (the
    same ones unless first choices are counted separately)."""
    kinds, left = divmod(len(values) - NUM_STATS * len(experts), sum(experts.values()))
    assert kinds in (1, 2)
    assert not left
    start = 0
    for layer, count in experts.items():
        begin, end = start + NUM_STATS, start + NUM_STATS + kinds * count
        yield layer, values[start:begin], values[begin : begin + count], values[end - count : end]
        start = end


def record(
    experts: Mapping[int, int],
    values: Sequence[float],
    max_bias: float | None = None,
    *,
    counts: bool = False,
) -> RoutingRecord | None:
    """Make the record of a step from :func:`summed_loads` over all ranks; None without experts. If
    `counts` is set, the record has the choice counts of all experts."""
    if not experts:
        return None
    layers = []
    for _, (tokens, balance, z, dropped), chosen, _ in by_layer(experts, values):
        layers.append((balance / tokens, z / tokens, dropped / sum(chosen), chosen))
    balances, zs, shares, choices = zip(*layers, strict=True)
    loads = {n: max(own) * len(own) / sum(own) for n, own in zip(experts, choices, strict=True)}
    return RoutingRecord(
        aux_loss=sum(balances) / len(layers),
        z_loss=sum(zs) / len(layers),
        dropped_fraction=sum(shares) / len(layers),
        max_load=max(loads.values()),
        idle_experts=sum(chosen.count(0) for chosen in choices),
        max_bias=max_bias,
        max_load_by_layer=loads,
        counts={n: list(map(int, own)) for n, own in zip(experts, choices, strict=True)}
        if counts
        else None,
    )
