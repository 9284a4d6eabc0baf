"""Schedules over slices of sequences: tables, warm-ups, bubbles and peaks of the papers."""

from dataclasses import replace
from fractions import Fraction
from itertools import product, zip_longest

import pytest

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import build
from megapipe.schedule.ir import KIND_MASK, Kind, packed
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.text import to_csv
from megapipe.schedule.timing.simulate import simulate
from tests.unit.schedule.schedule_referee import play

SIZES = list(product(range(1, 7), range(1, 9), range(1, 5)))  # ranks, micro-batches, slices


def lines(schedule):
    return to_csv(schedule).replace(",", " ").splitlines()


def makespan(schedule, **times):
    return simulate(schedule, Cost.full_rank(schedule.placement, **times)).makespan


def warmup_of(ops):
    """Count forwards before the first backward, less the one that is paired with it."""
    return next(index for index, op in enumerate(ops) if op.kind == Kind.B) - 1


def test_seq1f1b_table():
    assert lines(build("seq1f1b", ranks=2, microbatches=2, slices=2)) == [
        "0F0 0F0.1 0F1 0B0.1 0F1.1 0B0 0B1.1 0B1",
        "1F0 1F0.1 1B0.1 1F1 1B0 1F1.1 1B1.1 1B1",
    ]


def test_terapipe_table():
    assert lines(build("terapipe", ranks=2, microbatches=2, slices=2)) == [
        "0F0 0F0.1 0F1 0F1.1 0B0.1 0B0 0B1.1 0B1",
        "1F0 1F0.1 1F1 1F1.1 1B0.1 1B0 1B1.1 1B1",
    ]


def test_interleaved_table():
    """One micro-batch of two slices fills two ranks, so it is a group."""
    assert lines(build("interleaved_seq1f1b", ranks=2, microbatches=2)) == [
        "0F0 0F0.1 2F0 2F0.1 0F1 0F1.1 2B0.1 2F1 2B0 2F1.1 0B0.1 0B0 2B1.1 2B1 0B1.1 0B1",
        "1F0 1F0.1 3F0 3F0.1 3B0.1 1F1 3B0 1F1.1 1B0.1 3F1 1B0 3F1.1 3B1.1 3B1 1B1.1 1B1",
    ]


@pytest.mark.parametrize("name", ["seq1f1b", "terapipe", "interleaved_seq1f1b"])
def test_two_slices_are_the_default(name):
    given, default = (build(name, ranks=3, microbatches=4, slices=slices) for slices in (2, None))
    assert given.slices == default.slices == 2
    assert given.ops == default.ops


@pytest.mark.parametrize(
    ("name", "plain"),
    [("seq1f1b", "1f1b"), ("terapipe", "gpipe"), ("interleaved_seq1f1b", "interleaved_1f1b")],
)
def test_one_slice_is_the_schedule_without(name, plain):
    for ranks, microbatches in product(range(1, 6), range(1, 8)):
        sizes = {"ranks": ranks, "microbatches": microbatches}
        if name == "interleaved_seq1f1b":
            sizes["chunks"] = 2
        assert build(name, slices=1, **sizes).ops == build(plain, **sizes).ops


def test_one_chunk_is_seq1f1b():
    assert (
        build(
            "interleaved_seq1f1b",
            ranks=4,
            microbatches=5,
            chunks=1,
            slices=3,
            microbatch_group_size=2,
        ).ops
        == build("seq1f1b", ranks=4, microbatches=5, slices=3).ops
    )


@pytest.mark.parametrize("name", ["seq1f1b", "terapipe"])
def test_idle_time_is_a_share_of_1f1b_s(name):
    for ranks, microbatches, slices in SIZES:
        schedule = build(name, ranks=ranks, microbatches=microbatches, slices=slices)
        for forward, backward in ((1, 2), (3, 5), (2, 2)):
            both = forward + backward
            idle = Fraction((ranks - 1) * both, slices)
            assert makespan(schedule, F=forward, B=backward) == microbatches * both + idle
        bubble = Fraction(ranks - 1, microbatches * slices + ranks - 1)
        assert simulate(schedule, Cost(F=1, B=2)).bubble_makespan == bubble


