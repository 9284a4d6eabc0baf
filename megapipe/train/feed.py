"""From rows of the global batch to the micro-batches that a schedule runs.

Micro-batch i of data-parallel replica d is number i * dp + d of the global batch, in every layout.
A schedule may run some of its rows, or slices of it (fewer positions); a process fetches what its
own first and last stages need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from megapipe.config.config import Config
from megapipe.context.split import LocalPositions
from megapipe.data.batch import Samples
from megapipe.data.sources import prefetches
from megapipe.distributed.mesh import Axis, AxisName, ParallelMesh
from megapipe.engine.stage import Key
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.scratch import Scratch
from megapipe.layout.layout import Layout
from megapipe.ops.documents import Documents, document_ids, positions_in
from megapipe.ops.transfer import Uploads
from megapipe.schedule.ir import Schedule
from megapipe.train.reading import PrefetchThread
from megapipe.train.same_data import check_same_data, checksum
from megapipe.util.left_out import SkippedSamples

BatchReader = Callable[[Sequence[int]], Samples | tuple[Tensor, Tensor, Tensor]]
"""Global sample indices -> tokens [b, s], labels [b, s], mask [b, s], which is bool, or of a
mixture uint8: 1 + the source of what counts in the loss; and documents [b, s] where samples are
packed."""


NOTHING = SkippedSamples()
Wholes = dict[int, Samples]
"""Whole micro-batches, by their numbers within the step."""


class WorkItem(NamedTuple):
    """Rows and positions of a whole micro-batch: one (micro-batch, slice) of a schedule."""

    key: Key
    whole: int
    """Number of the whole micro-batch within the step and replica."""
    rows: slice
    positions: slice


def work_items(schedule: Schedule, rows: int, slice_lengths: Sequence[int]) -> Iterator[WorkItem]:
    """All pieces of a step, those of a micro-batch in a row; `rows` are those of a whole one."""
    stop = 0
    for microbatch in range(schedule.microbatches):
        start, stop = stop, stop + int(schedule.size_of(microbatch) * rows)
        whole = start // rows
        here = slice(start - whole * rows, stop - whole * rows)
        end = 0
        for part, length in enumerate(slice_lengths):
            begin, end = end, end + length
            yield WorkItem((microbatch, part), whole, here, slice(begin, end))


class LocalTokens(NamedTuple):
    """The unmasked tokens of the last stages of a process, and of a mixture those of each source.

    `losses` [pieces][sources] take the sums of their losses, `scratches` [pieces] are what layers
    have stored beside them.
    """

    tokens: int
    by_source: tuple[int, ...] = ()
    losses: Sequence[Tensor] = ()
    scratches: Sequence[Scratch] = ()

    def none(self) -> LocalTokens:
        """Nothing, of as many sources; but what layers have stored, which is of the tokens here."""
        by_source = tuple(0 for _ in self.by_source)
        return LocalTokens(0, by_source, [loss * 0 for loss in self.losses], self.scratches)

    def summed_losses(self) -> list[Tensor]:
        """[sources], in a list; without a mixture the list is empty."""
        return [torch.stack(list(self.losses)).sum(0)] if self.losses else []


class _Place(NamedTuple):
    """Where in the data the micro-batches of a program begin."""

    schedule: Schedule
    rows: BatchReader
    first: int
    """Samples that come before."""
    left_out: SkippedSamples
    """Numbers that are no sample."""


class _ReadPiece(NamedTuple):
    piece: WorkItem
    ids: Tensor | None
    """Documents of its tokens and of those before them; copied ahead of what follows."""
    at: int
    """Where what is copied for it begins."""
    needed: bool
    """Whether its tokens, labels and mask are."""
    scored: bool
    """Whether its last stage is of this process."""


class _Read(NamedTuple):
    """The data of a program, on their way to the device."""

    pieces: list[_ReadPiece]
    own: tuple[int, ...]
    """Unmasked tokens of the last stages of this process, and of a mixture those of each source."""
    samples: list[int]
    """Numbers of those that first stages of this process are given."""
    length: int | None
    """Of what is here of a whole sequence, where sequences are cut into slices."""
    held: LocalPositions | None
    """The positions that are here, where not all are."""
    take: Callable[[], list[Tensor]]
    """Gives what was copied."""
    checksum: int
    """Of all samples that were read, where these are compared (pipeline.debug)."""


class Feed:
    """Fetches micro-batches for the stages of the pipeline ranks that this process runs.

    With `document_end`, the token that ends a document, attention ends at documents: then every
    stage needs to know where they are. `sources` are those of a mixture, 0 if there is none.
    `last_stages` are the ranks with a last stage that count their tokens together, by default all
    of pp.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        mesh: ParallelMesh,
        ranks: Collection[int],
        document_end: int | None = None,
        sources: int = 0,
        last_stages: Axis | None = None,
    ) -> None:
        self.config = config
        self.layout = layout
        self.mesh = mesh
        self._last_stages: Axis | AxisName = last_stages or "pp"
        self.ranks = ranks
        self.document_end = document_end
        self.sources = sources
        self._prefetch = prefetches(config.data)
        self._resets = config.resets_positions
        self._uploads = Uploads(mesh.device)
        self._ahead: tuple[_Place, _Read] | None = None
        """The data on their way to the device, and their place."""
        self._total: tuple[_Place, int] | None = None
        """The unmasked tokens of the global batch at a place, where they are known ahead."""
        self._reader = PrefetchThread()
        self._reading: tuple[_Place, Future[Wholes]] | None = None
        """The samples that are being read, and their place."""
        self.samples_read: list[int] = []
        """Numbers of the samples that first stages of this process were given last."""

    def fetch(
        self,
        schedule: Schedule,
        rows: BatchReader,
        step: int,
        first: int,
        factor: float = 1.0,
        left_out: SkippedSamples = NOTHING,
    ) -> tuple[dict[Key, MicroBatch], LocalTokens]:
        """The micro-batches of the samples that come after `first` others, of all numbers but those
        `left_out`, and the unmasked tokens of the last stages of this process.

        `factor` multiplies the loss besides the global token count (a loss scale).
        """
        place = _Place(schedule, rows, first, left_out)
        if self._ahead is not None and self._ahead[0] == place:
            read, self._ahead = self._ahead[1], None
        else:
            read = self._start(place, self._take(place))
        if self.config.pipeline.debug:
            check_same_data(read.checksum, step, self.mesh)
        self.samples_read = read.samples
        tokens_here, *by_source = read.own
        total = self._known_total(place)
        if total is None:
            total = self._over_replicas(schedule, tokens_here)
        positions_in_all = self._positions(schedule)
        near = read.take()
        result = {}
        sequences: dict[tuple[int, int], Scratch] = {}
        losses = [self._losses(0.0)] if self.sources else []
        for piece, ids, at, needed, scored in read.pieces:
            documents = None
            if ids is not None:
                documents, at = Documents(ids, self.mesh.device, near[at]), at + 1
            tokens, labels, mask = near[at : at + 3] if needed else (None, None, None)
            positions = near[at + 3] if needed and self._resets else None
            mixed = scored and mask is not None and mask.dtype != torch.bool
            if mixed:
                losses.append(self._losses(math.nan))
            index = piece.whole * self.layout.dp + self.mesh.dp.index
            sliced = read.length is not None
            rows_of = piece.whole, piece.rows.start
            result[piece.key] = MicroBatch(
                index=index,
                step=step,
                seed=self.config.run.seed,
                scale=factor / total if total else 0.0,
                position_scale=factor / positions_in_all,
                tokens=tokens,
                labels=labels,
                mask=mask,
                documents=documents,
                by_source=losses[-1] if mixed else None,
                first_row=piece.rows.start,
                sample=index * self.config.train.microbatch + piece.rows.start,
                start=piece.positions.start // self.layout.cp,
                local_positions=read.held,
                positions=positions,
                sequence_length=read.length,
                sequence_scratch=sequences.setdefault(rows_of, Scratch()) if sliced else None,
            )
        scratches = [microbatch.scratch for microbatch in result.values()]
        return result, LocalTokens(tokens_here, tuple(by_source), losses, scratches)

    def read_ahead(
        self, schedule: Schedule, rows: BatchReader, first: int, left_out: SkippedSamples = NOTHING
    ) -> None:
        """Begin to read, in a thread, what :meth:`fetch` will be asked for after this step."""
        place = _Place(schedule, rows, first, left_out)
        reads = self._reading is not None and self._reading[0] == place
        if self._prefetch and not reads:
            self._reading = place, self._reader.begin(lambda: self._samples(place))

    def upload_ahead(
        self, schedule: Schedule, rows: BatchReader, first: int, left_out: SkippedSamples = NOTHING
    ) -> None:
        """Begin to copy it to a GPU, while that computes."""
        if self.mesh.device.type != "cuda":
            return
        place = _Place(schedule, rows, first, left_out)
        try:
            samples = self._take(place)
        except Exception:  # it is raised where it belongs: when the samples are fetched
            return
        self._ahead = place, self._start(place, samples)

    def count_ahead(
        self, schedule: Schedule, rows: BatchReader, first: int, left_out: SkippedSamples = NOTHING
    ) -> float:
        """This rank's part of the unmasked tokens of what is fetched next, to be added up with all
        else at the end of a step; NaN where it cannot be read, which :meth:`fetch` will tell."""
        place = _Place(schedule, rows, first, left_out)
        if self._ahead is None or self._ahead[0] != place:
            try:
                self._ahead = place, self._start(place, self._take(place))
            except Exception:  # it is raised where it belongs: when the samples are fetched
                return math.nan
        return float(self._ahead[1].own[0]) if self.mesh.tp.index == 0 else 0.0

    def know_total(self, total: float) -> None:
        """Take over what all ranks together have counted ahead; NaN: some rank could not."""
        ahead = self._ahead if math.isfinite(total) else None
        self._total = None if ahead is None else (ahead[0], int(total))

    def _known_total(self, place: _Place) -> int | None:
        if self._total is None or self._total[0] != place:
            return None
        (_, total), self._total = self._total, None
        return total

    def _take(self, place: _Place) -> Wholes:
        """The samples of a place: those that were read ahead, or read now."""
        if self._reading is not None and self._reading[0] == place:
            reading, self._reading = self._reading[1], None
            return reading.result()
        return self._samples(place)

    def _count(self, mask: Tensor) -> Tensor:
        """[1 + sources]: what is not 0 in a mask, and in that of a mixture of each source."""
        if mask.dtype == torch.bool:
            return torch.tensor([int(mask.sum()), *[0] * self.sources])
        counts = torch.bincount(mask.flatten(), minlength=1 + self.sources)
        counts[0] = counts[1:].sum()
        return counts

    def _losses(self, value: float) -> Tensor:
        """[sources], of that value."""
        size = (self.sources,)
        return torch.full(size, value, dtype=torch.float64, device=self.mesh.device)

    def _pieces(self, schedule: Schedule) -> Iterator[tuple[WorkItem, bool, bool]]:
        """The pieces of a step, and whether this process has their first and their last stage."""
        for piece in work_items(schedule, self.config.train.microbatch, self._lengths(schedule)):
            homes = schedule.placement.table[schedule.direction_of(piece.key[0])]
            yield piece, homes[0] in self.ranks, homes[-1] in self.ranks

    def _positions(self, schedule: Schedule) -> int:
        """Positions of the global batch, masked ones too."""
        train, microbatches = self.config.train, schedule.whole_microbatches * self.layout.dp
        return int(microbatches) * train.microbatch * train.sequence_length

    def _lengths(self, schedule: Schedule) -> Sequence[int]:
        """Positions of each slice."""
        lengths = self.layout.slice_lengths
        return lengths if schedule.slices > 1 else (sum(lengths),)

    def _samples(self, place: _Place) -> Wholes:
        """Read what the stages of this process need."""
        found: Wholes = {}
        for piece, is_first, is_last in self._pieces(place.schedule):
            needed = is_first or is_last or self.document_end is not None
            if needed and piece.whole not in found:
                found[piece.whole] = Samples(*place.rows(self._numbers(place, piece.whole)))
        return found

    def _start(self, place: _Place, samples: Wholes) -> _Read:
        """Cut the samples into pieces, and begin to copy these to the device."""
        found: list[_ReadPiece] = []
        copied: list[Tensor] = []
        numbers: list[int] = []
        own = torch.zeros(1 + self.sources, dtype=torch.int64)
        for piece, is_first, is_last in self._pieces(place.schedule):
            if is_last:
                own += self._count(self._own(samples[piece.whole].mask, piece))
            if is_first and piece.positions.start == 0:
                numbers += self._numbers(place, piece.whole)[piece.rows]
            at, needed = len(copied), is_first or is_last
            ids = self._document_ids(samples, piece)
            if ids is not None:
                copied.append(ids)
            if needed:
                copied += [self._own(x, piece) for x in samples[piece.whole][:3]]
            if needed and self._resets:
                assert ids is not None, "positions begin anew where documents do"
                copied.append(self._own(positions_in(ids), piece._replace(rows=slice(None))).t())
            found.append(_ReadPiece(piece, ids, at, needed, is_last))
        lengths = self._lengths(place.schedule)
        length = sum(lengths) // self.layout.cp if len(lengths) > 1 else None
        return _Read(
            found,
            tuple(own.tolist()),
            numbers,
            length,
            self._held(lengths),
            self._uploads.start(copied),
            checksum(x for _, read in sorted(samples.items()) for x in read if x is not None)
            if self.config.pipeline.debug
            else 0,
        )

    def _own(self, samples: Tensor, piece: WorkItem) -> Tensor:
        """The part of a piece, at the positions that are here, of tensors [b, s] of samples."""
        split, here = self.layout.split, piece.positions
        if split.cp == 1:
            return samples[piece.rows, here]
        own = split.own(here.start, here.stop - here.start, self.mesh.cp.index)
        return torch.cat([samples[piece.rows, run.here] for run in own.runs], dim=1)

    def _held(self, lengths: Sequence[int]) -> LocalPositions | None:
        """The positions that are here of sequences in slices of these lengths; None: all."""
        split = self.layout.split
        return None if split.cp == 1 else split.local(lengths, self.mesh.cp.index)

    def _document_ids(self, samples: Wholes, piece: WorkItem) -> Tensor | None:
        """Documents of the piece's tokens, and of the tokens before it in the same samples."""
        if self.document_end is None:
            return None
        tokens, documents = samples[piece.whole].tokens, samples[piece.whole].documents
        ids = document_ids(tokens, self.document_end) if documents is None else documents
        return ids[piece.rows, : piece.positions.stop]

    def _over_replicas(self, schedule: Schedule, own: int) -> int:
        """Unmasked tokens of the global batch, on the ranks that hold a last stage.

        Pipeline ranks wait for each other only where several of them hold a last stage, and without
        a flush only these.
        """
        count = torch.tensor([own], dtype=torch.float64)
        several = len({homes[-1] for homes in schedule.placement.table}) > 1
        axes = (self._last_stages,) if several else ()
        return int(self.mesh.ordered_sum(count, "cp", "dp", *axes).item())

    def _numbers(self, place: _Place, whole: int) -> Sequence[int]:
        """The samples of a whole micro-batch."""
        b = self.config.train.microbatch
        start = place.first + (whole * self.layout.dp + self.mesh.dp.index) * b
        return place.left_out.numbers(start, b)
