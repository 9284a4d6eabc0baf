"""From rows of the global batch to the micro-batches that a schedule runs.

Micro-batch i of data-parallel replica d is number i * dp + d of the global batch, in every layout.
A schedule may run parts of it (fewer rows) or slices of it (fewer positions); a process fetches
what its own first and last stages need.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megapipe.config import Config
from megapipe.engine.stage import Key
from megapipe.layout import Layout
from megapipe.mesh import ParallelMesh
from megapipe.model.microbatch import MicroBatch
from megapipe.schedule.ir import Schedule

Rows = Callable[[Sequence[int]], tuple[Tensor, Tensor, Tensor]]
"""Global sample indices -> tokens [b, s], labels [b, s], mask [b, s]."""


class Piece(NamedTuple):
    """What one (micro-batch, slice) of a schedule holds of a whole micro-batch."""

    key: Key
    whole: int
    """Number of the whole micro-batch within the step and replica."""
    rows: slice
    positions: slice


def pieces(schedule: Schedule, rows: int, slice_lengths: Sequence[int]) -> Iterator[Piece]:
    """All pieces of a step; `rows` per whole micro-batch. Parts of one are consecutive."""
    stop = 0
    for microbatch in range(schedule.microbatches):
        start, stop = stop, stop + int(schedule.size_of(microbatch) * rows)
        whole = start // rows
        here = slice(start - whole * rows, stop - whole * rows)
        end = 0
        for part, length in enumerate(slice_lengths):
            begin, end = end, end + length
            yield Piece((microbatch, part), whole, here, slice(begin, end))


class Feed:
    """Fetches micro-batches for the stages of the pipeline ranks that this process runs."""

    def __init__(
        self, config: Config, layout: Layout, mesh: ParallelMesh, ranks: Collection[int]
    ) -> None:
        self.config = config
        self.layout = layout
        self.mesh = mesh
        self.ranks = ranks

    def fetch(
        self, schedule: Schedule, rows: Rows, step: int, first: int
    ) -> tuple[dict[Key, MicroBatch], int]:
        """The micro-batches of the samples from `first` on, and the number of unmasked tokens
        over all replicas."""
        lengths = self.layout.slice_lengths
        if schedule.slices == 1:
            lengths = (sum(lengths),)
        all_pieces = list(pieces(schedule, self.config.train.microbatch, lengths))
        fetched: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        own = 0
        for piece in all_pieces:
            is_first, is_last = self._ends(schedule, piece)
            if (is_first or is_last) and piece.whole not in fetched:
                fetched[piece.whole] = self._whole(rows, first, piece.whole)
            if is_last:
                own += int(fetched[piece.whole][2][piece.rows, piece.positions].sum())
        count = torch.tensor([own], dtype=torch.float64)
        total = int(self.mesh.ordered_sum(count, "dp", "pp").item())
        length = sum(lengths) if len(lengths) > 1 else None
        result = {}
        for piece in all_pieces:
            tokens = labels = mask = None
            if any(self._ends(schedule, piece)):
                tokens, labels, mask = (
                    tensor[piece.rows, piece.positions].to(self.mesh.device)
                    for tensor in fetched[piece.whole]
                )
            result[piece.key] = MicroBatch(
                index=piece.whole * self.layout.dp + self.mesh.dp.index,
                step=step,
                seed=self.config.run.seed,
                scale=1.0 / total if total else 0.0,
                tokens=tokens,
                labels=labels,
                mask=mask,
                part=piece.rows.start,
                start=piece.positions.start,
                sequence_length=length,
            )
        return result, total

    def _ends(self, schedule: Schedule, piece: Piece) -> tuple[bool, bool]:
        """Whether the piece's first and last stage are of this process."""
        homes = schedule.placement.table[schedule.replica_of(piece.key[0])]
        return homes[0] in self.ranks, homes[-1] in self.ranks

    def _whole(self, rows: Rows, first: int, whole: int) -> tuple[Tensor, Tensor, Tensor]:
        b = self.config.train.microbatch
        start = first + (whole * self.layout.dp + self.mesh.dp.index) * b
        return rows(range(start, start + b))
