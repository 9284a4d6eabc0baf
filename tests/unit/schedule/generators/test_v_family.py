"""ZB-V, V-ZB, V-Half, V-Min and 1F1B-V: tables, bubbles and peaks."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import build
from megapipe.schedule.generators.zb_v import rank_ops
from megapipe.schedule.ir import Kind, Schedule
from megapipe.schedule.memory import messages, peak_held, weight_replicas
from megapipe.schedule.placement import vee
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.timing.simulate import simulate
from tests.parity.tiers import in_parts
from tests.unit.schedule.schedule_times import check_all_sizes, idle, lines, timeline

NAMES = ["zb_v", "v_zb", "v_half", "v_min", "1f1b_v"]
RANKS = range(1, 17)
ENOUGH = [lambda p: 2 * p, lambda p: 2 * p + 1, lambda p: 3 * p + 2]

V_MIN = {1: 0, 2: 1, 3: 5}
V_HALF = {1: 0, 2: 1}
ONE_F_ONE_B_V = {1: 0, 2: 4, 3: 8, 6: 22, 9: 36, 12: 52, 15: 67}

BUBBLE = {
    "zb_v": lambda p: p - 1,
    "v_zb": lambda p: p - 1,
    "v_half": lambda p: V_HALF.get(p, 3 * p - 7 + p % 2 * 3),
    "v_min": lambda p: V_MIN.get(p, 4 * p - 5 - (p % 3 == 2)),
    "1f1b_v": lambda p: ONE_F_ONE_B_V.get(p, 5 * p - 5 - (p % 3 == 2) * 2),
}
"""In slots of half a rank's F; 1F1B has 6(p-1)."""

PEAK = {
    "zb_v": lambda p: p,
    "v_zb": lambda p: p,
    "v_half": lambda p: (p + 2) // 2,
    "v_min": lambda p: (p + 4) // 3,
    "1f1b_v": lambda p: 2 * p // 3 + 1,
}
"""In micro-batches of a full rank, from F to W."""


@in_parts("name", NAMES, default=["zb_v", "v_half"], full=1)
def test_all_sizes(name):
    check_all_sizes(name, legal=lambda p: True)


@pytest.mark.parametrize("name", NAMES)
@in_parts("p", RANKS, default=4, full=2)
def test_bubbles_and_peaks(name, p):
    """Published and measured independently: V-Half 3p-7 for even p, V-Min 4p-5, 1F1B-V 15, 33, 75
    at p = 4, 8, 16, with peaks p/2+1, (p+4) div 3 and 3, 6, 11. V-Min is one slot shorter here
    where p = 2 mod 3."""
    for m in (enough(p) for enough in ENOUGH):
        schedule = build(name, ranks=p, microbatches=m)
        assert idle(schedule, F=2, I=2, W=2) == BUBBLE[name](p)
        assert max(peak_held(schedule)) == PEAK[name](p)


@pytest.mark.parametrize("name", ["zb_v", "v_zb"])
@in_parts("p", RANKS, default=4, full=2)
def test_no_rank_of_zero_bubble_idles_within_its_own_span(name, p):
    for m in (2 * p - 1, 2 * p, 3 * p + 2):
        measured = timeline(build(name, ranks=p, microbatches=m))
        assert measured.bubble_span == 0
        assert measured.bubble_makespan == Fraction(p - 1, 6 * m + p - 1)


@in_parts("p", RANKS, default=4, full=2)
def test_half_the_bubble_of_1f1b_and_half_its_memory(p):
    """What the acceptance table rounds to p/(2m), 2p/(3m) and their peaks."""
    m = 3 * p
    ideal = {
        name: timeline(build(name, ranks=p, microbatches=m)).bubble_ideal
        for name in ("1f1b", "v_half", "v_min")
    }
    assert ideal["1f1b"] == Fraction(p - 1, m)
    assert ideal["v_half"] == Fraction(BUBBLE["v_half"](p), 6 * m) <= ideal["1f1b"] / 2
    assert ideal["v_min"] == Fraction(BUBBLE["v_min"](p), 6 * m) <= ideal["1f1b"] * Fraction(2, 3)


def test_tables():
    assert lines(build("zb_v", ranks=2, microbatches=3)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ]
    assert lines(build("v_min", ranks=2, microbatches=2)) == [
        "0F0 0F1 3F0 3I0 3F1 3W0 0I0 3I1 0W0 3W1 0I1 0W1",
        "1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 2I1 1I1 2W1 1W1",
    ]
    assert lines(build("1f1b_v", ranks=2, microbatches=3)) == [
        "0F0 0F1 0F2 3F0 3B0 3F1 3B1 0B0 3F2 3B2 0B1 0B2",
        "1F0 2F0 1F1 2F1 2B0 1B0 1F2 2F2 2B1 1B1 2B2 1B2",
    ]


