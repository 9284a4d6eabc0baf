"""From rows of the global batch to the micro-batches that a schedule runs.

Micro-batch i of data-parallel replica d is number i * dp + d of the global batch, in every layout.
A schedule may run some of its rows, or slices of it (fewer positions); a process fetches what its
own first and last stages need.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megapipe.config import Config
from megapipe.distributed.mesh import AxisName, ParallelMesh
from megapipe.engine.stage import Key
from megapipe.layers.microbatch import MicroBatch
from megapipe.layout.layout import Layout
from megapipe.ops.documents import Documents, document_ids
from megapipe.ops.transfer import to_device
from megapipe.schedule.ir import Schedule

Rows = Callable[[Sequence[int]], tuple[Tensor, Tensor, Tensor]]
"""Global sample indices -> tokens [b, s], labels [b, s], mask [b, s]."""


class Piece(NamedTuple):
    """Rows and positions of a whole micro-batch: one (micro-batch, slice) of a schedule."""

    key: Key
    whole: int
    """Number of the whole micro-batch within the step and replica."""
    rows: slice
    positions: slice


def pieces(schedule: Schedule, rows: int, slice_lengths: Sequence[int]) -> Iterator[Piece]:
    """All pieces of a step, those of a micro-batch in a row; `rows` are those of a whole one."""
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
    """Fetches micro-batches for the stages of the pipeline ranks that this process runs.

    With `document_end`, the token that ends a document, attention ends at documents: then every
    stage needs to know where they are.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        mesh: ParallelMesh,
        ranks: Collection[int],
        *,
        document_end: int | None = None,
    ) -> None:
        self.config = config
        self.layout = layout
        self.mesh = mesh
        self.ranks = ranks
        self.document_end = document_end

    def fetch(
        self, schedule: Schedule, rows: Rows, step: int, first: int, factor: float = 1.0
    ) -> tuple[dict[Key, MicroBatch], int]:
        """The micro-batches of the samples from `first` on, and the number of unmasked tokens of
        the last stages of this process.

        `factor` multiplies the loss besides the global token count (a loss scale).
        """
        lengths = self.layout.slice_lengths
        if schedule.slices == 1:
            lengths = (sum(lengths),)
        all_pieces = list(pieces(schedule, self.config.train.microbatch, lengths))
        fetched: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        own = 0
        for piece in all_pieces:
            is_first, is_last = self._ends(schedule, piece)
            needed = is_first or is_last or self.document_end is not None
            if needed and piece.whole not in fetched:
                fetched[piece.whole] = self._whole(rows, first, piece.whole)
            if is_last:
                own += int(fetched[piece.whole][2][piece.rows, piece.positions].sum())
        total = self._over_replicas(schedule, own)
        length = sum(lengths) if len(lengths) > 1 else None
        result = {}
        for piece in all_pieces:
            tokens = labels = mask = None
            if any(self._ends(schedule, piece)):
                tokens, labels, mask = (
                    to_device(tensor[piece.rows, piece.positions], self.mesh.device)
                    for tensor in fetched[piece.whole]
                )
            result[piece.key] = MicroBatch(
                index=piece.whole * self.layout.dp + self.mesh.dp.index,
                step=step,
                seed=self.config.run.seed,
                scale=factor / total if total else 0.0,
                tokens=tokens,
                labels=labels,
                mask=mask,
                documents=self._documents(fetched, piece),
                first_row=piece.rows.start,
                start=piece.positions.start,
                sequence_length=length,
            )
        return result, own

    def _documents(
        self, fetched: Mapping[int, tuple[Tensor, Tensor, Tensor]], piece: Piece
    ) -> Documents | None:
        """Documents of the piece's tokens, and of the tokens before it in the same samples."""
        if self.document_end is None:
            return None
        tokens = fetched[piece.whole][0][piece.rows, : piece.positions.stop]
        return Documents(document_ids(tokens, self.document_end), self.mesh.device)

    def _over_replicas(self, schedule: Schedule, own: int) -> int:
        """Unmasked tokens of the global batch, on the ranks that hold a last stage.

        Pipeline ranks wait for each other only where several of them hold a last stage.
        """
        count = torch.tensor([own], dtype=torch.float64)
        several = len({homes[-1] for homes in schedule.placement.table}) > 1
        axes: tuple[AxisName, ...] = ("dp", "pp") if several else ("dp",)
        return int(self.mesh.ordered_sum(count, *axes).item())

    def _ends(self, schedule: Schedule, piece: Piece) -> tuple[bool, bool]:
        """Whether the piece's first and last stage are of this process."""
        homes = schedule.placement.table[schedule.direction_of(piece.key[0])]
        return homes[0] in self.ranks, homes[-1] in self.ranks

    def _whole(self, rows: Rows, first: int, whole: int) -> tuple[Tensor, Tensor, Tensor]:
        b = self.config.train.microbatch
        start = first + (whole * self.layout.dp + self.mesh.dp.index) * b
        return rows(range(start, start + b))
