"""From rows to micro-batches: parts, slices, replicas, and who fetches what."""

from __future__ import annotations

import gc
import threading
from collections.abc import Collection, Sequence
from dataclasses import fields
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.config.config import Config, RunConfig, TrainConfig
from megapipe.config.data import DataConfig
from megapipe.context.split import PositionSplit
from megapipe.data.batch import Samples
from megapipe.distributed.mesh import Axis
from megapipe.engine.stage import Key
from megapipe.errors import DataError
from megapipe.layers.microbatch import MicroBatch
from megapipe.schedule.generators import build, forward_only, gpipe_on
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import Placement, loop
from megapipe.train.feed import Feed, WorkItem, work_items
from megapipe.util.skipped_samples import SkippedSamples

HALF = Fraction(1, 2)
ROWS, LENGTH, SEED = 4, 6, 11


class Source:
    """Rows whose values say where they come from: 100 x sample + position; odd ones are masked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __call__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        self.asked.append(list(indices))
        tokens = 100 * torch.tensor(list(indices)).unsqueeze(1) + torch.arange(LENGTH)
        return tokens, tokens + 1, tokens % 2 == 0


class FakeMesh:
    """One process of a mesh; the others have counted `elsewhere` tokens."""

    def __init__(self, dp: Axis, elsewhere: int) -> None:
        self.dp = dp
        self.device = torch.device("cpu")
        self.elsewhere = elsewhere

    def ordered_sum(self, vector: Tensor, *axes: str) -> Tensor:
        assert axes in (("cp", "dp"), ("cp", "dp", "pp"))
        return vector + self.elsewhere


def fetch(
    schedule: Schedule,
    ranks: Collection[int],
    *,
    slice_lengths: tuple[int, ...] = (LENGTH,),
    dp: int = 1,
    index: int = 0,
    elsewhere: int = 0,
    first: int = 0,
) -> tuple[dict[Key, MicroBatch], int, list[list[int]]]:
    """Fetch a process's micro-batches; return them, all ranks' token count, samples asked for."""
    config = Config(train=TrainConfig(microbatch=ROWS), run=RunConfig(seed=SEED))
    layout: Any = SimpleNamespace(dp=dp, cp=1, split=PositionSplit(), slice_lengths=slice_lengths)
    mesh: Any = FakeMesh(Axis(dp, index, tuple(range(dp)), None), elsewhere)
    source = Source()
    result, count = Feed(config, layout, mesh, ranks).fetch(schedule, source, 5, first)
    return result, count.tokens, source.asked


def here(microbatch: MicroBatch) -> list[bool]:
    """Whether tokens, labels and mask are there."""
    return [
        tensor is not None for tensor in (microbatch.tokens, microbatch.labels, microbatch.mask)
    ]


def test_pieces_of_whole_micro_batches() -> None:
    assert list(work_items(gpipe_on(loop(2), 2), ROWS, (LENGTH,))) == [
        WorkItem((0, 0), 0, slice(0, 4), slice(0, 6)),
        WorkItem((1, 0), 1, slice(0, 4), slice(0, 6)),
    ]


def test_parts_of_a_micro_batch_are_consecutive() -> None:
    sizes = (Fraction(1), HALF, HALF, Fraction(1, 4), Fraction(3, 4))
    schedule = gpipe_on(loop(2), 5, sizes=sizes)
    assert [
        (piece.key, piece.whole, piece.rows) for piece in work_items(schedule, 8, (LENGTH,))
    ] == [
        ((0, 0), 0, slice(0, 8)),
        ((1, 0), 1, slice(0, 4)),
        ((2, 0), 1, slice(4, 8)),
        ((3, 0), 2, slice(0, 2)),
        ((4, 0), 2, slice(2, 8)),
    ]


def test_every_part_is_cut_into_slices() -> None:
    schedule = gpipe_on(loop(2), 2, sizes=(HALF, HALF), slices=3)
    assert list(work_items(schedule, 2, (3, 2, 1))) == [
        WorkItem((m, part), 0, slice(m, m + 1), positions)
        for m in (0, 1)
        for part, positions in enumerate((slice(0, 3), slice(3, 5), slice(5, 6)))
    ]


def test_whole_micro_batches_in_one_process() -> None:
    result, count, asked = fetch(gpipe_on(loop(2), 2), range(2), first=40)
    assert asked == [[40, 41, 42, 43], [44, 45, 46, 47]]
    assert count == 2 * ROWS * LENGTH // 2
    assert list(result) == [(0, 0), (1, 0)]
    for i, mb in enumerate(result.values()):
        assert (mb.index, mb.step, mb.seed, mb.first_row, mb.start) == (i, 5, SEED, 0, 0)
        assert mb.sequence_length is None
        assert mb.scale == 1 / count
        tokens, labels, mask = Source()(asked[i])
        assert mb.tokens is not None
        assert mb.labels is not None
        assert mb.mask is not None
        assert mb.tokens.equal(tokens)
        assert mb.labels.equal(labels)
        assert mb.mask.equal(mask)


def test_replicas_take_micro_batches_in_turn() -> None:
    result, _, asked = fetch(gpipe_on(loop(1), 3), [0], dp=4, index=2, first=100)
    assert [mb.index for mb in result.values()] == [2, 6, 10]
    assert [samples[0] for samples in asked] == [108, 124, 140]
    assert all(len(samples) == ROWS for samples in asked)


def test_parts_and_slices_hold_their_own_rows_and_positions() -> None:
    schedule = gpipe_on(loop(2), 4, sizes=(HALF,) * 4, slices=2)
    result, count, asked = fetch(schedule, range(2), slice_lengths=(4, 2), dp=2, index=1)
    assert asked == [[4, 5, 6, 7], [12, 13, 14, 15]], "each whole micro-batch once"
    assert count == 2 * ROWS * LENGTH // 2
    assert {mb.sequence_length for mb in result.values()} == {LENGTH}
    mb = result[3, 1]
    assert (mb.index, mb.first_row, mb.start) == (3, 2, 4)
    assert mb.sample == 14, "the third row of the fourth micro-batch"
    assert mb.tokens is not None
    assert mb.labels is not None
    assert mb.tokens.tolist() == [[1404, 1405], [1504, 1505]]
    assert mb.labels.tolist() == [[1405, 1406], [1505, 1506]]
    whole = torch.cat(
        [
            torch.cat([result[m, part].tokens for part in (0, 1)], dim=1)  # type: ignore[misc]
            for m in (0, 1)
        ]
    )
    assert whole.equal(Source()([4, 5, 6, 7])[0])


def test_validation_takes_whole_sequences_whatever_the_training_does() -> None:
    result, _, _ = fetch(forward_only(loop(2), 2), range(2), slice_lengths=(4, 2))
    assert list(result) == [(0, 0), (1, 0)]
    assert all(mb.sequence_length is None for mb in result.values())
    assert all(mb.tokens is not None and mb.tokens.shape == (4, 6) for mb in result.values())


@pytest.mark.parametrize(
    ("rank", "fetches", "own"), [(0, True, 0), (1, False, 0), (2, True, 2 * ROWS * LENGTH // 2)]
)
def test_the_ends_of_the_pipeline_alone_fetch_and_the_last_one_counts(
    rank: int, fetches: bool, own: int
) -> None:
    result, count, asked = fetch(gpipe_on(loop(3), 2), [rank], elsewhere=5)
    assert len(asked) == 2 * fetches
    assert [here(mb) for mb in result.values()] == [[fetches] * 3] * 2
    assert count == own
    assert all(mb.scale == 1 / (own + 5) for mb in result.values()), "the tokens of all processes"


CROSSED = Placement(3, ((0, 1, 2), (1, 2, 0)))
"""Each rank is at an end of another set of pipelines: 0 of both, 1 and 2 of one each."""


@pytest.mark.parametrize(
    ("rank", "samples", "own"), [(0, [0, 4, 8], 1), (1, [4], 0), (2, [0, 8], 2)]
)
def test_of_replicated_stages_each_holder_fetches_its_own(
    rank: int, samples: list[int], own: int
) -> None:
    schedule = gpipe_on(CROSSED, 3, direction=(0, 1, 0))
    result, count, asked = fetch(schedule, [rank])
    assert [indices[0] for indices in asked] == samples
    assert [any(here(mb)) for mb in result.values()] == [4 * i in samples for i in range(3)]
    assert count == own * ROWS * LENGTH // 2, "of those whose last stage is here"


def test_halves_in_opposite_directions_are_counted_once() -> None:
    schedule = build("chimera_backward_halving", ranks=2, microbatches=2)
    assert {schedule.direction_of(m) for m in range(4)} == {0, 1}
    counts = [fetch(schedule, [rank])[1] for rank in range(2)]
    assert sum(counts) == 2 * ROWS * LENGTH // 2
    assert 0 not in counts


def test_without_an_unmasked_token_the_scale_is_zero() -> None:
    result, count, _ = fetch(gpipe_on(loop(3), 1), [0])
    assert count == 0
    assert result[0, 0].scale == 0.0


def test_a_loss_scale_multiplies_the_loss_and_the_terms_of_experts() -> None:
    schedule = gpipe_on(loop(1), 2)
    plain, scaled = (
        new_feed().fetch(schedule, Source(), 0, 0, factor)[0][1, 0] for factor in (1.0, 2.0**16)
    )
    assert plain.scale == 2 / (2 * ROWS * LENGTH)
    assert plain.position_scale == 1 / (2 * ROWS * LENGTH), "of masked positions too"
    assert scaled.scale == 2.0**16 * plain.scale
    assert scaled.position_scale == 2.0**16 * plain.position_scale


def test_what_a_process_does_not_fetch_has_its_coordinates_all_the_same() -> None:
    schedule = gpipe_on(loop(3), 4, sizes=(HALF,) * 4, slices=2)
    (first, *_), (middle, *_) = (
        fetch(schedule, [rank], slice_lengths=(4, 2), dp=2, index=1, elsewhere=7) for rank in (0, 1)
    )
    fetched = "tokens", "labels", "mask"
    plain = [f.name for f in fields(MicroBatch) if f.compare and f.name not in fetched]
    assert first.keys() == middle.keys()
    for key, mb in first.items():
        assert all(getattr(mb, name) == getattr(middle[key], name) for name in plain)


def new_feed(**data: Any) -> Feed:
    config = Config(
        train=TrainConfig(microbatch=ROWS, sequence_length=LENGTH),
        run=RunConfig(seed=SEED),
        data=DataConfig(**data),
    )
    layout: Any = SimpleNamespace(dp=1, cp=1, split=PositionSplit(), slice_lengths=(LENGTH,))
    mesh: Any = FakeMesh(Axis(1, 0, (0,), None), 0)
    return Feed(config, layout, mesh, [0])


def test_what_comes_next_is_read_in_another_thread() -> None:
    """It is read once, and what is asked for in between is read besides."""
    threads: dict[int, list[str]] = {}
    source = Source()

    def rows(indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        threads.setdefault(indices[0], []).append(threading.current_thread().name)
        return source(indices)

    schedule, feed = gpipe_on(loop(1), 1), new_feed()
    feed.fetch(schedule, rows, 0, 0)
    feed.read_ahead(schedule, rows, 4)
    feed.read_ahead(schedule, rows, 4)
    between, _ = feed.fetch(schedule, source, 0, 40)
    result, _ = feed.fetch(schedule, rows, 1, 4)
    assert threads == {0: ["MainThread"], 4: ["megapipe-reading"]}
    assert feed.samples_read == [4, 5, 6, 7]
    for first, (mb,) in ((40, between.values()), (4, result.values())):
        assert mb.tokens is not None
        assert mb.tokens.equal(Source()(range(first, first + ROWS))[0])


def test_one_thread_reads_for_all_steps_and_ends_with_the_feed() -> None:
    seen: list[threading.Thread] = []
    source = Source()

    def rows(indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        seen.append(threading.current_thread())
        return source(indices)

    schedule, feed = gpipe_on(loop(1), 1), new_feed()
    for step in range(1, 4):
        feed.read_ahead(schedule, rows, step * ROWS)
        feed.fetch(schedule, rows, step, step * ROWS)
    assert len(seen) == 3
    assert len(set(seen)) == 1
    del feed
    gc.collect()
    seen[0].join(10)
    assert not seen[0].is_alive()


def test_samples_that_are_left_out_are_passed_over_also_ahead() -> None:
    source, schedule, feed = Source(), gpipe_on(loop(1), 1), new_feed()
    skipped_samples = SkippedSamples.of([(2, 5), (9, 10)])
    feed.read_ahead(schedule, source, 4)
    feed.read_ahead(schedule, source, 4, skipped_samples)
    ((_, mb),) = feed.fetch(schedule, source, 1, 4, skipped_samples=skipped_samples)[0].items()
    assert feed.samples_read == [7, 8, 10, 11]
    assert mb.tokens is not None
    assert mb.tokens.equal(source([7, 8, 10, 11])[0])


def test_an_error_ahead_is_raised_by_the_step_that_needs_the_data() -> None:
    def rows(indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        if indices[0] == 4:
            raise DataError("no such token")
        return Source()(indices)

    schedule, feed = gpipe_on(loop(1), 1), new_feed()
    feed.read_ahead(schedule, rows, 4)
    feed.fetch(schedule, rows, 0, 0)
    with pytest.raises(DataError, match="no such token"):
        feed.fetch(schedule, rows, 1, 4)


@pytest.mark.parametrize("data", [{"prefetch": False}, {"source": f"{__name__}:Source"}])
def test_code_of_the_users_is_called_by_one_thread(data: dict[str, Any]) -> None:
    schedule, source, feed = gpipe_on(loop(1), 1), Source(), new_feed(**data)
    feed.read_ahead(schedule, source, 4)
    assert source.asked == []


def test_tokens_and_losses_of_a_mixture() -> None:
    """The step has sources 0 and 2 of 3; a set to validate on is not divided by sources."""

    def mixed(indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        tokens, labels, mask = Source()(indices)
        source = 2 * (torch.tensor(list(indices)) % 2)
        return tokens, labels, (mask * (1 + source).unsqueeze(1)).to(torch.uint8)

    feed = new_feed()
    feed.sources = 3
    result, counted = feed.fetch(gpipe_on(loop(1), 2), mixed, 0, 0)
    assert counted.tokens == 2 * ROWS * LENGTH // 2
    assert counted.by_source == (ROWS * LENGTH // 2, 0, ROWS * LENGTH // 2)
    for mb, value in zip(result.values(), (1.0, 2.0), strict=True):
        assert mb.by_source is not None
        assert mb.by_source.isnan().all()
        mb.by_source.fill_(value)
    assert [part.tolist() for part in counted.summed_losses()] == [[3.0] * 3]
    assert counted.none().by_source == (0, 0, 0)
    assert [part.tolist() for part in counted.none().summed_losses()] == [[0.0] * 3]
    result, counted = feed.fetch(gpipe_on(loop(1), 1), Source(), 0, 0)
    assert counted.by_source == (0, 0, 0)
    assert result[0, 0].by_source is None


@pytest.mark.parametrize("lengths", [(LENGTH,), (4, 2)])
def test_pieces_of_rows_have_the_documents_of_their_rows(lengths: tuple[int, ...]) -> None:
    """A slice has the documents of earlier slices, too. The first row is one document, and others
    change at each position, where learned positions begin anew."""
    ids = torch.arange(ROWS).unsqueeze(1) * torch.arange(LENGTH)
    expected = torch.arange(LENGTH) * (torch.arange(ROWS) == 0).unsqueeze(1)

    def packed(indices: Sequence[int]) -> Samples:
        return Samples(*Source()(indices), ids)

    feed = new_feed(document_mask=True, reset_position_ids=True)
    layout: Any = feed.layout
    feed.document_end, layout.slice_lengths = 0, lengths
    quarter, slices = Fraction(1, 4), len(lengths)
    schedule = gpipe_on(loop(1), 3, sizes=(quarter, HALF, quarter), slices=slices)
    result, _ = feed.fetch(schedule, packed, 0, 0)
    assert len(result) == 3 * slices
    for (part, number), mb in result.items():
        rows, stop = (slice(0, 1), slice(1, 3), slice(3, 4))[part], sum(lengths[: number + 1])
        assert mb.documents is not None
        assert mb.documents.ids.equal(ids[rows, :stop])
        assert mb.positions is not None
        assert mb.positions.t().equal(expected[rows, stop - lengths[number] : stop])


def test_positions_begin_anew_in_each_document() -> None:
    """Documents are packed, or end with token 5; for learned positions alone."""

    def packed(indices: Sequence[int]) -> Samples:
        documents = torch.tensor([[0, 0, 1, 1, 1, 2]]).expand(len(indices), -1)
        return Samples(*Source()(indices), documents)

    def marked(indices: Sequence[int]) -> Samples:
        tokens = torch.tensor([[1, 5, 5, 2, 3, 4]]).expand(len(indices), -1)
        return Samples(tokens, tokens, tokens > 0)

    schedule = gpipe_on(loop(1), 1, slices=2)
    for rows, expected in ((packed, [0, 1, 0, 1, 2, 0]), (marked, [0, 1, 0, 0, 1, 2])):
        feed = new_feed(document_mask=True, reset_position_ids=True)
        layout: Any = feed.layout
        feed.document_end, layout.slice_lengths = 5, (4, 2)
        result, _ = feed.fetch(schedule, rows, 0, 0)
        for key, positions in (((0, 0), expected[:4]), ((0, 1), expected[4:])):
            found = result[key].positions
            assert found is not None
            assert found.tolist() == [[position] * ROWS for position in positions]
    feed = new_feed(document_mask=True)
    feed.document_end = 5
    assert feed.fetch(gpipe_on(loop(1), 1), marked, 0, 0)[0][0, 0].positions is None
