"""Numbers of a step about layers with experts, from those of its micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megapipe.layers.moe.routing import LOAD
from megapipe.layers.moe.specs import NUM_STATS
from megapipe.layers.scratch import Scratch
from megapipe.observe.routing_record import RoutingRecord


def summed_loads(
    told: Mapping[int, int], scratches: Sequence[Scratch], device: torch.device
) -> list[Tensor]:
    """The loads of each layer, which has told so many numbers, added up over micro-batches; zeros
    for layers of other ranks."""
    found: list[Tensor] = []
    if not told:
        return found
    loads = [scratch.by_layer(LOAD) for scratch in scratches]
    for layer, numbers in told.items():
        total = torch.zeros(numbers, dtype=torch.float64, device=device)
        for load in loads:
            if layer in load:
                total += load[layer]
        found.append(total)
    return found


def by_layer(
    experts: Mapping[int, int], values: Sequence[float]
) -> Iterator[tuple[int, Sequence[float], Sequence[float], Sequence[float]]]:
    """Each layer, its first numbers, the choices of each of its experts, and those of them that the
    balance term of the next step counts, of :func:`summed_loads` one after the other. The last are
    the same where no others are told."""
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
    largest_bias: float | None = None,
    *,
    counts: bool = False,
) -> RoutingRecord | None:
    """The record of a step, of :func:`summed_loads` of all ranks together, with the `counts` of
    each layer or without; None without experts."""
    if not experts:
        return None
    layers = []
    for _, (tokens, balance, z, dropped), chosen, _ in by_layer(experts, values):
        layers.append((balance / tokens, z / tokens, dropped / sum(chosen), chosen))
    balances, zs, shares, choices = zip(*layers, strict=True)
    loads = {n: max(own) * len(own) / sum(own) for n, own in zip(experts, choices, strict=True)}
    return RoutingRecord(
        balance=sum(balances) / len(layers),
        z=sum(zs) / len(layers),
        dropped=sum(shares) / len(layers),
        largest_load=max(loads.values()),
        idle_experts=sum(chosen.count(0) for chosen in choices),
        largest_bias=largest_bias,
        loads=loads,
        counts={n: list(map(int, own)) for n, own in zip(experts, choices, strict=True)}
        if counts
        else None,
    )
