"""Deviation from a static order under jitter."""

from dataclasses import replace

import pytest

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost
from megapipe.schedule.data_parallel import ReplicaPolicy
from megapipe.schedule.generators import build
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.timing.opportunistic import deviate
from megapipe.schedule.timing.simulate import simulate

NAMES = ["varuna", "merak", "1f1b", "zb_h1", "zb_v", "chimera", "autopipe"]


@pytest.mark.parametrize("name", NAMES)
def test_a_window_of_one_is_the_static_order(name):
    schedule = build(name, ranks=4, microbatches=8)
    cost = Cost(F=3, I=2, W=2, latency=1, jitter=0.3, seed=5)
    timeline, static = deviate(schedule, cost, window=1), simulate(schedule, cost)
    assert timeline.schedule.ops == schedule.ops
    for rank in range(4):
        assert list(timeline.starts[rank]) == list(static.starts[rank])
        assert list(timeline.ends[rank]) == list(static.ends[rank])


@pytest.mark.parametrize("name", NAMES)
def test_what_was_run_is_a_valid_order_of_the_same_operations(name):
    schedule = build(name, ranks=4, microbatches=8)
    run = deviate(schedule, Cost(latency=1, jitter=0.3), window=6).schedule
    assert run.ops != schedule.ops
    assert [sorted(ops) for ops in run.ops] == [sorted(ops) for ops in schedule.ops]
    assert validate(replace(run, activation_bound=None)).bitwise_order


@pytest.mark.parametrize("latency", [0, 1])
@pytest.mark.parametrize("name", ["varuna", "merak", "1f1b"])
def test_with_jitter_of_30_percent_opportunity_is_never_longer(name, latency):
    schedule = build(name, ranks=4, microbatches=16)
    for seed in range(20):
        cost = Cost(latency=latency, jitter=0.3, seed=seed)
        assert deviate(schedule, cost, window=4).makespan <= simulate(schedule, cost).makespan


def test_a_timeline_knows_what_its_replicas_did():
    schedule = build("1f1b", ranks=2, microbatches=4)
    policy = ReplicaPolicy(chunked_loss=True)
    cost = Cost(gather=1, reduce=1)
    timeline = deviate(schedule, cost, 2, policy)
    assert timeline.policy == simulate(schedule, cost, policy).policy == policy


def test_what_has_no_other_order():
    with pytest.raises(ScheduleError, match="at least 1, not 0"):
        deviate(build("1f1b", ranks=2, microbatches=2), Cost(), 0)
    with pytest.raises(ScheduleError, match="slices or joined operations"):
        deviate(build("dualpipe", ranks=2, microbatches=8), Cost(), 2)
