"""Expert rows padded to the capacity (``experts.pad_to_capacity``), so that none are counted.

Tensor sizes depend on the number of rows per expert, and so on the tokens' choices: without
padding, the host waits until the GPU has counted the rows. With a capacity, an expert takes at most
C rows per sequence. If an expert always has C rows, used or empty, all sizes are known in advance.
For two sequences of tokens, a c e and b d f::

    expert            0              1
    sequence      0       1      0       1
    C = 3       a c .   d . .  e . .   b . .     f is dropped

Empty rows are zeros, and so are their weights and, in the backward, their gradients. They add
nothing to the experts' gradients, and their results are not used. A rank with s positions of a
sequence has min(C, s) rows per expert, since a token chooses an expert at most once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megapipe.layers.moe.permutation import ExpertCounts, Permutation, occurrence_index


def padded_counts(experts: int, ranks: int, sequences: int, rows_per_sequence: int) -> ExpertCounts:
    """Return row counts per rank and expert, with `rows_per_sequence` padded rows per expert and
    sequence."""
    return ExpertCounts(
        [[sequences * rows_per_sequence] * experts for _ in range(ranks)],
        rows_per_sequence=rows_per_sequence,
    )


class PaddedPermutation(Permutation):
    """A permutation with empty rows. An empty row's choice is the index after the last choice."""

    __slots__ = ()

    @classmethod
    def at_capacity(
        cls, choice: Tensor, padded: ExpertCounts, of_each: int, chunks: int
    ) -> PaddedPermutation:
        """Assign the choices of :func:`~megapipe.layers.moe.routing.route_tokens` to padded rows,
        in the order of chunks, experts, sequences and positions. `padded`: padded row counts."""
        experts = torch.arange(len(padded.by_rank[0]), device=choice.device)
        order = (experts % of_each * chunks // of_each).argsort(stable=True)
        turn = torch.empty_like(order).scatter_(0, order, experts)
        groups = turn[choice.clamp(min=0).long()].masked_fill_(choice < 0, len(experts))
        rows, choices = _assign_rows(groups, len(experts), padded)
        return cls(choices, rows.view(choice.shape), len(choices))

    @property
    def drops(self) -> bool:
        return True

    def at(self, values: Tensor, index: Tensor) -> Tensor:
        """Return the values at `index`; zeros where the index is beyond the values."""
        empty = index >= len(values)
        found = values[index.clamp(max=len(values) - 1)]
        return found.masked_fill_(empty.view(-1, *[1] * (values.dim() - 1)), 0)


def among_choices(experts: Tensor, of_each: int, padded: ExpertCounts) -> Tensor:
    """Return the choice of each padded row of the local experts, as an index among the choices of
    all ranks. Rows are ordered by expert, rank, sequence and position; an empty row gets the index
    after the last choice. `experts` [ranks, tokens, k] has the local index of each choice's expert,
    or `of_each` if the expert is not local."""
    ranks = len(experts)
    source = torch.arange(ranks, device=experts.device).view(-1, 1, 1)
    groups = (experts * ranks + source).clamp_(max=of_each * ranks)
    return _assign_rows(groups.flatten(0, 1), of_each * ranks, padded)[1]


def _assign_rows(groups: Tensor, count: int, padded: ExpertCounts) -> tuple[Tensor, Tensor]:
    """Assign choices to padded rows. `groups` [tokens, k] has the index of each choice's group of
    rows (per expert, or per expert and source rank), `count` for a choice without a row. Return the
    row of each choice and the choice of each row; the index after the last stands for none."""
    assert padded.rows_per_sequence is not None
    sequences = padded.by_rank[0][0] // padded.rows_per_sequence
    sequence = torch.arange(len(groups), device=groups.device).remainder_(sequences).unsqueeze(1)
    group = (groups * sequences + sequence).clamp_(max=count * sequences).flatten()
    total = count * sequences * padded.rows_per_sequence
    rows = group * padded.rows_per_sequence + occurrence_index(group, count * sequences + 1)
    rows.clamp_(max=total)
    choices = rows.new_full((total + 1,), len(rows))
    choices.scatter_(0, rows, torch.arange(len(rows), device=rows.device))
    return rows, choices[:total].clone()
