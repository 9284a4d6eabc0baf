"""Conversion of a global batch's samples to the micro-batches that a schedule runs.

In every layout, whole micro-batch i of data-parallel replica d is micro-batch i * dp + d of the
global batch. A schedule can split it into micro-batches of fewer samples, or into slices (fewer
positions). A process reads samples only for its first and last stages, or for documents.
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
from megapipe.train.data_agreement import check_same_data, checksum
from megapipe.train.prefetch_thread import PrefetchThread
from megapipe.util.skipped_samples import SkippedSamples
from megapipe.util.user_code import is_class_name

BatchReader = Callable[[Sequence[int]], Samples | tuple[Tensor, Tensor, Tensor]]
"""Function: global sample indices -> tokens, labels, mask, and documents if samples are packed,
each [b, s]. The mask is bool. For a mixture it is uint8: 1 + the source's index for tokens that
count in the loss, else 0."""


NOTHING = SkippedSamples()
Wholes = dict[int, Samples]
"""Samples of each whole micro-batch, by its index in this replica's step."""


class WorkItem(NamedTuple):
    """One (micro-batch, slice) of a schedule: some samples and positions of a whole micro-batch."""

    key: Key
    whole: int
    """Index of the whole micro-batch in this replica's step."""
    rows: slice
    positions: slice


def work_items(schedule: Schedule, rows: int, slice_lengths: Sequence[int]) -> Iterator[WorkItem]:
    """Yield the work items of a step, by micro-batch; a whole micro-batch has `rows` samples."""
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
    """Number of unmasked tokens on a process's last stages, and for a mixture also by source.

    `losses` are tensors [sources] into which last stages write each work item's losses, summed by
    source. `scratches`, one per work item, hold values that layers store.
    """

    tokens: int
    by_source: tuple[int, ...] = ()
    losses: Sequence[Tensor] = ()
    scratches: Sequence[Scratch] = ()

    def none(self) -> LocalTokens:
        """Return an instance with zero tokens and losses, and with the same `scratches`."""
        by_source = tuple(0 for _ in self.by_source)
        return LocalTokens(0, by_source, [loss * 0 for loss in self.losses], self.scratches)

    def summed_losses(self) -> list[Tensor]:
        """Return one tensor of losses [sources] in a list; without a mixture, an empty list."""
        return [torch.stack(list(self.losses)).sum(0)] if self.losses else []


class _FetchArguments(NamedTuple):
    """Source of a step's micro-batches: schedule, reader, and position in the data."""

    schedule: Schedule
    rows: BatchReader
    first: int
    """Number of samples that earlier steps took."""
    skipped_samples: SkippedSamples
    """Samples that no step takes."""


class _ReadItem(NamedTuple):
    item: WorkItem
    ids: Tensor | None
    """Document ids of the item's tokens and of earlier tokens of its samples, or None."""
    at: int
    """Index of the item's first tensor among the tensors copied to the device."""
    needed: bool
    """Whether the item's tokens, labels and mask are needed."""
    scored: bool
    """Whether this process has the item's last stage."""


class _Read(NamedTuple):
    """The data of a step, in flight to the device."""

    items: list[_ReadItem]
    own: tuple[int, ...]
    """Number of unmasked tokens on local last stages; for a mixture, then the number per source."""
    samples: list[int]
    """Global indices of the samples that local first stages receive."""
    length: int | None
    """Number of positions of a whole sequence on this cp rank; None without slices."""
    local_positions: LocalPositions | None
    """Positions on this cp rank; None without context parallelism."""
    take: Callable[[], list[Tensor]]
    """Function that returns the copied tensors."""
    checksum: int
    """Checksum of all samples read, if ranks compare them (pipeline.debug)."""


