"""Recomputation ahead of the backward: what it saves, where it is, what it holds."""

from dataclasses import replace
from itertools import product

import pytest

from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import build
from megapipe.schedule.generators.recompute import recompute_ahead
from megapipe.schedule.ir import Kind
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.text import to_csv
from megapipe.schedule.timing.simulate import simulate

SIZES = list(product(range(1, 7), range(1, 9)))  # ranks, micro-batches


def lines(schedule):
    return to_csv(schedule).replace(",", " ").splitlines()


def makespan(schedule, F=1, R=1, B=2):
    return simulate(schedule, Cost(F=F, R=R, B=B)).makespan


def plain_1f1b(ranks, microbatches):
    return build("1f1b", ranks=ranks, microbatches=microbatches)


def test_what_each_step_saves():
    """p = 4, m = 8, F = R = 1, B = 2."""
    plain = plain_1f1b(4, 8)
    assert makespan(plain) == 33, "without recomputation"
    assert makespan(replace(plain, recompute=frozenset(range(4)))) == 44, "R within B"
    assert makespan(recompute_ahead(plain, range(4))) == 41, "R ahead"
    assert makespan(recompute_ahead(plain, range(3))) == 39, "and none on the last stage"
    assert makespan(build("varuna", ranks=4, microbatches=8)) == 39
    assert makespan(build("merak", ranks=4, microbatches=8)) == 38, "and the critical path shifted"


def test_recomputing_ahead_takes_one_recomputation_per_rank_but_the_last_off_1f1b():
    for (ranks, microbatches), recomputing in product(SIZES, (1, 2)):
        plain = plain_1f1b(ranks, microbatches)
        within = makespan(replace(plain, recompute=frozenset(range(ranks))), R=recomputing)
        assert within == (microbatches + ranks - 1) * (1 + recomputing + 2)
        ahead = makespan(recompute_ahead(plain, range(ranks)), R=recomputing)
        assert ahead == within - (ranks - 1) * recomputing


def test_merak_table():
    assert lines(build("merak", ranks=3, microbatches=4)) == [
        "# recompute 0 1",
        "0F0 0F1 0F2 0R0 0B0 0F3 0R1 0B1 0R2 0B2 0R3 0B3",
        "1F0 1F1 1F2 1R0 1B0 1R1 1B1 1F3 1R2 1B2 1R3 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_varuna_table():
    assert lines(build("varuna", ranks=3, microbatches=4)) == [
        "# recompute 0 1",
        "0F0 0F1 0F2 0F3 0R0 0B0 0R1 0B1 0R2 0B2 0R3 0B3",
        "1F0 1F1 1F2 1R0 1B0 1R1 1B1 1R2 1B2 1F3 1R3 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


@pytest.mark.parametrize(("F", "R", "B"), [(1, 1, 2), (1, 1, 1), (2, 2, 3), (3, 4, 7), (2, 3, 5)])
def test_merak_s_makespan_is_that_of_the_rank_before_the_last(F, R, B):
    for ranks, microbatches in SIZES:
        if ranks < 2 or microbatches < 3:
            continue
        merak = build("merak", ranks=ranks, microbatches=microbatches)
        critical = (ranks - 2) * (F + B) + microbatches * (F + R + B)
        assert makespan(merak, F, R, B) == critical
        unshifted = recompute_ahead(plain_1f1b(ranks, microbatches), range(ranks - 1))
        assert makespan(unshifted, F, R, B) == critical + (B - R if B > R else 0)


@pytest.mark.parametrize("name", ["merak", "varuna"])
def test_one_activation_at_a_time_and_a_recomputation_for_each_backward(name):
    for ranks, microbatches in SIZES:
        schedule = build(name, ranks=ranks, microbatches=microbatches)
        report = validate(schedule)
        assert report.bitwise_order
        assert report.peak_held == schedule.activation_bound == (1,) * ranks
        assert schedule.recompute == frozenset(range(ranks - 1))
        for rank in range(ranks):
            ops = schedule.rank_ops(rank)
            before = [ops[i - 1] for i, op in enumerate(ops) if op.kind == Kind.B]
            kind = Kind.R if rank < ranks - 1 else Kind.F
            assert [(op.kind, op.microbatch) for op in before] == [
                (kind, microbatch) for microbatch in range(microbatches)
            ]


def inputs_held(schedule, rank):
    """Count the most micro-batches between their F and their B."""
    held = most = 0
    for op in schedule.rank_ops(rank):
        held += (op.kind == Kind.F) - (op.kind == Kind.B)
        most = max(most, held)
    return most


def test_inputs_held():
    merak = build("merak", ranks=5, microbatches=9)
    assert [inputs_held(merak, rank) for rank in range(5)] == [5, 4, 3, 3, 1]
    varuna = build("varuna", ranks=4, microbatches=16)
    assert [inputs_held(varuna, rank) for rank in range(4)] == [9, 6, 3, 1]


def test_varuna_s_forwards_run_ahead_of_slow_links():
    """p = 4, m = 16; with messages as long as a backward it gains on 1F1B's order."""
    varuna = build("varuna", ranks=4, microbatches=16)
    plain = recompute_ahead(plain_1f1b(4, 16), range(3))
    times = [
        [simulate(schedule, Cost(F=1, R=1, B=2, latency=latency)).makespan for latency in (0, 1, 2)]
        for schedule in (varuna, plain)
    ]
    assert times == [[72, 88, 104], [71, 87, 114]]
