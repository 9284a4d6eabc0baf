"""Rows of experts: tokens in the order of their experts, and their way to the ranks of these.

A token has a row for each of its choices. A rank's rows are in the order of all experts, so those
for one rank of the expert-parallel group are neighbours: one all-to-all brings them there, where
they are put into the order of experts, then sources, then positions; another brings results back.
Where the width of an expert is split over etp ranks each of these gets its rows, and their results
are added up, in the order of the ranks, where the tokens are.
Rows are gathered and their outputs added up in the order of the choices, without atomics, so the
sums are always the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import all_gather, all_to_all


class Counts(NamedTuple):
    """Rows that each rank of the group has for each of all experts."""

    of_ranks: Sequence[Sequence[int]]
    there: Tensor | None
    """The same on the device, int64 [ranks, experts], where there are several."""


def count_rows(choice: Tensor, experts: int, ep: Axis) -> Counts:
    """Of what :func:`~megapipe.layers.routing.choose` found here and on the other ranks. Counts go
    to the host, which waits for them: sizes of tensors follow from them."""
    keys = torch.where(choice < 0, experts, choice).flatten().long()
    counts = numbers_of(keys, experts + 1)[:experts]
    found = all_gather(counts, ep).view(ep.size, experts)
    return Counts(found.tolist(), found if ep.size > 1 else None)


def numbers_of(values: Tensor, size: int) -> Tensor:
    """How often each of 0 .. size - 1 is among int64 values; torch.bincount has the host wait."""
    return values.new_zeros(size).scatter_add_(0, values, torch.ones_like(values))


class Rows(NamedTuple):
    """The rows of a micro-batch's tokens in the order of their experts."""

    order: Tensor
    """[tokens * k]: choices as numbers token * k + choice, in the order of the rows; dropped ones
    come last and have no row."""
    slots: Tensor
    """[tokens, k]: row of each choice; one beyond the last where it is dropped."""
    total: int

    @classmethod
    def of(cls, choice: Tensor, total: int) -> Rows:
        """Those of what :func:`~megapipe.layers.routing.choose` found, `total` in all."""
        keys = torch.where(choice < 0, torch.iinfo(choice.dtype).max, choice).flatten()
        order = keys.argsort(stable=True)
        slots = torch.empty_like(order)
        slots[order] = torch.arange(len(order), device=order.device)
        return cls(order, slots.clamp_(max=total).view(choice.shape), total)

    def gather(self, x: Tensor) -> Tensor:
        """Rows [rows, h] of tokens [tokens, h]."""
        return x[self.order[: self.total] // self.slots.shape[1]]

    def of_choices(self, values: Tensor) -> Tensor:
        """[rows] of values of choices [tokens, k]."""
        return values.flatten()[self.order[: self.total]]

    def to_choices(self, values: Tensor) -> Tensor:
        """[tokens, k] of values [rows]; 0 where a choice is dropped."""
        return torch.cat((values, values.new_zeros(1)))[self.slots]

    def add_up(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens, h]: the rows [rows, h] of each token's choices added in their order, in `dtype`;
        a dropped one adds 0."""
        if self.total < self.slots.numel():
            rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
        total = rows[self.slots[:, 0]].to(dtype)
        for choice in range(1, self.slots.shape[1]):
            total += rows[self.slots[:, choice]]
        return total


class Dispatch(NamedTuple):
    """The way of rows to the ranks that have their experts, and back.

    All ranks of the group go it together, also those without rows, or with experts without any.
    """

    ep: Axis
    etp: int
    """Neighbours in the group with parts of the same experts."""
    sends: Sequence[int]
    """Rows for each rank."""
    receives: Sequence[int]
    """Rows from each rank."""
    ends: Sequence[int]
    """Of the rows of each expert here."""
    order: Tensor | None
    """[rows here]: in the order of their experts, which of those that arrived they are; None where
    this rank has all experts."""

    @classmethod
    def of(cls, told: Counts, ep: Axis, etp: int) -> Dispatch:
        counts = told.of_ranks
        n = len(counts[0]) * etp // ep.size
        parts = [slice(n * i, n * (i + 1)) for i in range(ep.size // etp) for _ in range(etp)]
        arriving = [own[parts[ep.index]] for own in counts]  # [source][expert here]
        order = None
        if told.there is not None:
            stops = told.there[:, parts[ep.index]].flatten().cumsum(0)  # by source, then expert
            rows = torch.arange(sum(map(sum, arriving)), device=stops.device)
            order = torch.searchsorted(stops, rows, right=True).remainder_(n).argsort(stable=True)
        return cls(
            ep,
            etp,
            sends=[sum(counts[ep.index][part]) for part in parts],
            receives=[sum(own) for own in arriving],
            ends=list(accumulate(map(sum, zip(*arriving, strict=True)))),
            order=order,
        )

    def there(self, rows: Tensor) -> Tensor:
        """[rows of the tokens here, ...] -> [rows of the experts here, ...]."""
        if self.order is None:
            return rows
        if self.etp > 1:
            parts = rows.split(self.sends[:: self.etp])
            rows = torch.cat([part for part in parts for _ in range(self.etp)])
        return self._exchange(rows, self.sends, self.receives)[self.order]

    def back(self, rows: Tensor) -> Tensor:
        """[rows of the experts here, ...] -> [rows of the tokens here, ...], sums over etp in
        higher precision."""
        if self.order is None:
            return rows
        arrived = torch.empty_like(rows)
        arrived[self.order] = rows
        results = self._exchange(arrived, self.receives, self.sends)
        if self.etp == 1:
            return results
        high = torch.promote_types(rows.dtype, torch.float32)
        parts = [part.to(high) for part in results.split(self.sends)]
        return torch.cat([sum(parts[i + 1 : i + self.etp], parts[i]) for i in self._firsts])

    @property
    def _firsts(self) -> range:
        """The first rank of each that have parts of the same experts."""
        return range(0, self.ep.size, self.etp)

    def _exchange(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        width = prod(rows.shape[1:])
        sent, received = ([width * n for n in numbers] for numbers in (sends, receives))
        return all_to_all(rows.flatten(), sent, received, self.ep).view(-1, *rows.shape[1:])
