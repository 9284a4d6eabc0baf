"""Streams: versions, counts and times against closed forms, and against published tables."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from math import ceil, lcm

import pytest

from megapipe.errors import ScheduleError
from megapipe.schedule.async_schedules.async_schedule import AsyncSchedule, finite, stream
from megapipe.schedule.async_schedules.orders import build
from megapipe.schedule.async_schedules.policies import POLICIES, Lists, policy
from megapipe.schedule.async_schedules.shared_updates import play
from megapipe.schedule.async_schedules.staleness import staleness
from megapipe.schedule.async_schedules.times import window_times
from megapipe.schedule.cost import Cost, Time
from megapipe.schedule.ir import Kind, Op, Read, Schedule
from megapipe.schedule.memory import peak_held
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.timing.simulate import simulate
from tests.parity.tiers import in_parts

LEADS = {"1f1b": 1, "eager_1f1b": 2}
ORDERED = [(name, order) for name, each in POLICIES.items() for order in each.orders]


def make(
    order: str, weights: str, p: int, m: int, advance: int = 0, **options: str
) -> AsyncSchedule:
    return stream(build(order, p, m, extra_warmup=advance), policy(weights, **options))


def reads(schedule: Schedule, kind: Kind, stage: int) -> list[Read]:
    """Return what operations of a kind at a stage read, by micro-batch."""
    assert schedule.updates is not None
    rank = schedule.placement.rank_of(stage)
    pairs = zip(schedule.rank_ops(rank), schedule.updates.reads[rank], strict=True)
    return [read for op, read in sorted(pairs) if op.kind == kind and op.stage == stage]


def small() -> Iterator[tuple[str, int, int, int]]:
    for p in range(1, 5):
        for m in range(1, 2 * p + 1):
            for a in (0, 3) if m in (1, p, 2 * p) else (1,):
                yield "1f1b", p, m, a
                yield "eager_1f1b", p, m, a


def whole() -> Iterator[tuple[str, int, int, int]]:
    for order in LEADS:
        for p in range(1, 9):
            for m in range(1, 2 * p + 1):
                for a in range(4):
                    yield order, p, m, a


def check_closed_forms(order: str, p: int, m: int, a: int) -> None:
    ahead = [LEADS[order] * (p - 1 - r) + a for r in range(p)]
    windows = 2 * ceil(ahead[0] / m) + 2
    numbers = range(windows * m)

    def newest(rank: int) -> list[int]:
        """Count the updates of a rank before the forward of each micro-batch."""
        return [max(0, (k - ahead[rank]) // m) for k in numbers]

    for name in ("stash", "vertical", "double_buffer", "latest", "predict", "correct"):
        if name == "double_buffer" and ahead[0] > m:
            with pytest.raises(ScheduleError, match=f"at least as many, not {m}"):
                make(order, name, p, m, a)
            continue
        given = make(order, name, p, m, a)
        schedule = finite(given, windows)
        validate(schedule)
        assert [len(fill) for fill in given.fill] == ahead, "in flight at a cut"
        for r, (w, stale) in enumerate(zip(ahead, staleness(schedule), strict=True)):
            forward, backward = (reads(schedule, kind, r) for kind in (Kind.F, Kind.B))
            own = [k // m for k in numbers]
            if name in ("stash", "vertical"):
                base = 0 if name == "vertical" else r
                assert [read.version for read in forward] == newest(base)
                assert backward == forward
                assert given.kept[r] == stale.kept == 1 + ceil(ahead[base] / m)
                assert stale.mean == Fraction(ahead[base], m)
                assert stale.most == ceil(ahead[base] / m)
            elif name == "double_buffer":
                assert forward == backward == [Read(max(0, t - 1)) for t in own]
                assert (stale.least, stale.most, given.kept[r]) == (1, 1, 2)
            elif name == "latest":
                assert forward == [Read(v) for v in newest(r)]
                assert backward == [Read(t) for t in own]
                assert given.kept[r] == 1
            elif name == "predict":
                further = ceil(w / m)
                assert forward == [Read(max(0, t - further), Fraction(further)) for t in own]
                assert backward == [Read(t) for t in own]
            else:
                assert forward == [Read(v) for v in newest(r)]
                assert backward == [Read(t, -Fraction(w, m)) for t in own]


@in_parts(("order", "p", "m", "a"), small(), default=3, full=3)
def test_closed_forms(order: str, p: int, m: int, a: int) -> None:
    check_closed_forms(order, p, m, a)


@pytest.mark.slow
@pytest.mark.parametrize(("order", "p", "m", "a"), [*whole()])
def test_all_closed_forms(order: str, p: int, m: int, a: int) -> None:
    check_closed_forms(order, p, m, a)


def check_times(order: str, p: int, m: int, a: int) -> None:
    given = make(order, "stash", p, m, a)
    assert window_times(given, Cost(F=2, B=3)) == (5 * m, 2 * (p - 1), 5 * (p - 1))
    apart, pair = Fraction(1, 10), 3
    shown = Fraction(2 * apart, pair) * Fraction(p - 1, p) if order == "1f1b" else 0
    assert window_times(given, Cost(latency=apart)).window == m * pair * (1 + shown)
    if m > LEADS[order] * (p - 1) + a:
        late = make(order, "double_buffer", p, m, a)
        assert window_times(late, Cost(F=2, B=3)).window == 5 * m


@in_parts(("order", "p", "m", "a"), small(), default=3, full=3)
def test_times(order: str, p: int, m: int, a: int) -> None:
    check_times(order, p, m, a)


@pytest.mark.slow
@pytest.mark.parametrize(("order", "p", "m", "a"), [*whole()])
def test_all_times(order: str, p: int, m: int, a: int) -> None:
    check_times(order, p, m, a)


@pytest.mark.parametrize(
    ("m", "weights", "table"),
    [
        (1, "stash", ["00001234", "00012345", "00123456", "01234567"]),
        (2, "stash", ["0000011223", "0000112233", "0001122334", "0011223344"]),
        (4, "stash", ["000000011112", "000000111122", "000001111222", "000011112222"]),
        (1, "vertical", ["00001234"] * 4),
        (4, "double_buffer", ["000000001111"] * 4),
    ],
)
def test_published_versions(m: int, weights: str, table: list[str]) -> None:
    """They are the versions that each forward reads, on 4 ranks."""
    schedule = finite(make("1f1b", weights, 4, m), 8 if m == 1 else 5 if m == 2 else 3)
    for rank, row in enumerate(table):
        assert "".join(map(str, reads(schedule, Kind.F, rank)))[: len(row)] == row


def test_published_predictions() -> None:
    """SpecTrain on 4 ranks: so many updates ahead."""
    schedule = finite(make("1f1b", "predict", 4, 1, horizon="round_trip"), 12)
    ahead = [[reads(schedule, kind, r)[-1].ahead for r in range(4)] for kind in (Kind.F, Kind.B)]
    assert ahead == [[3, 2, 2, 1], [0, 0, 1, 1]]


def check_two_groups(p: int, m: int) -> None:
    given = make("two_group", "double_group", p, m)
    schedule = finite(given, 5)
    validate(schedule)
    found = staleness(schedule)
    for stage, stale in enumerate(found):
        delay = 1 if stage < p else 0
        assert (stale.least, stale.most, stale.kept) == (delay, delay, 1 + delay)
    assert peak_held(schedule) == tuple(Fraction(2 * m - r + 1, 2) for r in range(p))
    if m >= p:
        for b in (1, 2, 3):
            assert window_times(given, Cost(F=1, B=b)).window == 2 * m * (1 + b), "no idle time"


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (2, 4), (3, 3), (4, 3), (4, 8), (8, 8)])
def test_two_groups(p: int, m: int) -> None:
    check_two_groups(p, m)


@pytest.mark.slow
@pytest.mark.parametrize("p", range(1, 9))
def test_all_two_groups(p: int) -> None:
    for m in range(max(1, p - 1), 2 * p + 1):
        check_two_groups(p, m)


def test_windows_of_two_groups_that_are_too_short() -> None:
    with pytest.raises(ScheduleError, match="at least 3 micro-batches, not 2"):
        build("two_group", 4, 2)


@pytest.mark.parametrize("weights", ["stash", "vertical", "latest", "predict", "correct"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (3, 1), (4, 2), (4, 4), (5, 7)])
def test_a_window_takes_its_own_operations(weights: str, p: int, m: int) -> None:
    times = window_times(make("1f1b", weights, p, m), Cost(F=2, B=3))
    assert times.window == 5 * m
    assert times.fill == 2 * (p - 1)
    assert times.pause == 5 * (p - 1), "as a flush"


@pytest.mark.parametrize(("p", "at_once"), [(2, "1.33"), (4, "1.50"), (8, "1.58")])
def test_a_global_sum_is_free_where_updates_are_late(p: int, at_once: str) -> None:
    order, late = build("1f1b", p, p), policy("double_buffer")
    assert late.late
    assert late.waits
    for m in (p, p + 1, 2 * p):
        assert window_times(stream(build("1f1b", p, m), late)).window == 3 * m
    early = replace(late, late=False)
    assert f"{float(window_times(stream(order, early)).window / (3 * p)):.2f}" == at_once


@pytest.mark.parametrize(("p", "factor"), [(2, "1.033"), (4, "1.050"), (8, "1.058")])
def test_latency(p: int, factor: str) -> None:
    cost = Cost(latency=Fraction(1, 10))
    window = window_times(make("1f1b", "stash", p, p), cost).window
    assert window == 3 * p * (1 + Fraction(2, 10) / 3 * Fraction(p - 1, p))
    assert f"{float(window / (3 * p)):.3f}" == factor
    hidden = Cost(latency=Fraction(3, 2))
    assert window_times(make("eager_1f1b", "stash", p, p), hidden).window == 3 * p
    m = 2 * (p - 1) + 1
    assert window_times(make("eager_1f1b", "double_buffer", p, m), hidden).window == 3 * m


def test_updates_take_time() -> None:
    """A reduction and a gathering with each of them."""
    given = make("1f1b", "stash", 2, 2)
    cost = Cost(update=Fraction(1, 2), reduce=Fraction(1, 4), gather=Fraction(1, 8))
    assert window_times(given, cost).window == 6 + Fraction(7, 8)
    late = make("1f1b", "double_buffer", 2, 4)
    assert window_times(late, replace(cost, reduce=1)).window == 12 + Fraction(5, 8), "beside"


@pytest.mark.parametrize(("weights", "order"), ORDERED)
def test_what_is_relative_is_what_the_lists_say(weights: str, order: str) -> None:
    """A segment that is shifted reads what the policy says of the whole lists."""
    p, m = 3, 4
    given = make(order, weights, p, m)
    schedule = finite(given, 6)
    assert schedule.updates is not None
    lists = Lists([schedule.rank_ops(rank) for rank in range(p)], m)
    for rank in range(p):
        pairs = zip(schedule.rank_ops(rank), schedule.updates.reads[rank], strict=True)
        for op, read in pairs:
            if op.kind == Kind.U:
                continue
            said = given.policy.reads(lists, op)
            assert read.version == said.version
            assert read.ahead == said.ahead or said.version == 0, "which has no direction yet"


@pytest.mark.parametrize(("weights", "order"), ORDERED)
def test_cuts_are_clean(weights: str, order: str) -> None:
    """Only forwards are in flight at a cut, equally many at each cut."""
    p, m = 4, 6
    schedule = finite(make(order, weights, p, m), 5)
    under_way = defaultdict(set)
    before: defaultdict[int, set[Op]] = defaultdict(set)  # the cut of its rank, by window
    for rank in range(p):
        ops = schedule.rank_ops(rank)
        for t in range(5):
            own = [n for n, op in enumerate(ops) if op.kind == Kind.B and op.microbatch // m == t]
            before[t] |= {*ops[: own[-1] + 1]}
            assert not any(op.kind == Kind.B and op.microbatch // m > t for op in before[t])
    stages = schedule.placement.stages
    for t in range(3):
        for stage in range(stages - 1):
            for k in range(schedule.microbatches):
                sent = Op(Kind.F, stage, k) in before[t]
                taken = Op(Kind.F, stage + 1, k) in before[t]
                if sent and not taken:
                    under_way[stage].add((t, k - t * m))
                back = Op(Kind.B, stage + 1, k) in before[t]
                assert back == (Op(Kind.B, stage, k) in before[t])
    for pending in under_way.values():
        assert len({frozenset(k for u, k in pending if u == t) for t in range(3)}) == 1


IN_TURNS = {
    (2, 1): (1, 0),
    (1, 2): (3, 0),
    (2, 1, 1): (2, 1, 0),
    (3, 1): (1, 0),
    (1, 3): (5, 0),
    (2, 2): (1, 0),
    (1, 2, 1): (5, 1, 0),
    (3, 2): (2, 0),
    (1, 1, 1): (2, 1, 0),
}
"""Ranks of each stage, and forwards by which each of them is ahead."""


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("counts", IN_TURNS, ids=str)
def test_stages_of_several_ranks(counts: tuple[int, ...], times: int) -> None:
    p, m = sum(counts), lcm(*counts) * times
    ahead = IN_TURNS[counts]
    for name in ("stash", "double_buffer"):
        order = build("1f1b_rr", p, m, ranks_per_stage=counts)
        assert order.ahead == max(c * w for c, w in zip(counts, ahead, strict=True))
        if name == "double_buffer" and order.ahead > m:
            with pytest.raises(ScheduleError, match=f"at least as many, not {m}"):
                stream(order, policy(name))
            continue
        given = stream(order, policy(name))
        schedule = finite(given, 2 * given.ahead + 2)
        validate(schedule)
        numbers = range(schedule.microbatches)
        rank = 0
        for stage, (c, w) in enumerate(zip(counts, ahead, strict=True)):
            found = staleness(schedule)[stage]
            assert found.mean == (Fraction(c * w, m) if name == "stash" else 1)
            for i in range(c):
                ops, own = schedule.rank_ops(rank), numbers[i::c]
                assert [op.microbatch for op in ops if op.kind == Kind.F] == [*own]
                assert [op.microbatch for op in ops if op.kind == Kind.B] == [*own]
                assert schedule.updates is not None
                read = {
                    op.microbatch: each.version
                    for op, each in zip(ops, schedule.updates.reads[rank], strict=True)
                    if op.kind == Kind.F
                }
                for n, k in enumerate(own):
                    newest = max(0, (n - w) // (m // c))
                    assert read[k] == (newest if name == "stash" else max(0, k // m - 1))
                assert given.kept[rank] == (1 + ceil(c * w / m) if name == "stash" else 2)
                rank += 1


@pytest.mark.parametrize("counts", IN_TURNS, ids=str)
def test_ranks_of_a_stage_meet_and_lose_no_time(counts: tuple[int, ...]) -> None:
    """A window takes as long as its operations, and the simulation says what comes of meetings."""
    p, turns = sum(counts), lcm(*counts)

    def length(op: Op) -> Time:
        return {Kind.F: 1, Kind.B: 2, Kind.U: 0}[op.kind] * counts[op.stage]

    for name, m in itertools.product(("stash", "double_buffer"), range(turns, 4 * turns, turns)):
        order = build("1f1b_rr", p, m, ranks_per_stage=counts)
        if name == "double_buffer" and order.ahead > m:
            continue
        given = stream(order, policy(name))
        least = given.ahead + 4
        spans = [
            max(ends[-1] for ends in play(finite(given, windows), length))
            for windows in (least, least + 4)
        ]
        shares = Cost(F=counts, I=counts, W=counts)
        assert (spans[1] - spans[0]) / 4 == window_times(given, shares).window
        assert spans[1] - spans[0] == 4 * 3 * m or (name == "double_buffer" and m == order.ahead)


@pytest.mark.parametrize(
    ("m", "counts", "said"),
    [
        (3, [2, 1], r"must be a multiple of 2 for ranks_per_stage \[2, 1\], not 3; the next is 4"),
        (8, [2, 3], r"must be a multiple of 6 for ranks_per_stage \[2, 3\], not 8; the next is 12"),
    ],
)
def test_a_window_that_ranks_do_not_divide_is_refused(m: int, counts: list[int], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        build("1f1b_rr", sum(counts), m, ranks_per_stage=counts)


def test_one_rank_has_no_stale_weights() -> None:
    for weights in ("stash", "vertical", "latest"):
        (stale,) = staleness(finite(make("1f1b", weights, 1, 2), 4))
        assert stale == (0, 0, 0, 1)


@pytest.mark.parametrize(("weights", "order"), ORDERED)
def test_an_update_waits_for_its_gradients_and_no_longer(weights: str, order: str) -> None:
    """Where nothing takes time but updates, these alone take it; and where they take none, one
    begins when the last gradient that it needs is there."""
    schedule = finite(make(order, weights, 3, 6), 3)
    assert simulate(schedule, Cost(F=0, I=0, W=0)).makespan == 0
    timeline = simulate(schedule, Cost(F=1, I=1, W=1))
    updates = schedule.updates
    assert updates is not None
    made = {
        (op.microbatch // updates.window, op.stage, rank): end
        for rank, ends in enumerate(timeline.ends)
        for op, end in zip(schedule.rank_ops(rank), ends, strict=True)
        if op.kind == Kind.B
    }
    for rank, starts in enumerate(timeline.starts):
        before: Time = 0
        for op, start, end in zip(
            schedule.rank_ops(rank), starts, timeline.ends[rank], strict=True
        ):
            if op.kind == Kind.U:
                needed = [
                    made[window, stage, holder]
                    for window, stage, holder in made
                    if window == op.microbatch and (updates.waits or stage == op.stage)
                ]
                assert start == max(before, *needed)
            before = end


def test_the_makespan_of_a_stream() -> None:
    """Less than that of as many flushes."""
    flushes = 8 * (4 + 4 - 1) * 3
    assert simulate(finite(make("1f1b", "stash", 4, 4), 8)).makespan == 8 * 4 * 3 + 9 < flushes


@pytest.mark.parametrize(
    ("order", "weights", "said"),
    [
        ("gpipe", "stash", "use one of 1f1b, eager_1f1b, 1f1b_rr, two_group"),
        ("1f1b", "double_group", "do not work with schedule 1f1b; they work with two_group"),
        ("1f1b", "stale", "known ones are stash, vertical"),
        ("two_group", "stash", "they work with 1f1b, eager_1f1b, 1f1b_rr"),
        ("1f1b_rr", "latest", "not work with schedule 1f1b_rr; they work with 1f1b, eager_1f1b"),
    ],
)
def test_refusals(order: str, weights: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        make(order, weights, 2, 4)
