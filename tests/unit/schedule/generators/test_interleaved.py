"""Interleaved 1F1B: Megatron-LM's table where that is legal, and the rest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.schedule.generators import build
from megapipe.schedule.ir import Kind, Op
from megapipe.schedule.text import to_csv


def interleaved(ranks, microbatches, chunks, group):
    return build(
        "interleaved_1f1b",
        ranks=ranks,
        microbatches=microbatches,
        chunks=chunks,
        microbatch_group_size=group,
    )


def megatron(rank, ranks, microbatches, chunks, group):
    """Return a rank's list by Megatron-LM's rules: order table, warm-up, pairs, cool-down."""
    table = [
        (chunk, microbatch)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + group, microbatches))
    ]
    forwards = [Op(Kind.F, chunk * ranks + rank, mb) for chunk, mb in table]
    backwards = [Op(Kind.B, (chunks - 1 - chunk) * ranks + rank, mb) for chunk, mb in table]
    warmup = min(len(table), 2 * (ranks - rank - 1) + (chunks - 1) * group)
    steady = zip(forwards[warmup:], backwards, strict=False)
    pairs = [op for pair in steady for op in pair]
    return forwards[:warmup] + pairs + backwards[len(table) - warmup :]


def warmup_of(ops):
    return next(index for index, op in enumerate(ops) if op.kind == Kind.B) - 1


@st.composite
def legal_sizes(draw):
    """Draw ranks, micro-batches and group size; a last group is no smaller than the ranks."""
    ranks = draw(st.integers(1, 6))
    group = draw(st.integers(ranks, 10))
    rest = draw(st.sampled_from([0, *range(ranks, group)]))
    return ranks, draw(st.integers(1, 3)) * group + rest, group


@given(legal_sizes(), st.integers(2, 4))
def test_megatron_tables(sizes, chunks):
    ranks, microbatches, group = sizes
    schedule = interleaved(ranks, microbatches, chunks, group)
    for rank in range(ranks):
        assert schedule.rank_ops(rank) == megatron(rank, ranks, microbatches, chunks, group)
        total = microbatches * chunks
        warmup = 2 * (ranks - 1 - rank) + (chunks - 1) * group
        assert schedule.activation_bound[rank] == min(total, warmup + 1)


def test_published_order_table():
    """p = 2, g = 3, m = 5, v = 2 in the Megatron-LM sources."""
    schedule = interleaved(2, 5, 2, 3)
    for rank in range(2):
        forwards = [op for op in schedule.rank_ops(rank) if op.kind == Kind.F]
        assert [op.microbatch for op in forwards] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
        assert [op.stage // 2 for op in forwards] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
        backwards = [op for op in schedule.rank_ops(rank) if op.kind == Kind.B]
        assert [op.microbatch for op in backwards] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
        assert [op.stage // 2 for op in backwards] == [1, 1, 1, 0, 0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("microbatches", "group", "warmups"), [(8, 4, [10, 8, 6, 4]), (12, 6, [12, 10, 8, 6])]
)
def test_published_warmups(microbatches, group, warmups):
    schedule = interleaved(4, microbatches, 2, group)
    assert [warmup_of(schedule.rank_ops(rank)) for rank in range(4)] == warmups


def test_literal_table():
    assert to_csv(interleaved(2, 2, 2, 2)) == (
        "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\n"
    )


def test_one_chunk_is_1f1b():
    plain = build("1f1b", ranks=4, microbatches=6)
    assert interleaved(4, 6, 1, 3).ops == plain.ops


def test_default_group():
    for microbatches, group in ((3, 3), (9, 4)):
        assert (
            interleaved(4, microbatches, 2, None).ops == interleaved(4, microbatches, 2, group).ops
        )


@given(st.integers(1, 8), st.integers(1, 20), st.integers(2, 4), st.data())
def test_the_order_of_the_proof(ranks, microbatches, chunks, data):
    """The times that the docstring gives rise along each rank's list and each edge."""
    group = data.draw(st.integers(1, microbatches))
    schedule = interleaved(ranks, microbatches, chunks, group)
    total, short = microbatches * chunks, microbatches % group
    late = total - (chunks - 1) * short
    time = {}
    for rank in range(ranks):
        to_last = ranks - 1 - rank
        bound = min(to_last, group)
        factor = 2 if group >= ranks else 1
        forward = backward = 0
        for op in schedule.rank_ops(rank):
            key = (op.kind, op.stage, op.microbatch)
            if op.kind == Kind.F:
                size = short if short and forward >= total - chunks * short else group
                ahead = (chunks - 1) * group + min(factor * to_last, size + bound)
                time[key] = (0, forward - ahead + bound, 0, forward, rank)
                forward += 1
            else:
                tail = 1 if backward >= late else 0
                time[key] = (tail, backward + (0 if tail else bound), 1, backward, -rank)
                backward += 1
        times = [time[op.kind, op.stage, op.microbatch] for op in schedule.rank_ops(rank)]
        assert times == sorted(times)
    last = ranks * chunks - 1
    for (kind, stage, microbatch), at in time.items():
        if kind == Kind.F and stage > 0:
            assert time[Kind.F, stage - 1, microbatch] < at
        if kind == Kind.B and stage < last:
            assert time[Kind.B, stage + 1, microbatch] < at