class Feed:
    """Fetches micro-batches for the stages of the pipeline ranks that this process runs.

    `document_end`: id of the EOS token if attention ends at documents; then every stage needs
    document ids. `sources` is the number of sources of a mixture, 0 without a mixture. Ranks with a
    last stage sum their token counts over `last_stages`, by default pp.
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
        self._places_all = is_class_name(config.model.source)
        """Whether every stage needs positions that restart: layers of a class get them too."""
        self._uploads = Uploads(mesh.device)
        self._ahead: tuple[_FetchArguments, _Read] | None = None
        """Data of the next step, in flight to the device, with the arguments of their fetch."""
        self._total: tuple[_FetchArguments, int] | None = None
        """Number of unmasked tokens in the next global batch, if counted before its fetch."""
        self._reader = PrefetchThread()
        self._reading: tuple[_FetchArguments, Future[Wholes]] | None = None
        """Samples that the thread is reading, with the arguments of their fetch."""
        self.samples_read: list[int] = []
        """Global indices of the newest fetch's samples on local first stages."""

    def fetch(
        self,
        schedule: Schedule,
        rows: BatchReader,
        step: int,
        first: int,
        factor: float = 1.0,
        skipped_samples: SkippedSamples = NOTHING,
    ) -> tuple[dict[Key, MicroBatch], LocalTokens]:
        """Fetch a step's micro-batches, and count the unmasked tokens of this process's last
        stages. Earlier steps took `first` samples; `skipped_samples` are left out.

        `factor`, such as a loss scale, multiplies the loss in addition to 1 / global token count.
        """
        arguments = _FetchArguments(schedule, rows, first, skipped_samples)
        if self._ahead is not None and self._ahead[0] == arguments:
            read, self._ahead = self._ahead[1], None
        else:
            read = self._start(arguments, self._take(arguments))
        if self.config.pipeline.debug:
            check_same_data(read.checksum, step, self.mesh)
        self.samples_read = read.samples
        tokens_here, *by_source = read.own
        total = self._known_total(arguments)
        if total is None:
            total = self._over_replicas(schedule, tokens_here)
        positions_in_all = self._positions(schedule)
        near = read.take()
        result = {}
        sequences: dict[tuple[int, int], Scratch] = {}
        losses = [self._losses(0.0)] if self.sources else []
        for item, ids, at, needed, scored in read.items:
            documents = None
            if ids is not None:
                documents, at = Documents(ids, self.mesh.device, near[at]), at + 1
            tokens, labels, mask = near[at : at + 3] if needed else (None, None, None)
            positions = None
            if self._resets and (needed or self._places_all):
                positions = near[at + 3 * needed]
            mixed = scored and mask is not None and mask.dtype != torch.bool
            if mixed:
                losses.append(self._losses(math.nan))
            index = item.whole * self.layout.dp + self.mesh.dp.index
            sliced = read.length is not None
            rows_of = item.whole, item.rows.start
            result[item.key] = MicroBatch(
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
                first_row=item.rows.start,
                sample=index * self.config.train.microbatch + item.rows.start,
                start=item.positions.start // self.layout.cp,
                local_positions=read.local_positions,
                positions=positions,
                sequence_length=read.length,
                sequence_scratch=sequences.setdefault(rows_of, Scratch()) if sliced else None,
            )
        scratches = [microbatch.scratch for microbatch in result.values()]
        return result, LocalTokens(tokens_here, tuple(by_source), losses, scratches)

    def read_ahead(
        self,
        schedule: Schedule,
        rows: BatchReader,
        first: int,
        skipped_samples: SkippedSamples = NOTHING,
    ) -> None:
        """Start reading, in a thread, what :meth:`fetch` will need for the next step."""
        arguments = _FetchArguments(schedule, rows, first, skipped_samples)
        reads = self._reading is not None and self._reading[0] == arguments
        if self._prefetch and not reads:
            self._reading = arguments, self._reader.begin(lambda: self._samples(arguments))

    def upload_ahead(
        self,
        schedule: Schedule,
        rows: BatchReader,
        first: int,
        skipped_samples: SkippedSamples = NOTHING,
    ) -> None:
        """Start copying the next step's data to a GPU while the GPU computes."""
        if self.mesh.device.type != "cuda":
            return
        arguments = _FetchArguments(schedule, rows, first, skipped_samples)
        try:
            samples = self._take(arguments)
        except Exception:  # raised when the samples are fetched
            return
        self._ahead = arguments, self._start(arguments, samples)

    def count_ahead(
        self,
        schedule: Schedule,
        rows: BatchReader,
        first: int,
        skipped_samples: SkippedSamples = NOTHING,
    ) -> float:
        """Return this rank's number of unmasked tokens in the next fetch, to be summed with the
        step's totals. If the samples cannot be read, return NaN; :meth:`fetch` then raises."""
        arguments = _FetchArguments(schedule, rows, first, skipped_samples)
        if self._ahead is None or self._ahead[0] != arguments:
            try:
                self._ahead = arguments, self._start(arguments, self._take(arguments))
            except Exception:  # raised when the samples are fetched
                return math.nan
        return float(self._ahead[1].own[0]) if self.mesh.tp.index == 0 else 0.0

    def know_total(self, total: float) -> None:
        """Store the sum of all ranks' :meth:`count_ahead` for the next fetch; NaN: unknown."""
        ahead = self._ahead if math.isfinite(total) else None
        self._total = None if ahead is None else (ahead[0], int(total))

    def _known_total(self, arguments: _FetchArguments) -> int | None:
        if self._total is None or self._total[0] != arguments:
            return None
        (_, total), self._total = self._total, None
        return total

    def _take(self, arguments: _FetchArguments) -> Wholes:
        """Return the samples at a position, either prefetched or read now."""
        if self._reading is not None and self._reading[0] == arguments:
            reading, self._reading = self._reading[1], None
            return reading.result()
        return self._samples(arguments)

    def _count(self, mask: Tensor) -> Tensor:
        """Return the number of a mask's nonzero values, in total and by source: [1 + sources]."""
        if mask.dtype == torch.bool:
            return torch.tensor([int(mask.sum()), *[0] * self.sources])
        counts = torch.bincount(mask.flatten(), minlength=1 + self.sources)
        counts[0] = counts[1:].sum()
        return counts

    def _losses(self, value: float) -> Tensor:
        """Make a tensor of losses [sources], filled with `value`."""
        size = (self.sources,)
        return torch.full(size, value, dtype=torch.float64, device=self.mesh.device)

    def _items(self, schedule: Schedule) -> Iterator[tuple[WorkItem, bool, bool]]:
        """Yield (work item, whether its first stage is local, whether its last stage is local)."""
        for item in work_items(schedule, self.config.train.microbatch, self._lengths(schedule)):
            rank_of = schedule.placement.table[schedule.direction_of(item.key[0])]
            yield item, rank_of[0] in self.ranks, rank_of[-1] in self.ranks

    def _positions(self, schedule: Schedule) -> int:
        """Return the number of positions in the global batch, masked ones included."""
        train, microbatches = self.config.train, schedule.whole_microbatches * self.layout.dp
        return int(microbatches) * train.microbatch * train.sequence_length

    def _lengths(self, schedule: Schedule) -> Sequence[int]:
        """Return the number of positions of each slice."""
        lengths = self.layout.slice_lengths
        return lengths if schedule.slices > 1 else (sum(lengths),)

    def _samples(self, arguments: _FetchArguments) -> Wholes:
        """Read the whole micro-batches that the stages of this process need."""
        found: Wholes = {}
        for item, is_first, is_last in self._items(arguments.schedule):
            needed = is_first or is_last or self.document_end is not None
            if needed and item.whole not in found:
                found[item.whole] = Samples(*arguments.rows(self._numbers(arguments, item.whole)))
        return found

    def _start(self, arguments: _FetchArguments, samples: Wholes) -> _Read:
        """Cut the samples into work items, and start copying the work items to the device."""
        found: list[_ReadItem] = []
        copied: list[Tensor] = []
        numbers: list[int] = []
        own = torch.zeros(1 + self.sources, dtype=torch.int64)
        for item, is_first, is_last in self._items(arguments.schedule):
            if is_last:
                own += self._count(self._own(samples[item.whole].mask, item))
            if is_first and item.positions.start == 0:
                numbers += self._numbers(arguments, item.whole)[item.rows]
            at, needed = len(copied), is_first or is_last
            ids = self._document_ids(samples, item)
            if ids is not None:
                copied.append(ids)
            if needed:
                copied += [self._own(x, item) for x in samples[item.whole][:3]]
            if self._resets and (needed or self._places_all):
                assert ids is not None, "positions begin anew where documents do"
                copied.append(self._own(positions_in(ids), item._replace(rows=slice(None))).t())
            found.append(_ReadItem(item, ids, at, needed, is_last))
        lengths = self._lengths(arguments.schedule)
        length = sum(lengths) // self.layout.cp if len(lengths) > 1 else None
        return _Read(
            found,
            tuple(own.tolist()),
            numbers,
            length,
            self._local_positions(lengths),
            self._uploads.start(copied),
            checksum(x for _, read in sorted(samples.items()) for x in read if x is not None)
            if self.config.pipeline.debug
            else 0,
        )

    def _own(self, samples: Tensor, item: WorkItem) -> Tensor:
        """Return the part of `samples` [b, s] that belongs to a work item, at local positions."""
        split, here = self.layout.split, item.positions
        if split.cp == 1:
            return samples[item.rows, here]
        own = split.own(here.start, here.stop - here.start, self.mesh.cp.index)
        return torch.cat([samples[item.rows, run.here] for run in own.runs], dim=1)

    def _local_positions(self, lengths: Sequence[int]) -> LocalPositions | None:
        """Return the positions on this cp rank, for slices of `lengths`; None without cp."""
        split = self.layout.split
        return None if split.cp == 1 else split.local(lengths, self.mesh.cp.index)

    def _document_ids(self, samples: Wholes, item: WorkItem) -> Tensor | None:
        """Return the document ids of the item's tokens and of earlier tokens of its samples."""
        if self.document_end is None:
            return None
        tokens, documents = samples[item.whole].tokens, samples[item.whole].documents
        ids = document_ids(tokens, self.document_end) if documents is None else documents
        return ids[item.rows, : item.positions.stop]

    def _over_replicas(self, schedule: Schedule, own: int) -> int:
        """Sum `own`, counts of unmasked tokens, over the global batch, on ranks with a last stage.

        Pipeline ranks wait for each other only if several of them hold a last stage. In a no-flush
        pipeline only the ranks with a last stage wait.
        """
        count = torch.tensor([own], dtype=torch.float64)
        several = len({rank_of[-1] for rank_of in schedule.placement.table}) > 1
        axes = (self._last_stages,) if several else ()
        return int(self.mesh.ordered_sum(count, "cp", "dp", *axes).item())

    def _numbers(self, arguments: _FetchArguments, whole: int) -> Sequence[int]:
        """Return the global sample indices of a whole micro-batch."""
        b = self.config.train.microbatch
        start = arguments.first + (whole * self.layout.dp + self.mesh.dp.index) * b
        return arguments.skipped_samples.numbers(start, b)
