"""ZB-H1, ZB-H2 and the schedules within a memory limit, ZB-1p and ZB-2p."""

from contextlib import suppress
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import build
from megapipe.schedule.ir import Kind, Schedule, pack, packed
from megapipe.schedule.memory import peak_held, peak_weighted
from megapipe.schedule.placement import loop
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.timing.simulate import simulate
from tests.parity.tiers import in_parts
from tests.unit.schedule.schedule_times import check_all_sizes, idle, lines, timeline

NAMES = ["zb_h1", "zb_h2", "zb_1p", "zb_2p"]
RANKS = range(1, 17)
TIMES = [(1, 1, 1), (20, 22, 12), (10, 10, 7), (12, 11, 7), (9, 15, 8), (15, 9, 8)]
"""F, I, W with W <= F and W <= I."""


@in_parts("name", NAMES, default=["zb_h1", "zb_h2"], full=1)
def test_all_sizes(name):
    check_all_sizes(name, legal=lambda p: True)


def test_tables():
    assert lines(build("zb_h2", ranks=3, microbatches=6)) == [
        "0F0 0F1 0F2 0F3 0F4 0I0 0W0 0F5 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5",
        "1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1F5 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5",
        "2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5",
    ]
    assert lines(build("zb_2p", ranks=2, microbatches=4)) == [
        "0F0 0F1 0F2 0I0 0F3 0I1 0W0 0I2 0W1 0I3 0W2 0W3",
        "1F0 1I0 1F1 1I1 1F2 1I2 1F3 1I3 1W0 1W1 1W2 1W3",
    ]


@in_parts("p", RANKS, default=4, full=2)
def test_bubbles_of_the_closed_forms(p):
    for m, (F, I, W) in product((2 * p - 1, 2 * p, 3 * p + 2), TIMES):  # noqa: E741
        h1, h2 = (build(name, ranks=p, microbatches=m) for name in ("zb_h1", "zb_h2"))
        assert idle(h1, F=F, I=I, W=W) == (p - 1) * (F + I - W)
        for latency in (0, 1):
            measured = timeline(h2, F=F, I=I, W=W, latency=latency)
            bubble = max(measured.spans) - m * (F + I + W)
            assert bubble == (p - 1) * (F + I - 2 * W + 2 * latency)


@in_parts("p", RANKS, default=4, full=2)
def test_equal_times(p):
    """Nothing of the second half of the memory can be seen in the makespan."""
    for m in (2 * p, 3 * p + 2):
        for name, span in (("zb_h1", p - 1), ("zb_1p", p - 1), ("zb_h2", 0), ("zb_2p", 0)):
            measured = timeline(build(name, ranks=p, microbatches=m))
            assert measured.bubble_makespan == Fraction(p - 1, 3 * m + p - 1)
            assert max(measured.spans) == 3 * m + span


def test_published_bubbles():
    measured = timeline(build("zb_2p", ranks=4, microbatches=8))
    assert (measured.bubble_span, measured.bubble_makespan) == (0, Fraction(1, 9))


@pytest.mark.parametrize("p", RANKS)
def test_peaks(p):
    """Held from F to W all ranks are equal; weighted, what I frees makes the later ranks less."""
    freed = Fraction(5, 8)
    for m in (2 * p, 3 * p + 2):
        h1, h2 = (build(name, ranks=p, microbatches=m) for name in ("zb_h1", "zb_h2"))
        assert peak_held(h1) == (p,) * p
        assert peak_held(h2) == (2 * p - 1,) * p
        assert peak_weighted(h1, freed) == tuple(p - r + r * (1 - freed) for r in range(p))
        assert peak_weighted(h2, freed) == tuple(
            2 * (p - r) - 1 + 2 * r * (1 - freed) for r in range(p)
        )


@in_parts("p", [1, 2, 3, 4, 8, 11], default=3, full=1)
@pytest.mark.parametrize(("F", "I", "W"), TIMES)
def test_zb_1p_has_the_published_bubble(p, F, I, W):  # noqa: E741
    cost = Cost(F, I, W)
    for m in (2 * p, 2 * p + 1, 3 * p + 2):
        schedule = build("zb_1p", ranks=p, microbatches=m, cost=cost)
        assert simulate(schedule, cost).makespan == m * (F + I + W) + (p - 1) * (F + I - W)
        assert max(peak_held(schedule)) == p