def test_seq1f1b_warm_up_and_peak():
    for ranks, microbatches, slices in SIZES:
        schedule = build("seq1f1b", ranks=ranks, microbatches=microbatches, slices=slices)
        total = microbatches * slices
        for rank in range(ranks):
            wanted = min(ranks - rank - 2 + slices, total)
            assert warmup_of(schedule.rank_ops(rank)) == min(wanted, total - 1)
        report = validate(schedule)
        assert report.bitwise_order
        assert report.peak_held == schedule.activation_bound
        assert report.peak_held == tuple(min(ranks - 1 - r + slices, total) for r in range(ranks))


def test_backwards_pop_the_slices_of_a_micro_batch_last_first():
    schedule = build("seq1f1b", ranks=3, microbatches=3, slices=4)
    backwards = [(op.microbatch, op.slice) for op in schedule.rank_ops(1) if op.kind == Kind.B]
    assert backwards == [(m, part) for m in range(3) for part in (3, 2, 1, 0)]


@pytest.mark.full
def test_interleaved_runs_at_every_size():
    for (ranks, microbatches, slices), chunks in product(SIZES, (1, 2, 3)):
        if chunks + slices > 5:
            continue  # both many: what they are multiplied by grows with both
        for group in (None, *{1, min(2, microbatches), max(1, microbatches - 1), microbatches}):
            schedule = build(
                "interleaved_seq1f1b",
                ranks=ranks,
                microbatches=microbatches,
                chunks=chunks,
                slices=slices,
                microbatch_group_size=group,
            )
            report = validate(schedule)
            assert report.bitwise_order
            assert report.peak_held == schedule.activation_bound


LEGAL = [
    (ranks, microbatches, slices, chunks)
    for (ranks, microbatches, slices), chunks in product(SIZES, (2, 3))
    if ranks % slices == 0 and microbatches % (ranks // slices) == 0
]


def test_interleaved_bubble_peak_and_published_warm_up():
    assert len(LEGAL) == 104
    for ranks, microbatches, slices, chunks in LEGAL:
        schedule = build(
            "interleaved_seq1f1b",
            ranks=ranks,
            microbatches=microbatches,
            chunks=chunks,
            slices=slices,
        )
        idle = Fraction(3 * (ranks - 1), slices * chunks)
        assert makespan(schedule, F=1, B=2) == 3 * microbatches + idle
        total = microbatches * chunks * slices
        warmups = [
            min(2 * (ranks - 1 - rank) + (chunks - 1) * ranks + slices - 1, total)
            for rank in range(ranks)
        ]
        assert [warmup_of(schedule.rank_ops(rank)) for rank in range(ranks)] == [
            min(warmup, total - 1) for warmup in warmups
        ]
        assert schedule.activation_bound == tuple(min(warmup + 1, total) for warmup in warmups)


def with_warmups(schedule, warmups):
    """Reorder each rank's forwards and backwards so that they alternate after its warm-up."""
    ops = []
    for codes, warmup in zip(schedule.ops, warmups, strict=True):
        forwards = [code for code in codes if code & KIND_MASK == Kind.F]
        backwards = [code for code in codes if code & KIND_MASK == Kind.B]
        later = zip_longest(forwards[warmup:], backwards)
        pairs = [code for pair in later for code in pair if code is not None]
        ops.append(packed([*forwards[:warmup], *pairs]))
    return replace(schedule, ops=tuple(ops), activation_bound=None)


@pytest.mark.parametrize(
    ("microbatches", "slices", "first"),
    [(2, 3, "it needs 3F0.2 first"), (3, 2, None), (2, 1, None)],
)
def test_the_published_warm_up_is_too_short_where_a_group_has_more_slices_than_ranks(
    microbatches, slices, first
):
    schedule = build("interleaved_seq1f1b", ranks=2, microbatches=microbatches, slices=slices)
    published = with_warmups(schedule, [2 + 2 + slices - 1, 2 + slices - 1])
    assert play(schedule) is None
    if first is None:
        assert published.ops == schedule.ops
    else:
        with pytest.raises(ScheduleError, match=first):
            validate(published)


@pytest.mark.parametrize("group", [3, 9])
def test_a_group_is_of_whole_micro_batches(group):
    with pytest.raises(
        ScheduleError,
        match=f"microbatch_group_size must be from 1 to microbatches = 2, not {group}",
    ):
        build("interleaved_seq1f1b", ranks=2, microbatches=2, slices=4, microbatch_group_size=group)
