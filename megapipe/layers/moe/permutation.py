"""Permutation of tokens into expert rows: the order of their experts.

A token has a row for each of its choices. A rank orders its rows by expert, so the rows for one
rank of the expert-parallel group are adjacent; :mod:`megapipe.layers.moe.dispatch` sends rows to
the experts and results back. With expert chunks, the rows of a chunk are adjacent. The outputs of a
token's rows are summed in the order of its choices, without atomics, so sums are deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import all_gather
from megapipe.ops.moe.elementwise import MoEElementwiseKernel


class ExpertCounts:
    """Number of rows that each rank of the group has for each expert: `known` to the host, or
    `counted` on the device, int64 [ranks, experts]."""

    def __init__(
        self,
        known: Sequence[Sequence[int]] | None = None,
        on_device: Tensor | None = None,
        rows_per_sequence: int | None = None,
        *,
        counted: Tensor | None = None,
    ) -> None:
        self._known, self._counted = known, counted
        self.on_device = on_device
        """Counts on the device, if there are several ranks and their counts differ."""
        self.rows_per_sequence = rows_per_sequence
        """Number of rows per expert and sequence, if rows are padded instead of counted
        (:mod:`megapipe.layers.moe.padding`)."""

    @property
    def by_rank(self) -> Sequence[Sequence[int]]:
        """Counts on the host; the first access waits for the device."""
        if self._known is None:
            assert self._counted is not None
            self._known, self._counted = self._counted.tolist(), None
        return self._known


def count_rows(choice: Tensor, experts: int, ep: Axis) -> ExpertCounts:
    """Count the rows per expert (or slot) on every rank of `ep`, with one all-gather. `choice`:
    expert (or slot) of each choice; negative if the choice is dropped."""
    keys = torch.where(choice < 0, experts, choice).flatten().long()
    counts = bincount(keys, experts + 1)[:experts]
    found = all_gather(counts, ep).view(ep.size, experts)
    return ExpertCounts(on_device=found if ep.size > 1 else None, counted=found)


def bincount(values: Tensor, size: int) -> Tensor:
    """Count how often each of 0 .. size - 1 is in `values`, without torch.bincount's host wait."""
    return values.new_zeros(size).scatter_add_(0, values, torch.ones_like(values))


def occurrence_index(values: Tensor, size: int) -> Tensor:
    """Return, for each of int64 values in 0 .. size - 1, how many equal values precede it."""
    sorted_, index = values.sort(stable=True)
    counts = bincount(values, size)
    first = counts.cumsum(0) - counts
    found = torch.empty_like(values)
    found[index] = torch.arange(len(values), device=values.device) - first[sorted_]
    return found


class Permutation(NamedTuple):
    """Rows of a micro-batch's tokens in the order of their experts."""

    choice_of_row: Tensor
    """[tokens * k]: choice of each row, as token * k + index of the choice. Dropped choices, which
    have no row, come last."""
    row_of_choice: Tensor
    """[tokens, k]: row of each choice, or `num_rows` if the choice is dropped."""
    num_rows: int

    @classmethod
    def of(
        cls, choice: Tensor, total: int, of_each: int = 1, chunks: int = 1, copies: int = 0
    ) -> Permutation:
        """Order the choices of :func:`~megapipe.layers.moe.routing.route_tokens` into `total` rows:
        rows for the first expert chunk of every rank, then for the second, ... Each rank has
        `of_each` slots; the last `copies` slots hold replicas and are the last chunk."""
        keys = torch.where(choice < 0, torch.iinfo(choice.dtype).max, choice).flatten()
        if chunks > 1 or copies:
            chunk = (keys.long() % of_each * chunks // (of_each - copies)).clamp_(max=chunks)
            keys = torch.where(choice.flatten() < 0, chunks + 1, chunk) * 2**16 + keys
        order = keys.argsort(stable=True)
        rows = torch.empty_like(order)
        rows[order] = torch.arange(len(order), device=order.device)
        return cls(order, rows.clamp_(max=total).view(choice.shape), total)

    def permute(self, x: Tensor, part: slice = slice(None)) -> Tensor:
        """Gather tokens x [tokens, h] into rows [rows, h], or into the range `part` of rows."""
        return self.at(x, self.choice_of_row[: self.num_rows][part] // self.row_of_choice.shape[1])

    def permute_weights(self, values: Tensor, part: slice = slice(None)) -> Tensor:
        """Gather values of choices [tokens, k] into [rows], or into the range `part` of rows."""
        return self.at(values.flatten(), self.choice_of_row[: self.num_rows][part])

    def at(self, values: Tensor, index: Tensor) -> Tensor:
        """Return the values at `index`, [rows, ...]."""
        return values[index]

    @property
    def drops(self) -> bool:
        """Whether some choices may be dropped, and so have no row."""
        return self.num_rows < self.row_of_choice.numel()

    def unpermute_weights(self, values: Tensor) -> Tensor:
        """Map values of rows [rows] to values of choices [tokens, k]; 0 for dropped choices."""
        return torch.cat((values, values.new_zeros(1)))[self.row_of_choice]

    def unpermute(self, rows: Tensor, dtype: torch.dtype, kernel: MoEElementwiseKernel) -> Tensor:
        """Sum the rows [rows, h] of each token in the order of its choices, in `dtype`: [tokens,
        h]. Dropped choices add 0."""
        if self.drops:
            rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
        return kernel.unpermute(rows, self.row_of_choice, dtype)
