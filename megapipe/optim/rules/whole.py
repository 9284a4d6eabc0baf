"""Whole matrices out of flat slices and parts that are split over tp, where they are needed.

Over a shard's axis each rank gets its tp part of every matrix that reaches into its slice, and no
other: a few pieces per boundary cross the wire, not the bucket. Over tp the matrices are then
dealt out, each is made whole on one rank, and its parts of the result go back; so memory stays
that of the parts, and tp ranks share the work. Who gets what follows from sizes that all members
know. All ranks of one tp axis have the same slice of the bucket, and so the same matrices. What is
split over ep is split over etp instead, and each rank has some of it: what is said of tp holds of
etp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megapipe.distributed.collectives import all_to_all
from megapipe.distributed.mesh import Axis
from megapipe.layers.parameter import LocalParameter
from megapipe.optim.buffers import ParamRange

Function = Callable[[Tensor, LocalParameter], Tensor]
"""A function of a whole matrix [..., m, n], which keeps shape and type."""


def gather_local(
    values: Tensor, entries: Sequence[ParamRange], axis: Axis
) -> tuple[list[ParamRange], list[Tensor]]:
    """Those of the `entries` that reach into this rank's slice, and their whole local regions.

    `values` are this rank's slice [n] of an array over the bucket, tiled by the axis' members.
    """
    n = len(values)

    def share(member: int, entry: ParamRange) -> slice:
        """The part of an entry in a member's slice, counted from the slice's start."""
        start = max(0, entry.start - member * n)
        return slice(start, max(start, min(n, entry.stop - member * n)))

    def length(member: int, entry: ParamRange) -> int:
        part = share(member, entry)
        return int(part.stop - part.start)

    me = axis.index
    own = [entry for entry in entries if length(me, entry)]
    wanted = [[e for e in own if length(reader, e)] for reader in range(axis.size)]
    received = all_to_all(
        torch.cat([values[:0], *(values[share(me, e)] for theirs in wanted for e in theirs)]),
        [sum(length(me, e) for e in theirs) for theirs in wanted],
        [sum(length(holder, e) for e in own) for holder in range(axis.size)],
        axis,
    )
    # what came is in order of holder and entry, which is the order of the bucket
    regions = received.split([entry.spec.numel for entry in own])
    return own, [region.view(e.spec.sizes) for region, e in zip(regions, own, strict=True)]


def apply_to_full_matrices(
    regions: Sequence[Tensor],
    specs: Sequence[LocalParameter],
    tp: Axis,
    function: Function,
) -> list[Tensor]:
    """`function` of each whole matrix, of which every tp rank has a region; returns its regions.

    Matrices that every tp rank has whole, as of adapters, need nobody else.
    """
    split = [i for i, spec in enumerate(specs) if tp.size > 1 and spec.split]
    parts = [regions[i] for i in split]
    done = dict(zip(split, _on_split(parts, [specs[i] for i in split], tp, function), strict=True))
    return [
        done[i] if i in done else function(region, specs[i]) for i, region in enumerate(regions)
    ]


def _on_split(
    regions: Sequence[Tensor],
    specs: Sequence[LocalParameter],
    tp: Axis,
    function: Function,
) -> list[Tensor]:
    """The same for matrices that are split over tp."""
    if not regions:
        return []
    hands = deal([_work(spec) for spec in specs], tp.size)
    order = [i for hand in hands for i in hand]
    lengths = [sum(specs[i].numel for i in hand) for hand in hands]
    mine, alike = hands[tp.index], [lengths[tp.index]] * tp.size
    given = torch.cat([regions[i].reshape(-1) for i in order])
    parts = all_to_all(given, lengths, alike, tp).view(tp.size, -1)  # [tp, values of my matrices]
    results = [
        _on_parts(part, specs[i], function)
        for i, part in zip(mine, parts.split([specs[i].numel for i in mine], dim=1), strict=True)
    ]
    back = torch.cat([parts[:, :0], *results], dim=1).reshape(-1)
    received = all_to_all(back, alike, lengths, tp).split([specs[i].numel for i in order])
    by_index = dict(zip(order, received, strict=True))
    return [by_index[i].view(spec.sizes) for i, spec in enumerate(specs)]


def _on_parts(parts: Tensor, spec: LocalParameter, function: Function) -> Tensor:
    """`function` of a matrix from the flat regions of all tp ranks, cut as these: [tp, numel]."""
    dim = spec.inner_dim if spec.over_ep else spec.split_dim
    assert dim is not None, f"{spec.name} is not split"
    whole = torch.cat([part.view(spec.sizes) for part in parts], dim=dim)
    return torch.stack(function(whole, spec).chunk(len(parts), dim=dim)).flatten(1)


def deal(work: Sequence[float], hands: int) -> list[list[int]]:
    """Indices of `work` in `hands` lists of about equal sums: largest first, to the least sum."""
    dealt: list[list[int]] = [[] for _ in range(hands)]
    totals = [0.0] * hands
    for i in sorted(range(len(work)), key=lambda i: -work[i]):
        least = totals.index(min(totals))
        dealt[least].append(i)
        totals[least] += work[i]
    return dealt


def _work(spec: LocalParameter) -> float:
    """Multiplications of a Newton-Schulz iteration, up to a factor, of this rank's [..., m, n]."""
    m, n = sorted(spec.shape[-2:])
    count = math.prod(spec.shape[:-2])
    if spec.over_ep:
        count = count // spec.shape[0] * spec.sizes[0]
    return float(count * m * m * (m + 2 * n))
