"""Rows of experts: tokens in the order of their experts.

A token has a row for each of its choices. A rank's rows are in the order of all experts, so those
for one rank of the expert-parallel group are neighbours; their way there and back is
:mod:`megapipe.layers.moe.dispatch`. Where they travel in chunks, the rows of a chunk are
neighbours. Rows are gathered and their outputs added up in the order of the choices, without
atomics, so the sums are always the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import all_gather
from megapipe.ops.moe.rows import MoEElementwiseKernel


class ExpertCounts:
    """Rows that each rank of the group has for each of all experts: `known` to the host, or
    `counted` on the device, int64 [ranks, experts]."""

    def __init__(
        self,
        known: Sequence[Sequence[int]] | None = None,
        there: Tensor | None = None,
        places: int | None = None,
        *,
        counted: Tensor | None = None,
    ) -> None:
        self._known, self._counted = known, counted
        self.on_device = there
        """The same on the device, where there are several ranks and they differ."""
        self.rows_per_sequence = places
        """Rows of an expert and a sequence, if these are not counted: some may be empty
        (:mod:`megapipe.layers.moe.padding`)."""

    @property
    def by_rank(self) -> Sequence[Sequence[int]]:
        """The host waits for them, once: sizes of tensors follow from them."""
        if self._known is None:
            assert self._counted is not None
            self._known, self._counted = self._counted.tolist(), None
        return self._known


def count_rows(choice: Tensor, experts: int, ep: Axis) -> ExpertCounts:
    """Of what :func:`~megapipe.layers.moe.routing.route_tokens` found here and on the other
    ranks."""
    keys = torch.where(choice < 0, experts, choice).flatten().long()
    counts = bincount(keys, experts + 1)[:experts]
    found = all_gather(counts, ep).view(ep.size, experts)
    return ExpertCounts(there=found if ep.size > 1 else None, counted=found)


def bincount(values: Tensor, size: int) -> Tensor:
    """How often each of 0 .. size - 1 is among int64 values; torch.bincount has the host wait."""
    return values.new_zeros(size).scatter_add_(0, values, torch.ones_like(values))


def occurrence_index(values: Tensor, size: int) -> Tensor:
    """How many equal ones are before each of int64 values, which are 0 .. size - 1."""
    sorted_, index = values.sort(stable=True)
    counts = bincount(values, size)
    first = counts.cumsum(0) - counts
    found = torch.empty_like(values)
    found[index] = torch.arange(len(values), device=values.device) - first[sorted_]
    return found


class Permutation(NamedTuple):
    """The rows of a micro-batch's tokens in the order of their experts."""

    choice_of_row: Tensor
    """[tokens * k]: choices as numbers token * k + choice, in the order of the rows; dropped ones
    come last and have no row."""
    row_of_choice: Tensor
    """[tokens, k]: row of each choice; one beyond the last where it is dropped."""
    num_rows: int

    @classmethod
    def of(
        cls, choice: Tensor, total: int, of_each: int = 1, chunks: int = 1, copies: int = 0
    ) -> Permutation:
        """Those of what :func:`~megapipe.layers.moe.routing.route_tokens` found, `total` in all:
        those of the first chunk of each rank's `of_each` places, of the second, ... So many of
        these are for copies, the last ones, in a chunk of their own."""
        keys = torch.where(choice < 0, torch.iinfo(choice.dtype).max, choice).flatten()
        if chunks > 1 or copies:
            chunk = (keys.long() % of_each * chunks // (of_each - copies)).clamp_(max=chunks)
            keys = torch.where(choice.flatten() < 0, chunks + 1, chunk) * 2**16 + keys
        order = keys.argsort(stable=True)
        slots = torch.empty_like(order)
        slots[order] = torch.arange(len(order), device=order.device)
        return cls(order, slots.clamp_(max=total).view(choice.shape), total)

    def permute(self, x: Tensor, part: slice = slice(None)) -> Tensor:
        """Rows [rows, h] of tokens [tokens, h], or a part of them."""
        return self.at(x, self.choice_of_row[: self.num_rows][part] // self.row_of_choice.shape[1])

    def permute_weights(self, values: Tensor, part: slice = slice(None)) -> Tensor:
        """[rows] of values of choices [tokens, k], or a part of them."""
        return self.at(values.flatten(), self.choice_of_row[: self.num_rows][part])

    def at(self, values: Tensor, index: Tensor) -> Tensor:
        """Rows of these of the values, [rows, ...]."""
        return values[index]

    @property
    def drops(self) -> bool:
        """Whether a choice may have no row."""
        return self.num_rows < self.row_of_choice.numel()

    def unpermute_weights(self, values: Tensor) -> Tensor:
        """[tokens, k] of values [rows]; 0 where a choice is dropped."""
        return torch.cat((values, values.new_zeros(1)))[self.row_of_choice]

    def unpermute(self, rows: Tensor, dtype: torch.dtype, kernel: MoEElementwiseKernel) -> Tensor:
        """[tokens, h]: the rows [rows, h] of each token's choices added in their order, in `dtype`;
        a dropped one adds 0."""
        if self.drops:
            rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
        return kernel.unpermute(rows, self.row_of_choice, dtype)