def test_where_the_published_bubble_of_zb_1p_does_not_hold():
    """At W > F the first W of each rank comes too late, held or weighted."""
    cost = Cost(10, 12, 11)
    for p in (2, 4, 8):
        schedule = build("zb_1p", ranks=p, microbatches=2 * p, cost=cost)
        assert simulate(schedule, cost).makespan == 2 * p * 33 + (p - 1) * 12


@pytest.mark.parametrize("name", ["zb_1p", "zb_2p"])
@in_parts("p", [1, 2, 3, 4, 8], default=3, full=1)
@pytest.mark.parametrize(("F", "I", "W"), TIMES)
def test_few_microbatches(name, p, F, I, W):  # noqa: E741
    cost = Cost(F, I, W)
    for m in {1, max(1, p - 1), p}:
        schedule = build(name, ranks=p, microbatches=m, cost=cost)
        assert simulate(schedule, cost).makespan == (m + p - 1) * (F + I) + W


times = st.fractions(min_value=Fraction(1, 5), max_value=4, max_denominator=5)


@settings(max_examples=60)
@given(st.data())
def test_any_times_and_any_limit(data):
    """Uneven stages trip the published heuristic; here a limit of 1 is enough for any of them."""
    p, m = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 16))
    each = times | st.lists(times, min_size=p, max_size=p).map(tuple)
    cost = Cost(*(data.draw(each) for _ in "FIW"), latency=data.draw(st.just(0) | times))
    limit = data.draw(st.integers(1, 2 * p + 2))
    made = build("zb_2p", ranks=p, microbatches=m, cost=cost, activation_limit=limit)
    report = validate(made)
    assert report.bitwise_order
    assert max(report.peak_held) <= limit
    if limit >= min(p, m):
        plain = simulate(build("zb_h1", ranks=p, microbatches=m), cost)
        assert simulate(made, cost).makespan <= plain.makespan
        assert max(simulate(made, cost).spans) <= max(plain.spans)


def test_where_the_published_heuristic_fails():
    """p = 8, m = 16, stage 1 takes 1.5 times as long, limit 2p."""
    slow = tuple(Fraction(3, 2) if stage == 1 else Fraction(1) for stage in range(8))
    cost = Cost(slow, slow, slow)
    made = simulate(build("zb_2p", ranks=8, microbatches=16, cost=cost), cost)
    plain = simulate(build("zb_h1", ranks=8, microbatches=16), cost)
    assert max(made.spans) < max(plain.spans)
    assert made.makespan <= plain.makespan


def all_lists(microbatches, limit, done=(0, 0, 0)):
    """Yield every order of one rank's F, I and W, each by micro-batch, within a limit."""
    if done[2] == microbatches:
        yield []
    forwards, inputs, weights = done
    room = forwards < microbatches and forwards - weights < limit
    for index, able in enumerate((room, inputs < forwards, weights < inputs)):
        if able:
            after = tuple(count + (kind == index) for kind, count in enumerate(done))
            for rest in all_lists(microbatches, limit, after):
                yield [((Kind.F, Kind.I, Kind.W)[index], done[index]), *rest]


@in_parts("limit", [1, 2, 3], default=[1], full=[2])
@pytest.mark.parametrize(("F", "I", "W"), [*TIMES, (5, 9, 14)])
def test_two_ranks_and_three_microbatches_are_optimal(limit, F, I, W):  # noqa: E741
    cost = Cost(F, I, W)
    timelines = []
    for lists in product(all_lists(3, limit), repeat=2):
        ops = tuple(
            packed(pack(kind, rank, microbatch) for kind, microbatch in ops)
            for rank, ops in enumerate(lists)
        )
        with suppress(ScheduleError):  # it deadlocks
            timelines.append(simulate(Schedule("any", loop(2), 3, ops), cost))
    schedule = build("zb_2p", ranks=2, microbatches=3, cost=cost, activation_limit=limit)
    made = simulate(schedule, cost)
    assert max(made.spans) == min(max(other.spans) for other in timelines)
    assert made.makespan == min(other.makespan for other in timelines)


def test_both_limits_are_one_heuristic():
    tight = build("zb_2p", ranks=4, microbatches=9, activation_limit=4)
    assert tight.ops == build("zb_1p", ranks=4, microbatches=9).ops
    assert tight.ops == build("zb_2p", ranks=4, microbatches=9, activation_limit=4.9).ops


