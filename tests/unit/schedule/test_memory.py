"""What a schedule keeps and sends, against counts by other means."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ScheduleError
from megapipe.schedule.channels import channels
from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import build, forward_only
from megapipe.schedule.ir import Kind
from megapipe.schedule.lower import lower
from megapipe.schedule.memory import (
    curve,
    messages,
    peak_held,
    peak_weighted,
    traffic,
    volume,
    weight_replicas,
)
from megapipe.schedule.placement import loop, mirrored, vee
from megapipe.schedule.program import ActionKind
from megapipe.schedule.timing.simulate import simulate
from tests.unit.schedule.schedule_cases import of, schedules

ZERO = frozenset({0})
HALVES = (Fraction(1, 2),) * 2


def test_a_chunk_counts_as_its_share_of_a_rank():
    assert peak_held(build("1f1b", ranks=4, microbatches=8)) == (4, 3, 2, 1)
    interleaved = build("interleaved_1f1b", ranks=4, microbatches=8, chunks=2)
    assert peak_held(interleaved) == tuple(Fraction(held, 2) for held in (11, 9, 7, 5))


def test_slices_and_parts_count_as_their_shares():
    assert peak_held(of("0F0 0F0.1 0B0.1 0B0", slices=2)) == (1,)
    assert peak_held(of("0F0 0F1 0B0 0B1", 2, sizes=HALVES)) == (1,)
    assert peak_held(of("0F0 0B0 0F1 0B1", 2, sizes=HALVES)) == (Fraction(1, 2),)


def test_what_is_recomputed_counts_from_then():
    assert peak_held(of("0F0 0F1 0R0 0B0 0B1", 2, recompute=ZERO)) == (1,)
    assert peak_held(of("0F0 0F1 0R0 0R1 0B0 0B1", 2, recompute=ZERO)) == (2,)
    assert peak_held(forward_only(loop(2), 3)) == (0, 0)


def test_weighted_peaks_of_the_zero_bubble_paper():
    """ZB-H1: rank i has (p-i) M_B + i M_W alive (2401.10241, section 2.1)."""
    schedule = build("zb_h1", ranks=4, microbatches=8)
    for freed in (Fraction(0), Fraction(1, 3), Fraction(1)):
        expected = tuple(4 - rank + rank * (1 - freed) for rank in range(4))
        assert peak_weighted(schedule, freed) == expected


def test_the_freed_share_is_a_share():
    with pytest.raises(ScheduleError, match="the share freed by I must be from 0 to 1, not 3/2"):
        peak_weighted(of("0F0 0B0"), Fraction(3, 2))


def most_alive(schedule, rank, freed):
    """Return the most that is alive during any operation of a rank: an interval per activation."""
    ops = schedule.rank_ops(rank)
    where = {op._replace(joined=False): index for index, op in enumerate(ops)}
    most = Fraction(0)
    lives = []
    for op in where:
        if op.kind not in (Kind.I, Kind.B):
            continue
        begin = where[op._replace(kind=Kind.F)]
        if op.stage in schedule.recompute:
            begin = where.get(op._replace(kind=Kind.R), where[op])
        end = where.get(op._replace(kind=Kind.W), where[op])
        unit = schedule.placement.stage_shares[op.stage] * schedule.size_of(op.microbatch)
        unit /= schedule.slices
        lives.append((begin, where[op], end, unit))
    for now in range(len(ops)):
        whole = sum(unit for begin, back, _, unit in lives if begin <= now <= back)
        rest = sum(unit for _, back, end, unit in lives if back < now <= end)
        most = max(most, whole + rest * (1 - freed))
    return most


@settings(max_examples=150)
@given(schedules(), st.fractions(0, 1, max_denominator=4))
def test_peaks_are_those_of_intervals(schedule, freed):
    held, weighted = peak_held(schedule), peak_weighted(schedule, freed)
    for rank in range(schedule.placement.ranks):
        assert held[rank] == most_alive(schedule, rank, Fraction(0))
        assert weighted[rank] == most_alive(schedule, rank, freed)


@settings(max_examples=150)
@given(schedules())
def test_messages_are_those_of_the_programs(schedule):
    programs = lower(schedule)
    sends = Counter(
        (program.rank, action.peer)
        for program in programs
        for action in program.actions
        if action.do == ActionKind.SEND
    )
    assert messages(schedule) == sends.total()
    assert {link: count for link, count in traffic(schedule).items() if count} == sends
    assert [(c.src, c.dst, c.messages) for c in channels(schedule)] == [
        (*link, count) for link, count in sorted(sends.items())
    ]


def test_volume_is_counted_in_whole_micro_batches():
    whole = build("1f1b", ranks=2, microbatches=6)
    assert volume(whole) == traffic(whole) == {(0, 1): 6, (1, 0): 6}
    sliced = of("0F0 0F0.1 0B0.1 0B0/1F0 1F0.1 1B0.1 1B0", slices=2)
    assert traffic(sliced) == {(0, 1): 2, (1, 0): 2}
    assert volume(sliced) == {(0, 1): 1, (1, 0): 1}
    parts = of("0F0 0F1/1F0 1F1", 2, sizes=(Fraction(1, 2), Fraction(1)), forward_only=True)
    assert volume(parts) == {(0, 1): Fraction(3, 2)}


def test_weight_copies():
    assert weight_replicas(build("1f1b", ranks=3, microbatches=3)) == (1, 1, 1)
    both = of("0F0 0B0/1F0 1B0", placement=mirrored(loop(2)))
    assert weight_replicas(both) == (2, 2)
    assert weight_replicas(forward_only(vee(2), 1)) == (1, 1)
    assert weight_replicas(of("0F0 2F0 2B0 0B0/1F0 1B0")) == (Fraction(4, 3), Fraction(2, 3))


def test_the_curve_of_a_rank():
    timeline = simulate(of("0F0 0F1 0I0 0W0 0B1", 2), Cost(F=1, I=2, W=3))
    assert curve(timeline, 0) == [(0, 1), (1, 2), (2, 2), (4, 2), (7, 1), (12, 0)]
    weighted = curve(timeline, 0, freed=Fraction(1, 2))
    assert weighted == [(0, 1), (1, 2), (2, 2), (4, Fraction(3, 2)), (7, 1), (12, 0)]


@settings(max_examples=100)
@given(schedules())
def test_the_curve_tops_out_at_the_peak_and_ends_at_nothing(schedule):
    timeline = simulate(schedule)
    for rank, peak in enumerate(peak_held(schedule)):
        amounts = [amount for _, amount in curve(timeline, rank)]
        if amounts:
            assert amounts[-1] == 0
        if not any(op.joined for op in schedule.rank_ops(rank)):
            assert max(amounts, default=0) == peak
