"""Rows of experts with room for all that there can be (``experts.pad``), which nobody counts.

How many rows an expert has follows from what tokens choose, and sizes of tensors from that, so the
host waits until its GPU has counted. With a capacity there are C at most of an expert and a
sequence. Where all of these have a place, whether a token takes it or not, every size is known
before. Of two sequences, a c e and b d f::

    expert            0              1
    sequence      0       1      0       1
    C = 3       a c .   d . .  e . .   b . .     f is dropped

Empty rows are zeros, and so are their weights and, in the backward, their gradients: they add
nothing to gradients of experts, and nobody takes their results. A rank with s positions of a
sequence has C or s places, the fewer, as a token chooses an expert once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megapipe.layers.moe.permutation import ExpertCounts, Permutation, occurrence_index


def padded_counts(experts: int, ranks: int, sequences: int, places: int) -> ExpertCounts:
    """The rows that each rank has for each expert, where so many are of a sequence."""
    return ExpertCounts([[sequences * places] * experts for _ in range(ranks)], places=places)


class PaddedPermutation(Permutation):
    """Rows some of which are empty: their choice is one beyond the last."""

    __slots__ = ()

    @classmethod
    def at_capacity(
        cls, choice: Tensor, told: ExpertCounts, of_each: int, chunks: int
    ) -> PaddedPermutation:
        """Make the rows of the choices that :func:`~megapipe.layers.moe.routing.route_tokens`
        found, in the order of chunks, of experts, of sequences and of positions."""
        experts = torch.arange(len(told.by_rank[0]), device=choice.device)
        order = (experts % of_each * chunks // of_each).argsort(stable=True)
        turn = torch.empty_like(order).scatter_(0, order, experts)
        lines = turn[choice.clamp(min=0).long()].masked_fill_(choice < 0, len(experts))
        rows, choices = _line_up(lines, len(experts), told)
        return cls(choices, rows.view(choice.shape), len(choices))

    @property
    def drops(self) -> bool:
        return True

    def at(self, values: Tensor, index: Tensor) -> Tensor:
        """Zeros where an index is beyond the values."""
        empty = index >= len(values)
        found = values[index.clamp(max=len(values) - 1)]
        return found.masked_fill_(empty.view(-1, *[1] * (values.dim() - 1)), 0)


def among_choices(experts: Tensor, of_each: int, told: ExpertCounts) -> Tensor:
    """Which choices [ranks, tokens, k] of all ranks are of the experts here, numbered from 0, in
    the order of experts, of ranks, of sequences and of positions; one beyond the last where a row
    is empty. Other experts are `of_each`."""
    ranks = len(experts)
    source = torch.arange(ranks, device=experts.device).view(-1, 1, 1)
    lines = (experts * ranks + source).clamp_(max=of_each * ranks)
    return _line_up(lines.flatten(0, 1), of_each * ranks, told)[1]


def _line_up(lines: Tensor, count: int, told: ExpertCounts) -> tuple[Tensor, Tensor]:
    """Put choices [tokens, k] of `count` lines each into those of their sequences: the row of each
    choice, one beyond the last where it is of no line; and the choice of each row, likewise."""
    assert told.rows_per_sequence is not None
    sequences = told.by_rank[0][0] // told.rows_per_sequence
    sequence = torch.arange(len(lines), device=lines.device).remainder_(sequences).unsqueeze(1)
    line = (lines * sequences + sequence).clamp_(max=count * sequences).flatten()
    total = count * sequences * told.rows_per_sequence
    rows = line * told.rows_per_sequence + occurrence_index(line, count * sequences + 1)
    rows.clamp_(max=total)
    choices = rows.new_full((total + 1,), len(rows))
    choices.scatter_(0, rows, torch.arange(len(rows), device=rows.device))
    return rows, choices[:total].clone()
