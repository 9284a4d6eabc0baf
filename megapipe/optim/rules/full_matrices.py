"""Full matrices, assembled from flat shards and tensor-parallel parts for rules that need them.

Over the shard axis, each rank receives its tp part of only those matrices that overlap its shard: a
few values per shard boundary are sent, not the bucket. Then the matrices are distributed over tp:
each matrix is assembled on one rank, and the parts of the result are sent back. So a rank needs no
more memory than for its parts, and tp ranks share the work. All ranks know all sizes, hence which
rank receives what. All ranks of one tp axis have the same shard of the bucket, and so the same
matrices. For parameters split over ep, etp replaces tp, and each rank has some of the experts.
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
"""A function of a whole matrix [..., m, n] that keeps shape and type."""


def gather_local(
    values: Tensor, entries: Sequence[ParamRange], axis: Axis
) -> tuple[list[ParamRange], list[Tensor]]:
    """Return the `entries` that overlap this rank's shard, and their whole local regions.

    `values` is this rank's shard [n] of an array as long as the bucket, sharded over `axis`.
    """
    n = len(values)

    def share(member: int, entry: ParamRange) -> slice:
        """Return a parameter's range in a member's shard, counted from the shard's start."""
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
    # received values are in the order of holder and entry, which is the order of the bucket
    regions = received.split([entry.spec.numel for entry in own])
    return own, [region.view(e.spec.sizes) for region, e in zip(regions, own, strict=True)]


def apply_to_full_matrices(
    regions: Sequence[Tensor],
    specs: Sequence[LocalParameter],
    tp: Axis,
    function: Function,
) -> list[Tensor]:
    """Apply `function` to whole matrices. Each tp rank passes its regions of the matrices and gets
    the same regions of the results.

    Matrices that every tp rank has in full, e.g. in adapters, need no communication.
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
    """Apply `function` to matrices that are all split over tp; see
    :func:`apply_to_full_matrices`."""
    if not regions:
        return []
    hands = deal([_work(spec) for spec in specs], tp.size)
    order = [i for hand in hands for i in hand]
    lengths = [sum(specs[i].numel for i in hand) for hand in hands]
    mine, alike = hands[tp.index], [lengths[tp.index]] * tp.size
    send_buffer = torch.cat([regions[i].reshape(-1) for i in order])
    # [tp, values of my matrices]
    parts = all_to_all(send_buffer, lengths, alike, tp).view(tp.size, -1)
    results = [
        _on_parts(part, specs[i], function)
        for i, part in zip(mine, parts.split([specs[i].numel for i in mine], dim=1), strict=True)
    ]
    back = torch.cat([parts[:, :0], *results], dim=1).reshape(-1)
    received = all_to_all(back, alike, lengths, tp).split([specs[i].numel for i in order])
    by_index = dict(zip(order, received, strict=True))
    return [by_index[i].view(spec.sizes) for i, spec in enumerate(specs)]


def _on_parts(parts: Tensor, spec: LocalParameter, function: Function) -> Tensor:
    """Join all tp ranks' flat regions of a matrix, apply `function`, and split the result in the
    same way: [tp, n]."""
    dim = spec.inner_dim if spec.over_ep else spec.split_dim
    assert dim is not None, f"{spec.name} is not split"
    whole = torch.cat([part.view(spec.sizes) for part in parts], dim=dim)
    return torch.stack(function(whole, spec).chunk(len(parts), dim=dim)).flatten(1)


def deal(work: Sequence[float], hands: int) -> list[list[int]]:
    """Divide the indices of `work` into `hands` lists of about equal work, largest first."""
    dealt: list[list[int]] = [[] for _ in range(hands)]
    totals = [0.0] * hands
    for i in sorted(range(len(work)), key=lambda i: -work[i]):
        least = totals.index(min(totals))
        dealt[least].append(i)
        totals[least] += work[i]
    return dealt


def _work(spec: LocalParameter) -> float:
    """Estimate the relative cost of a Newton-Schulz iteration on local matrices [..., m, n]."""
    m, n = sorted(spec.shape[-2:])
    count = math.prod(spec.shape[:-2])
    if spec.over_ep:
        count = count // spec.shape[0] * spec.sizes[0]
    return float(count * m * m * (m + 2 * n))
