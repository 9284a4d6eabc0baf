"""Naive, GPipe, 1F1B and its relatives, interleaved and breadth-first: tables and formulas."""

from dataclasses import replace
from fractions import Fraction

import pytest

from megapipe.errors import ScheduleError
from megapipe.schedule.generators import build, forward_only, gpipe_on
from megapipe.schedule.ir import Kind
from megapipe.schedule.memory import messages, peak_held
from megapipe.schedule.placement import Placement, loop, mirrored, vee
from megapipe.schedule.proof.validate import validate
from tests.unit.schedule.schedule_times import check_all_sizes, idle, lines, timeline

SIZES = [(1, 1), (2, 3), (4, 4), (4, 9), (8, 3), (8, 16)]


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "eager_1f1b", "breadth_first"])
def test_all_sizes(name):
    check_all_sizes(name, legal=lambda p: True)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_naive(p, m):
    schedule = build("naive", ranks=p, microbatches=m)
    assert timeline(schedule, F=2, B=3).bubble_makespan == Fraction(p - 1, p)
    assert peak_held(schedule) == (1,) * p


def test_naive_table():
    assert lines(build("naive", ranks=2, microbatches=2)) == ["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"]


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager_1f1b"])
def test_fill_and_drain(name, p, m):
    schedule = build(name, ranks=p, microbatches=m)
    assert timeline(schedule).bubble_makespan == Fraction(p - 1, m + p - 1)
    assert idle(schedule, F=2, B=5) == 7 * (p - 1)
    peak = {
        "gpipe": [m] * p,
        "1f1b": [min(p - r, m) for r in range(p)],
        "eager_1f1b": [min(2 * (p - 1 - r) + 1, m) for r in range(p)],
    }
    assert peak_held(schedule) == tuple(peak[name])


def test_eager_hides_latency():
    """1F1B waits for messages all along, the eager one only where the pipeline fills and drains."""
    makespans = {
        name: timeline(build(name, ranks=4, microbatches=16), F=2, B=4, latency=2).makespan
        for name in ("1f1b", "eager_1f1b")
    }
    assert makespans == {"1f1b": 170, "eager_1f1b": (16 + 3) * 6 + 2 * 3 * 2}


def test_eager_table():
    assert lines(build("eager_1f1b", ranks=2, microbatches=4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    ]


@pytest.mark.parametrize("alias", ["dapple", "pipedream_flush"])
def test_other_names_of_1f1b(alias):
    """DAPPLE's early backward (Fan et al., 2007.01045), written down from its figure."""
    assert lines(build(alias, ranks=3, microbatches=4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 8), (8, 16)])
def test_interleaved(p, m, chunks):
    schedule = build("interleaved_1f1b", ranks=p, microbatches=m, chunks=chunks)
    assert timeline(schedule).bubble_ideal == Fraction(p - 1, chunks * m)
    for rank, held in enumerate(schedule.activation_bound):
        assert held <= 2 * (p - rank - 1) + (chunks - 1) * p + 1
    assert messages(schedule) == 2 * m * (p * chunks - 1)


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize(("p", "m"), [(1, 2), (4, 4), (4, 9), (8, 16)])
def test_breadth_first(p, m, chunks):
    schedule = build("breadth_first", ranks=p, microbatches=m, chunks=chunks)
    assert idle(schedule, F=2, B=5) == Fraction(7 * (p - 1), chunks)
    assert peak_held(schedule) == (m,) * p
    assert schedule.ops == build("gpipe", ranks=p, microbatches=m, chunks=chunks).ops


def test_breadth_first_finishes_a_chunk_at_a_time():
    """Gradients of a stage are therefore reduced once, and early."""
    for ops in map(build("breadth_first", ranks=4, microbatches=6).rank_ops, range(4)):
        stages = [op.stage for op in ops if op.kind == Kind.B]
        assert stages == sorted(stages, reverse=True)


def test_gpipe_on_two_directions():
    schedule = gpipe_on(mirrored(loop(2)), 3, direction=(0, 1, 0))
    assert lines(schedule) == [
        "0F0 0F2 1F1 1B1 0B0 0B2",
        "0F1 1F0 1F2 1B0 1B2 0B1",
    ]
    assert validate(schedule).peak_held == schedule.activation_bound == (3, 3)


def test_gpipe_on_slices():
    assert lines(gpipe_on(loop(1), 2, slices=2)) == ["0F0 0F0.1 0F1 0F1.1 0B0.1 0B0 0B1.1 0B1"]


@pytest.mark.parametrize(
    "placement",
    [
        mirrored(vee(2)),
        mirrored(loop(4, 2)),
        mirrored(loop(3)),
        Placement(2, ((0, 0, 1), (1, 0, 0))),
    ],
)
@pytest.mark.parametrize("slices", [1, 3])
def test_gpipe_on_anything(placement, slices):
    half = Fraction(1, 2)
    schedule = gpipe_on(
        placement,
        5,
        direction=(0, 0, 1, 1, 0),
        slices=slices,
        sizes=(half, half, Fraction(1), Fraction(1, 3), Fraction(2, 3)),
    )
    report = validate(schedule)
    assert report.bitwise_order
    assert report.peak_held == schedule.activation_bound
    assert report.ops == 2 * placement.stages * 5 * slices
    assert schedule.whole_microbatches == 3


def test_gpipe_on_checks_what_it_is_given():
    with pytest.raises(ScheduleError, match="direction 2; directions go from 0 to 1"):
        gpipe_on(mirrored(loop(2)), 2, direction=(0, 2))
    with pytest.raises(ScheduleError, match="3 directions for 2 micro-batch"):
        gpipe_on(mirrored(loop(2)), 2, direction=(0, 1, 0))
    with pytest.raises(ScheduleError, match="1 sizes for 2 micro-batch"):
        gpipe_on(loop(2), 2, sizes=(Fraction(1),))


def test_forward_only_takes_replica_0():
    for placement in (loop(4, 2), vee(4)):
        plain, both = forward_only(placement, 5), forward_only(mirrored(placement), 5)
        assert replace(both, placement=placement) == plain
        validate(both)
    part = forward_only(Placement(2, ((0, 0), (1, 1))), 2)
    assert lines(part) == ["0F0 1F0 0F1 1F1", ""]
    validate(part)
