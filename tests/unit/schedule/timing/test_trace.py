"""Traces for Perfetto."""

import json
from fractions import Fraction

import pytest

from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import build, forward_only, names
from megapipe.schedule.memory import messages, peak_held
from megapipe.schedule.placement import loop
from megapipe.schedule.text import from_csv
from megapipe.schedule.timing.simulate import simulate
from megapipe.schedule.timing.trace import trace


def events(phase, timelines, **unit):
    return [event for event in trace(timelines, **unit)["traceEvents"] if event["ph"] == phase]


def test_an_event_per_operation_with_its_time():
    timeline = simulate(build("1f1b", ranks=2, microbatches=2), Cost(1, 1, 1))
    shown = events("X", {"predicted": timeline})
    assert [(e["tid"], e["name"], e["ts"], e["dur"]) for e in shown] == [
        (0, "0F0", 0, 1000),
        (0, "0F1", 1000, 1000),
        (0, "0B0", 4000, 2000),
        (0, "0B1", 7000, 2000),
        (1, "1F0", 1000, 1000),
        (1, "1B0", 2000, 2000),
        (1, "1F1", 4000, 1000),
        (1, "1B1", 5000, 2000),
    ]
    assert [e["cat"] for e in shown] == list("FFBBFBFB")
    assert shown[5]["args"] == {"stage": 1, "microbatch": 0, "slice": 0, "direction": 0}


def test_arrows_leave_within_their_source_and_end_where_its_use_starts():
    timeline = simulate(
        build("1f1b", ranks=2, microbatches=2), Cost(1, 1, 1, latency=Fraction(1, 2))
    )
    out, arrived = (events(phase, {"predicted": timeline}) for phase in "sf")
    assert [(e["tid"], e["ts"]) for e in out] == [(1, 4498), (1, 7498), (0, 999), (0, 1999)]
    assert [(e["tid"], e["ts"]) for e in arrived] == [(0, 5000), (0, 8000), (1, 1500), (1, 4500)]
    assert [e["id"] for e in out] == [e["id"] for e in arrived]
    assert len({e["id"] for e in out}) == 4


@pytest.mark.parametrize("name", names())
def test_arrows_and_counters_are_those_of_the_ledger(name):
    schedule = build(name, ranks=4, microbatches=16)
    shown = {"predicted": simulate(schedule)}
    assert len(events("s", shown)) == len(events("f", shown)) == messages(schedule)
    for rank, peak in enumerate(peak_held(schedule)):
        held = [
            event["args"]["micro-batches"]
            for event in events("C", shown)
            if event["name"] == f"activations held by rank {rank}"
        ]
        assert max(held) == float(peak)
        assert held[-1] == 0


def test_predicted_and_measured_lie_below_each_other():
    timeline = simulate(build("zb_h1", ranks=2, microbatches=3))
    both = {"predicted": timeline, "measured": timeline}
    named = [e for e in events("M", both) if e["name"] == "process_name"]
    assert [(e["pid"], e["args"]["name"]) for e in named] == [
        (0, "predicted: zb_h1"),
        (1, "measured: zb_h1"),
    ]
    shown = events("X", both, unit=1e6)
    assert [e["pid"] for e in shown] == [0] * 18 + [1] * 18
    assert max(e["ts"] + e["dur"] for e in shown) == float(timeline.makespan) * 1e6
    assert not {e["id"] for e in events("s", both) if e["pid"] == 0} & {
        e["id"] for e in events("s", both) if e["pid"] == 1
    }
    assert json.loads(json.dumps(trace(both)))["displayTimeUnit"] == "ms"


def test_joined_pairs_are_two_events_at_one_time():
    schedule = from_csv(
        "0F0,1F1,(0F2;1B1)OVERLAP_F_B,1F3,1B3,0B0,0B2\n"
        "0F1,1F0,(0F3;1B0)OVERLAP_F_B,1F2,1B2,0B1,0B3\n"
    )
    shown = {e["name"]: e for e in events("X", {"x": simulate(schedule)}) if e["tid"] == 0}
    assert [(shown[name]["ts"], shown[name]["dur"]) for name in ("0F2", "1B1")] == [
        (2000, 3000)
    ] * 2
    assert [shown[name]["args"]["direction"] for name in ("0F2", "1B1")] == [0, 1]


def test_gathers_and_reductions_have_a_thread_below_their_rank():
    timeline = simulate(build("1f1b", ranks=2, microbatches=2), Cost(reduce=(0, 3), gather=1))
    shown = [e for e in events("X", {"x": timeline}) if e["cat"] in ("gather", "reduce")]
    assert [(e["tid"], e["name"], e["ts"], e["dur"]) for e in shown] == [
        (2, "gather 0", 0, 1000),
        (3, "gather 1", 0, 1000),
        (3, "reduce 1", 8000, 3000),
    ]
    about = {(e["name"], e["tid"]): e["args"] for e in events("M", {"x": timeline})}
    order = sorted((about["thread_sort_index", tid]["sort_index"], tid) for tid in range(4))
    assert [about["thread_name", tid]["name"] for _, tid in order] == [
        *("rank 0", "rank 0, data-parallel"),
        *("rank 1", "rank 1, data-parallel"),
    ]


def test_a_forward_only_schedule_has_no_counter():
    assert events("C", {"x": simulate(forward_only(loop(2), 3))}) == []
