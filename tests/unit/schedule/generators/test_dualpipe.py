"""DualPipe and its cut-in-half form."""

from fractions import Fraction
from itertools import pairwise

import pytest

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import build
from megapipe.schedule.ir import Kind
from megapipe.schedule.memory import peak_held, weight_replicas
from megapipe.schedule.timing.simulate import simulate
from tests.unit.schedule.schedule_times import check_all_sizes, lines


def dualpipe(p, m):
    return build("dualpipe", ranks=p, microbatches=m)


def dualpipe_v(p, m):
    return build("dualpipe_v", ranks=p, microbatches=m)


FORMS = {
    "dualpipe": (dualpipe, lambda p: p // 2, lambda p, r: min(r, p - 1 - r)),
    "dualpipe_v": (dualpipe_v, lambda p: p, lambda p, r: r),
}
"""The generator, H ranks to the middle, and h ranks before this one."""


def idle(schedule, **times):
    """Return the idle time of each rank. Times are those of a chunk."""
    measured = simulate(schedule, Cost(**times))
    return [measured.makespan - busy for busy in measured.busy]


def published(half, F, I, W, overlap_factor=Fraction(1)):  # noqa: E741
    B = I + W
    return (half - 1) * ((F + B) * overlap_factor + B - 3 * W)


def pairs(schedule, rank):
    """Return the joined pairs of a rank, in words."""
    ops = schedule.rank_ops(rank)
    return [f"{a}&{b}" for a, b in pairwise(ops) if a.joined]


def test_all_sizes():
    check_all_sizes("dualpipe", legal=lambda p: p % 2 == 0)
    check_all_sizes("dualpipe_v", legal=lambda p: True)


def test_wrong_ranks():
    with pytest.raises(ScheduleError, match="ranks must be a multiple of 2, not 5; the next is 6"):
        dualpipe(5, 10)


def test_other_name():
    assert build("cut_in_half", ranks=2, microbatches=4) == dualpipe_v(2, 4)


def test_tables():
    """Steps 1 to 8 by hand. Even micro-batches go down; micro-batches 2i and 2i+1 are the i-th."""
    schedule = dualpipe(4, 8)
    assert lines(schedule)[:2] == [
        "0F0 0F2 0F4 3F1 3I1 3W1 3F3 0F6 3B3 3F5 0B0 3B5 3F7 0B2 3B7 0I4 0W4 0I6 0W6",
        "1F0 2F1 1F2 2F3 1F4 2B1 2F5 1B0 1F6 2B3 2F7 1B2 2B5 1B4 2I7 1I6 2W7 1W6",
    ]
    assert pairs(schedule, 0) == ["0F6&3B3", "3F5&0B0", "3F7&0B2"]
    assert pairs(schedule, 1) == ["2F5&1B0", "1F6&2B3", "2F7&1B2"]
    folded = dualpipe_v(2, 4)
    assert lines(folded) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ]
    assert pairs(folded, 1) == ["2F2&1B0", "1F3&2B1", "2F3&1B1"]


@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_the_second_half_mirrors_the_first(p):
    schedule = dualpipe(p, 3 * p)
    for rank in range(p // 2):
        ops, mirror = (schedule.rank_ops(r) for r in (rank, p - 1 - rank))
        assert [op._replace(microbatch=op.microbatch ^ 1) for op in ops] == mirror


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("overlap", [Fraction(1), Fraction(5, 6), Fraction(2, 3)])
@pytest.mark.parametrize("p", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("more", [0, 2, 8])
def test_idle_time_at_equal_times(name, p, more, overlap):
    generator, half, before = FORMS[name]
    schedule = generator(p, 2 * p + more)
    measured = idle(schedule, F=1, I=1, W=1, overlap_factor=overlap)
    assert max(measured) == published(half(p), 1, 1, 1, overlap)
    hidden = 3 - 3 * overlap
    assert measured == [
        max(measured) - max(0, half(p) - 2 - before(p, r)) * hidden for r in range(p)
    ]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("p", [2, 4, 8])
def test_idle_time_at_unequal_times(name, p):
    """The published value is a little too high: 52 instead of 50 per rank from the middle."""
    generator, half, _ = FORMS[name]
    times = {"F": 20, "I": 22, "W": 12}
    assert idle(generator(p, 2 * p), **times) == [50 * (half(p) - 1)] * p
    assert published(half(p), **times) == 52 * (half(p) - 1)


@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_memory(p):
    schedule, folded = dualpipe(p, 2 * p), dualpipe_v(p, 2 * p)
    assert max(peak_held(schedule)) == p + 1
    assert max(folded.activation_bound) == 2 * p + 1
    assert max(peak_held(folded)) == p + Fraction(1, 2)
    assert weight_replicas(schedule) == (2,) * p
    assert weight_replicas(folded) == (1,) * p


def test_below_and_between_the_published_sizes():
    """The list of the next published m, without the micro-batches that are not there."""
    for generator, fewer, next_legal in (
        (dualpipe, 3, 8),
        (dualpipe, 7, 8),
        (dualpipe, 9, 10),
        (dualpipe_v, 5, 8),
    ):
        whole, part = generator(4, next_legal), generator(4, fewer)
        for rank in range(4):
            kept = [op for op in whole.rank_ops(rank) if op.microbatch < fewer]
            assert [op._replace(joined=False) for op in kept] == [
                op._replace(joined=False) for op in part.rank_ops(rank)
            ]
            for first, second in zip(kept, part.rank_ops(rank), strict=True):
                assert second.joined <= first.joined


def test_pairs_are_a_forward_and_a_backward():
    for schedule in (dualpipe(6, 14), dualpipe_v(3, 7)):
        for rank in range(len(schedule.ops)):
            ops = schedule.rank_ops(rank)
            for first, second in pairwise(ops):
                if first.joined:
                    assert (first.kind, second.kind) == (Kind.F, Kind.B)