@given(st.integers(1, 12), st.integers(0, 20))
def test_zb_v_is_the_published_list(p, more):
    """Phase by phase; F0 is left out where none is left."""
    m = 2 * p - 1 + more
    schedule = build("zb_v", ranks=p, microbatches=m)
    for rank in range(p):
        below = p - rank
        words = ["F0"] * (2 * below - 1) + ["F1", "F0"] * rank + ["F1", "I1", "W1"] * below
        words += ["F0", "I0", "W0", "F1", "I1", "W1"] * (m - p)
        while words.count("F0") > m:
            del words[len(words) - 1 - words[::-1].index("F0")]
        words += ["I0", "I1"] * rank + ["I0", "W0"] * below + ["W1"] * rank + ["W0"] * rank
        ops = schedule.rank_ops(rank)
        assert [f"{op.kind.name}{int(op.stage != rank)}" for op in ops] == words


@pytest.mark.parametrize("p", range(1, 9))
def test_v_zb_is_zb_v_but_for_its_weight_gradients(p):
    for m in (1, p, 2 * p - 1, 2 * p, 3 * p + 2):
        both = [build(name, ranks=p, microbatches=m) for name in ("zb_v", "v_zb")]
        for rank in range(p):
            one, other = ([op for op in each.rank_ops(rank) if op.kind != Kind.W] for each in both)
            assert one == other


@pytest.mark.parametrize("p", range(2, 13))
def test_few_microbatches(p):
    """From m = p on zb_v has the bubble of many micro-batches. Leaving out those that are not
    there, its weight gradients where they were, makes 2p-2 slots of it at m = p."""
    for m in (p, 3 * p // 2, 2 * p - 2):
        assert idle(build("zb_v", ranks=p, microbatches=max(m, p)), F=2, I=2, W=2) == p - 1
    ops = tuple(rank_ops(rank, p, p) for rank in range(p))
    assert idle(Schedule("left_out", vee(p), p, ops), F=2, I=2, W=2) == 2 * p - 2


@pytest.mark.parametrize("name", NAMES)
def test_input_and_loss_are_on_rank_0_and_messages_double(name):
    schedule = build(name, ranks=4, microbatches=9)
    assert schedule.placement == vee(4)
    assert (schedule.placement.rank_of(0), schedule.placement.rank_of(7)) == (0, 0)
    assert weight_replicas(schedule) == (1,) * 4
    assert messages(schedule) == 2 * messages(build("1f1b", ranks=4, microbatches=9))


times = st.fractions(min_value=Fraction(1, 5), max_value=4, max_denominator=5)


@pytest.mark.full
@settings(max_examples=60)
@given(st.sampled_from(["zb_v", "v_zb", "v_half", "v_min"]), st.data())
def test_at_a_cost_no_schedule_is_longer_nor_holds_more(name, data):
    p, m = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 14))
    each = times | st.lists(times, min_size=2 * p, max_size=2 * p).map(tuple)
    cost = Cost(*(data.draw(each) for _ in "FIW"), latency=data.draw(st.just(0) | times))
    plain = build(name, ranks=p, microbatches=m)
    made = build(name, ranks=p, microbatches=m, cost=cost)
    assert simulate(made, cost).makespan <= simulate(plain, cost).makespan
    assert max(made.activation_bound) <= max(plain.activation_bound)
    assert validate(made).bitwise_order


@pytest.mark.parametrize(
    ("F", "I", "W", "plain", "made"),
    [(12, 5, 11, 50, 36), (14, 6, 10, 58, 42), (12, 12, 15, 42, 36), (20, 22, 12, 66, 66)],
)
def test_what_zb_v_gains_at_unequal_times(F, I, W, plain, made):  # noqa: E741
    cost = Cost(F, I, W)
    for m in (8, 12, 20):
        schedules = [build("zb_v", ranks=4, microbatches=m, cost=each) for each in (None, cost)]
        bubbles = [simulate(each, cost).makespan - 2 * m * (F + I + W) for each in schedules]
        assert bubbles == [plain, made]


@in_parts("p", [2, 4, 5, 6, 8], default=[4, 5], full=1)
@pytest.mark.parametrize(
    ("F", "I", "W"), [(3, 4, 2), (4, 3, 3), (11, 10, 6), (7, 4, 7), (5, 9, 11)]
)
def test_v_half_has_no_bubble_in_the_middle(p, F, I, W):  # noqa: E741
    """2405.15362, for 2F <= W+2I and 2I <= W+2F: more micro-batches add none."""
    cost = Cost(F, I, W)
    bubbles = [
        simulate(build("v_half", ranks=p, microbatches=m, cost=cost), cost).makespan
        - 2 * m * (F + I + W)
        for m in (6 * p, 8 * p)
    ]
    assert bubbles[0] == bubbles[1]


def test_the_bubble_of_v_min_grows_with_m_at_unequal_times():
    bubbles = [idle(build("v_min", ranks=4, microbatches=m), F=2, I=4, W=2) for m in (8, 12, 16)]
    assert bubbles == [42, 58, 74]


@pytest.mark.parametrize("name", NAMES)
def test_chunks(name):
    assert build(name, ranks=2, microbatches=2, chunks=2) == build(name, ranks=2, microbatches=2)
    with pytest.raises(ScheduleError, match=f"schedule {name}: chunks must be 2, one on each side"):
        build(name, ranks=2, microbatches=2, chunks=3)