@pytest.mark.parametrize("name", ["zb_1p", "zb_2p"])
def test_no_room(name):
    with pytest.raises(ScheduleError, match="must be at least 1 micro-batch, not 1/2"):
        build(name, ranks=2, microbatches=2, activation_limit=Fraction(1, 2))


PUBLISHED = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), 0.634, (0.2431, 0.1585, 0.1585, 0.0433)),
    (8, 24, (29.718, 29.444, 19.927, 0.527), 0.568, (0.2347, 0.1323, 0.1323, 0.0029)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), 0.568, (0.2552, 0.1397, 0.1397, 0.0066)),
    (32, 96, (10.419, 10.207, 7.715, 0.408), 0.568, (0.2646, 0.1421, 0.1421, 0.0038)),
]
"""2401.10241: p, m, times of F, I, W and a message, the share that I frees, and the share of the
longest span that 1F1B, ZB-H1, ZB-1p and ZB-2p idle. W frees 32h / (34h + 5as)."""


@pytest.mark.parametrize(("p", "m", "times", "freed", "bubbles"), PUBLISHED)
def test_published_bubbles_within_weighted_memory(p, m, times, freed, bubbles):
    F, I, W, latency = (Fraction(repr(time)) for time in times)  # noqa: E741
    cost, share = Cost(F, I, W, latency=latency), Fraction(repr(freed))
    limits = {"1f1b": p, "zb_h1": p, "zb_1p": p, "zb_2p": 2 * p}
    for (name, limit), published in zip(limits.items(), bubbles, strict=True):
        schedule = build(name, ranks=p, microbatches=m, cost=cost, freed=share)
        bubble = simulate(schedule, cost).bubble_span
        assert round(float(bubble), 4) == published, name
        assert max(peak_weighted(schedule, share)) <= limit
    held = build("zb_2p", ranks=p, microbatches=m, cost=cost)
    assert simulate(held, cost).bubble_span > bubble + Fraction(1, 100)


@pytest.mark.parametrize(("p", "m", "times", "freed"), [row[:4] for row in PUBLISHED])
def test_a_v_would_gain_nothing_by_a_weighted_limit(p, m, times, freed):
    """Each rank is at its peak before its first I, so what I frees leaves no room."""
    F, I, W, latency = (Fraction(repr(time)) / 2 for time in times)  # noqa: E741
    schedule = build("zb_v", ranks=p, microbatches=m, cost=Cost(F, I, W, latency=2 * latency))
    assert {*peak_held(schedule)} == {*peak_weighted(schedule, Fraction(repr(freed)))} == {p}


OF_V = [("1188.542", 0.0703), ("2020.594", 0.0446), ("1588.2735", 0.0518), ("2945.4705", 0.0541)]
"""At these times, in two halves on a V: the makespan of what the authors' own generator makes
(scheduler/zbv.py of zero-bubble-pipeline-parallelism, 39f2c186), and the share of the longest span
that zb_v idles; docs/schedules.md has theirs."""


@pytest.mark.parametrize(
    ("p", "m", "times", "makespan", "bubble"),
    [(*row[:3], *of_v) for row, of_v in zip(PUBLISHED, OF_V, strict=True)],
)
def test_a_v_is_through_no_later_than_that_of_its_authors(p, m, times, makespan, bubble):
    F, I, W = (Fraction(repr(time)) / 2 for time in times[:3])  # noqa: E741
    cost = Cost(F, I, W, latency=Fraction(repr(times[3])))
    made = simulate(build("zb_v", ranks=p, microbatches=m, cost=cost), cost)
    assert made.makespan <= Fraction(makespan)
    assert round(float(made.bubble_span), 4) == bubble


@pytest.mark.parametrize("freed", [Fraction(0), Fraction(1, 3), 0.366, Fraction(1)])
@pytest.mark.parametrize("limit", [1, Fraction(5, 2), 4])
def test_any_weighted_limit_is_kept(freed, limit):
    for p, m in ((1, 3), (3, 7), (4, 9)):
        options = {"activation_limit": limit, "freed": freed}
        schedule = build("zb_2p", ranks=p, microbatches=m, **options)
        validate(schedule)
        assert max(peak_weighted(schedule, Fraction(freed))) <= limit


def test_the_freed_share_is_a_share():
    with pytest.raises(ScheduleError, match="freed must be from 0 to 1, not 2"):
        build("zb_1p", ranks=2, microbatches=2, freed=2)
