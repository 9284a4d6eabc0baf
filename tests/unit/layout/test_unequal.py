"""Unequal links and devices: which order of ranks and which cut a plan chooses."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.layout.layout import Layout
from megapipe.layout.p2p import speed, speed_between
from megapipe.layout.resolve import resolve
from megapipe.layout.speeds import pipeline_speeds
from megapipe.layout.unequal import fastest_order, reordered
from megapipe.model.partition import from_counts
from megapipe.plan.measurements import BY_UNITS
from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import names
from megapipe.schedule.load import load
from megapipe.schedule.placement import loop, vee
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.timing.simulate import simulate

SMALL = ("model.layers=8", "model.hidden=32", "model.heads=2", "model.vocab_size=300")
FAST, SLOW = 100.0, 0.5
LINKS = ("plan.intra_node_gb_s=100", "plan.inter_node_gb_s=10")


def plan(*keys: str) -> tuple[Config, Layout]:
    return resolve(parse([*SMALL, *LINKS, *keys]).config, None, None, measure=BY_UNITS)


def step(order: tuple[int, ...], counts: tuple[int, ...], slow: tuple[int, int]) -> float:
    """Simulate a step of stages with `counts` layers on ranks in an order, with one slow link."""
    ranks, times = len(order), tuple(map(float, counts))
    rates = {(a, b): SLOW if {a, b} == {*slow} else FAST for a, b in permutations(range(ranks), 2)}
    cost = Cost(F=times, I=times, W=times, bandwidth=rates, message=1.0)
    made = reordered(load("1f1b", ranks=ranks, microbatches=8), order)
    return float(simulate(made, cost).makespan)


@pytest.mark.parametrize("slow", list(combinations(range(4), 2)))
def test_order_and_cut_avoid_one_slow_link(slow: tuple[int, int]) -> None:
    """No order and no cut of the layers takes less time (Pipe-Torch's check)."""
    a, b = slow
    _, layout = plan("parallel.pp=4", f"plan.links.{a}-{b}=0.5", "pipeline.rank_order=auto")
    row = layout.schedule.placement.table[0]
    assert {a, b} not in [{*pair} for pair in pairwise(row)], "the link is not used"
    counts = tuple(len(stage.layers) for stage in layout.stage_layers)
    cuts = [
        tuple(y - x for x, y in pairwise((0, *borders, 8)))
        for borders in combinations(range(1, 8), 3)
    ]
    orders = [order for order in permutations(range(4)) if order <= order[::-1]]
    best = min(step(order, cut, slow) for order in orders for cut in cuts)
    assert counts == (2, 2, 2, 2)
    assert step(row, counts, slow) == pytest.approx(best)
    assert step((0, 1, 2, 3), counts, (1, 2)) > 1.2 * best


def test_a_rank_at_half_speed_gets_about_half_the_layers() -> None:
    for slow in range(4):
        speeds = [0.5 if rank == slow else 1.0 for rank in range(4)]
        _, layout = plan("parallel.pp=4", "model.layers=28", f"plan.rank_speeds={speeds}")
        counts = [len(stage.layers) for stage in layout.stage_layers]
        assert sum(counts) == 28
        assert counts[slow] in (3, 4, 5)
        assert all(7 <= count <= 9 for rank, count in enumerate(counts) if rank != slow)


def test_a_pipeline_rank_is_as_fast_as_its_slowest_process() -> None:
    config, _ = plan("parallel.pp=2", "parallel.tp=2", "plan.rank_speeds=[1,0.5,1,1]")
    assert [float(each) for each in pipeline_speeds(config)] == [0.5, 1]
    config, _ = plan("parallel.pp=2")
    assert [float(each) for each in pipeline_speeds(config)] == [1, 1]


def test_a_slow_link_counts_for_messages_and_groups_with_both_ends() -> None:
    sizes = "parallel.pp=2", "parallel.dp=2", "parallel.tp=2"
    config, _ = plan(*sizes, "plan.links.4-6=3")
    assert speed_between(config, 0, 1) == 100
    assert speed(config, 2) == 100, "no tp group has both"
    assert speed(config, 4, 2) == 3, "a dp group has"
    config, _ = plan(*sizes, "plan.links.7-3=3", "plan.factors.link=2")
    assert (speed_between(config, 0, 1), speed(config, 4, 2)) == (1.5, 50)
    config, _ = plan(*sizes, "plan.links.7-3=300")
    assert speed_between(config, 0, 1) == 100, "a listed link is not faster than the others"


@pytest.mark.parametrize("ranks", [4, 8])
def test_the_order_avoids_slow_links_of_more_ranks(ranks: int) -> None:
    """Two halves with fast links inside and one fast bridge; orders of 8 ranks are swapped."""
    half = ranks // 2

    def time(a: int, b: int) -> float:
        return 1.0 if a // half == b // half or {a, b} == {0, ranks - 1} else 9.0

    order = fastest_order(loop(ranks), time)
    assert sorted(order) == list(range(ranks))
    slow = sum(time(a, b) == 9.0 for a, b in pairwise(order))
    assert slow == 0
    assert list(fastest_order(vee(ranks), lambda a, b: 1.0)) == list(range(ranks))


@pytest.mark.parametrize("name", names())
def test_a_schedule_in_another_order_can_be_executed(name: str) -> None:
    made = load(name, ranks=4, microbatches=8)
    other = reordered(made, [2, 0, 3, 1])
    validate(replace(other, name="other"))
    assert simulate(other, Cost()).makespan == simulate(made, Cost()).makespan
    assert reordered(made, range(4)) is made


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("plan.rank_speeds=[1,1,1]", "has 3 values: expected one for each of 2 processes"),
        ("plan.rank_speeds=[1,2]", "plan.rank_speeds"),
        ("plan.links.0-2=1", "plan.links.0-2: expected two different ranks below 2"),
        ("plan.links.1-1=1", "expected two different ranks"),
        ("plan.links.a=1", "expected two different ranks"),
        ("pipeline.rank_order=[0,0]", "expected each of the pipeline ranks 0 to 1 once"),
        ("pipeline.rank_order=[1,0] pipeline.schedule=auto", "another pipeline.schedule than auto"),
    ],
)
def test_what_does_not_fit_is_refused(keys: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("[", r"\[")):
        plan("parallel.pp=2", *keys.split())


def test_equal_devices_change_nothing() -> None:
    _, equal = plan("parallel.pp=4", "plan.rank_speeds=[0.5,0.5,0.5,0.5]")
    _, usual = plan("parallel.pp=4")
    assert equal.stage_layers == usual.stage_layers
    assert from_counts([len(each.layers) for each in usual.stage_layers])
