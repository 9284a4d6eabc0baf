"""Formula = table = event simulation, at zero latency, for every schedule with a closed form.

The table is made slot by slot (a cell per rank and slot), by lines that share no code with the
simulator: a rank that is free begins the next operation of its list if what it needs has ended.
"""

from fractions import Fraction

import pytest

from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import build
from megapipe.schedule.ir import Kind
from megapipe.schedule.timing.simulate import simulate
from tests.parity.tiers import in_parts

RANKS = [*range(1, 9), 11]
EVEN = [p for p in RANKS if p % 2 == 0]
TIMES = [(1, 1, 1), (3, 3, 2), (2, 4, 2), (5, 4, 3)]
"""F, I and W of a full rank; W is neither more than F nor more than I."""


def table(schedule, slots):
    """Return rows of cells: what each rank does in each slot; `slots` is the length by kind."""
    stages = schedule.placement.stages
    todo = [schedule.rank_ops(rank)[::-1] for rank in range(len(schedule.ops))]
    rows = [[] for _ in todo]
    ended = {}
    now = 0
    while any(todo) or any(len(row) > now for row in rows):
        for ops, row in zip(todo, rows, strict=True):
            if len(row) > now:
                continue
            together = [ops.pop()] if ops else []
            if together and together[0].joined:
                together.append(ops.pop())
            if not together or any(
                ended.get(need, now + 1) > now for op in together for need in needs(op, stages)
            ):
                ops.extend(reversed(together))
                row.append(None)
                continue
            for op in together:
                row.extend([op] * slots[op.kind])
            for op in together:
                ended[made(op)] = len(row)
        now += 1
    return rows


def made(op):
    what = {Kind.F: "F", Kind.W: "W"}.get(op.kind, "B")
    return what, op.stage, op.microbatch, op.slice


def needs(op, stages):
    if op.kind == Kind.F and op.stage:
        yield "F", op.stage - 1, op.microbatch, op.slice
    if op.kind in (Kind.I, Kind.B) and op.stage < stages - 1:
        yield "B", op.stage + 1, op.microbatch, op.slice


FORMS = [
    # name, options, legal ranks, micro-batches per ranks, makespan(p, m, f, i, w), times
    ("naive", {}, RANKS, 1, lambda p, m, f, i, w: m * p * (f + i + w), TIMES),
    ("gpipe", {}, RANKS, 2, lambda p, m, f, i, w: (m + p - 1) * (f + i + w), TIMES),
    ("1f1b", {}, RANKS, 2, lambda p, m, f, i, w: (m + p - 1) * (f + i + w), TIMES),
    ("eager_1f1b", {}, RANKS, 2, lambda p, m, f, i, w: (m + p - 1) * (f + i + w), TIMES),
    *(
        (
            name,
            {"chunks": v},
            RANKS,
            2,
            lambda p, m, f, i, w, v=v: m * (f + i + w) + Fraction((p - 1) * (f + i + w), v),
            TIMES,
        )
        for name in ("interleaved_1f1b", "breadth_first", "gpipe")
        for v in (2, 4)
    ),
    *(
        (
            name,
            {"slices": k},
            RANKS,
            2,
            lambda p, m, f, i, w, k=k: m * (f + i + w) + Fraction((p - 1) * (f + i + w), k),
            TIMES,
        )
        for name in ("seq1f1b", "terapipe")
        for k in (2, 4)
    ),
    (
        "zb_h1",
        {},
        RANKS,
        2,
        lambda p, m, f, i, w: m * (f + i + w) + (p - 1) * (f + i - w),
        TIMES,
    ),
    (
        "grouped_interleaved",
        {},
        RANKS,
        2,
        lambda p, m, f, i, w: m * (f + i + w) + Fraction((p - 1) * (f + i), 2),
        TIMES,
    ),
    ("zb_v", {}, RANKS, 3, lambda p, m, f, i, w: 3 * m * f + Fraction((p - 1) * f, 2), TIMES[:1]),
    (
        "gems",
        {},
        EVEN,
        1,
        lambda p, m, f, i, w: m * (f + i + w) + (p - 1) * (f + i + w + (m - 1) * max(f, i + w)),
        TIMES,
    ),
    *(
        (
            "hanayo",
            {"chunks": 2 * n},
            RANKS,
            2,
            lambda p, m, f, i, w, n=n: m * (f + i + w) + Fraction((p - 1) * max(f, i + w), n),
            TIMES,
        )
        for n in (1, 2)
    ),
    (
        "bitpipe",
        {},
        EVEN,
        2,
        lambda p, m, f, i, w: m * (f + i + w) + Fraction((p - 2) * max(f, i + w), 2),
        TIMES,
    ),
    ("chimera", {}, EVEN, 2, lambda p, m, f, i, w: (2 * m + p - 2) * f, [(2, 1, 1)]),
    (
        "chimera_forward_doubling",
        {},
        EVEN,
        2,
        lambda p, m, f, i, w: 3 * m * f + 2 * (p - 2) * f,
        [(1, 1, 1)],
    ),
]


@in_parts(
    ("name", "options", "ranks", "rounds", "makespan", "times"),
    FORMS,
    default=3,
    full=1,
    ids=[f"{name}{options or ''}" for name, options, *_ in FORMS],
)
def test_formula_table_and_simulation_agree(name, options, ranks, rounds, makespan, times):
    for p in ranks:
        schedule = build(name, ranks=p, microbatches=rounds * p, **options)
        share = schedule.placement.stage_shares[0] / schedule.slices
        scale = share.denominator  # slots per unit of time
        for F, I, W in times:  # noqa: E741
            slots = {Kind.F: F, Kind.I: I, Kind.W: W, Kind.B: I + W}
            rows = table(schedule, {kind: int(n * share * scale) for kind, n in slots.items()})
            cost = Cost.full_rank(schedule.placement, F=F, I=I, W=W)
            expected = makespan(p, rounds * p, F, I, W)
            assert simulate(schedule, cost).makespan == expected, (p, F, I, W)
            assert Fraction(max(map(len, rows)), scale) == expected, (p, F, I, W)


def makespan_of(name, latency):
    schedule = build(name, ranks=4, microbatches=16)
    cost = Cost.full_rank(schedule.placement, F=1, I=1, W=1, latency=latency)
    return simulate(schedule, cost).makespan


@pytest.mark.parametrize(
    ("first", "second", "latency"),
    [
        ("hanayo", "gpipe", Fraction(1, 4)),
        ("hanayo", "chimera", Fraction(4, 5)),
        ("hanayo", "1f1b", Fraction(11, 6)),
        ("1f1b", "chimera", Fraction(1, 9)),
    ],
)
def test_the_ranking_of_the_tables_flips_at_a_latency(first, second, latency):
    """p = 4, m = 16, F = I = W = 1: the schedule that is shorter without latency waits for more
    messages."""
    little = Fraction(1, 1000)
    assert makespan_of(first, 0) < makespan_of(second, 0)
    assert makespan_of(first, latency - little) < makespan_of(second, latency - little)
    assert makespan_of(first, latency) == makespan_of(second, latency)
    assert makespan_of(first, latency + little) > makespan_of(second, latency + little)
