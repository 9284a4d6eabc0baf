"""The parts of benchmarks, and the form that they keep to; no timing is asserted."""

from __future__ import annotations

import importlib
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megapipe.schedule.ir import Kind
from megapipe.schedule.proof.validate import validate
from tests.parity.benchmark_files import BENCHMARKS
from tests.parity.tiers import in_parts

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]


def test_there_are_benchmarks() -> None:
    assert BENCHMARKS


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import a file of the benchmarks' folder."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def common(load: Callable[[str], Any]) -> Any:
    return load("common")


def test_an_unknown_option_is_refused(
    load: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """One benchmark shows it, and all others have the same parser."""
    with pytest.raises(SystemExit) as ended:
        load("schedule_scale").main(["--fast"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --fast" in capsys.readouterr().err
    for path in BENCHMARKS:
        text = path.read_text(encoding="utf-8")
        assert text.count("parser(__doc__") == text.count(".parse_args(arg") == 1, path.stem
        assert "ArgumentParser(" not in text, path.stem


def test_met_is_computed_from_value_and_target(common: Any) -> None:
    for value, at_least, met in [
        (1.0, False, True),
        (2.0, False, True),
        (2.1, False, False),
        (1.9, True, False),
        (2.0, True, True),
        (math.nan, False, False),
    ]:
        result = common.Result("c", value, 2.0, "x", "p", at_least=at_least)
        assert result.met is met
        assert result.as_json()["met"] is met


@pytest.mark.parametrize("value", [1.5, math.inf, math.nan])
def test_the_file_of_results_is_json(common: Any, tmp_path: Path, value: float) -> None:
    common.report("t", [common.Result("c", value, 2.0, "x", "p")], tmp_path / "results")

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    (read,) = json.loads((tmp_path / "results").read_text(), parse_constant=refuse)
    assert read["value"] == (1.5 if value == 1.5 else None)


def test_sides_are_timed_in_turn_and_the_first_round_dropped(common: Any) -> None:
    calls = []

    def side(name: str, times: list[float]) -> float:
        calls.append(name)
        return times.pop(0)

    ours, theirs = [100.0, 2.0, 3.0, 8.0], [1.0, 2.0, 2.0, 2.0]
    times = common.compare(lambda: side("a", ours), lambda: side("b", theirs), rounds=3)
    assert "".join(calls) == "baabbaab"
    assert times.ours == (2.0, 3.0, 8.0)
    assert times.ratio == 1.5, "the median of 1, 1.5 and 4"


def test_calls_are_counted_by_language(load: Callable[[str], Any]) -> None:
    def work() -> None:
        for _ in range(3):
            nested()
        len([])

    def nested() -> None:
        max(abs(-1), 0)

    calls = load("engine_overhead").calls
    assert calls(work) == (3, 7)


def test_growth_is_the_exponent(load: Callable[[str], Any]) -> None:
    scale = load("schedule_scale")
    samples = [scale.Sample(ops, 3e-6 * ops**1.5, 0.0) for ops in (100, 400, 1600, 6400)]
    assert scale.slope(samples) == pytest.approx(1.5, abs=1e-12)


def test_a_step_lasts_from_the_first_start_to_the_last_end(load: Callable[[str], Any]) -> None:
    bubble = load("bubble")
    first = [bubble.Step(1.0, 5.0), bubble.Step(10.0, 12.5)]
    second = [bubble.Step(1.5, 6.0), bubble.Step(9.5, 12.0)]
    assert bubble.fastest([first, second]) == 3.0


@pytest.mark.parametrize("times", ["F=I=W", "I=2F", "one slow stage"])
def test_no_operation_is_shorter_than_asked_for(load: Callable[[str], Any], times: str) -> None:
    bubble = load("bubble")
    for name, unit in [("1f1b", 0.02), ("seq1f1b", 0.04), ("chimera_backward_halving", 0.04)]:
        case = bubble.Case(name, 4, 8, times, 0.02)
        cost = case.cost(case.schedule())
        wanted = {
            "F=I=W": ((unit,) * 4, (unit,) * 4),
            "I=2F": ((unit,) * 4, (2 * unit,) * 4),
            "one slow stage": ((unit, unit, 2 * unit, unit),) * 2,
        }[times]
        table = cost.table(4)
        assert (table[Kind.F], table[Kind.I]) == wanted


def test_steps_that_do_not_wait_follow_each_other_without_a_bubble(
    load: Callable[[str], Any],
) -> None:
    """Eight micro-batches of F = I = W = 1 are 24 of work per rank."""
    bench = load("post_validation")
    case = bench.Case("zb_2p", 4, 8, 1.0)
    assert validate(bench.chained(case.schedule(), 3)).bitwise_order
    wanted = bench.predicted(case, 6)
    assert (wanted.waiting, wanted.trusting) == (27.0, 24.0)
    assert wanted.saved == 3.0
    assert wanted.ratio == 24 / 27


def test_the_pace_is_the_median_after_the_warm_up(load: Callable[[str], Any]) -> None:
    pace = load("post_validation").pace
    first, second = [0.0, 9.0, 10.0, 12.0, 40.0], [0.0, 9.0, 12.0, 14.0, 42.0]
    assert pace([first, second]) == 2.0, "of 2, 2 and 28"


def test_a_ring_sends_each_piece_to_all_others(load: Callable[[str], Any]) -> None:
    zero, fake = load("zero"), load("fake_world")
    for collective, sent in (("all_reduce", 150), ("all_gather", 75), ("reduce_scatter", 75)):
        seen, amount = fake.Seen("dp", collective), fake.Amount(3, 100)
        assert zero.on_the_wire(seen, amount, 4) == sent


def test_bytes_unlike_the_formula_are_counted(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, measured = load("zero"), []
    formula, observed = zero.formula, zero.observed

    def noted(*case: Any) -> Any:
        measured.append(observed(*case))
        return measured[-1]

    monkeypatch.setattr(zero, "observed", noted)
    claims = list(zero.byte_claims([2]))
    assert [(claim.value, claim.peer) for claim in claims] == [(0, "formula")] * 4
    again = itertools.cycle(measured)
    monkeypatch.setattr(zero, "observed", lambda *_: next(again))
    for i, field in enumerate(zero.Bytes._fields):

        def seven_times(*case: Any, i: int = i) -> Any:
            values = list(formula(*case))
            values[i] *= 7
            return zero.Bytes(*values)

        monkeypatch.setattr(zero, "formula", seven_times)
        for claim in zero.byte_claims([2]):
            assert (claim.value, claim.met) == (2, False), f"{field}: in fp32 and in bf16"


def test_memory_unlike_the_formula_is_told_in_per_cent(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = load("memory")
    predict = memory.predict

    def larger(*case: Any) -> Any:
        return [rank._replace(device=7 * rank.device) for rank in predict(*case)]

    monkeypatch.setattr(memory, "predict", larger)
    claims = {c.claim: c for c in memory.compare(["zb_h1"], "keep", 8, [])}
    of_bytes = claims.pop("policy keep: bytes held at the peak")
    assert of_bytes.value == pytest.approx(100 * 6 / 7)
    assert not of_bytes.met
    assert all(claim.met for claim in claims.values())


def test_collectives_unlike_the_formula_are_counted(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = load("large_worlds")
    case = ("toy", ["parallel.tp=2", "parallel.pp=2"], {8: 1})
    right = scale.traffic_claim(*case)
    assert (right.value, right.met) == (0, True)
    expected = scale.expected

    def larger(*case: Any) -> Any:
        return {
            seen: amount._replace(bytes=7 * amount.bytes)
            for seen, amount in expected(*case).items()
        }

    monkeypatch.setattr(scale, "expected", larger)
    wrong = scale.traffic_claim(*case)
    assert wrong.unit == right.unit == f"of {wrong.value}", "all of them"


def test_a_round_lasts_until_the_slowest_is_done(load: Callable[[str], Any]) -> None:
    zero = load("zero")
    ranks = [zero.Sides([3.0, 5.0], [4.0, 8.0]), zero.Sides([6.0, 2.0], [2.0, 9.0])]
    assert zero.ratio(ranks) == (5.0 / 4.0, 4.0)


@in_parts(
    ("schedule", "policy"),
    itertools.product(
        ["terapipe", "seq1f1b", "interleaved_seq1f1b"], ["keep", "selective", "full"]
    ),
    full=9,
)
def test_slices_of_unequal_lengths_hold_what_is_planned(
    load: Callable[[str], Any], schedule: str, policy: str
) -> None:
    memory = load("memory")
    config, layout = memory.configure(schedule, memory.POLICIES[policy], 27)
    assert len(layout.slice_lengths) == 2
    assert len(set(layout.slice_lengths)) == 2
    check_held(memory, config, layout)


@pytest.mark.parametrize("policy", ["keep", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_operations_of_the_first_and_last_stage_hold_what_is_planned(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, schedule: str, policy: str
) -> None:
    """The vocabulary is so large that the last stage has one layer, and holds most in its loss."""
    memory = load("memory")
    monkeypatch.setattr(memory, "VOCABULARY", 3072)
    check_held(memory, *memory.configure(schedule, memory.POLICIES[policy], 8))


def check_held(memory: Any, config: Any, layout: Any) -> None:
    predicted = memory.predict(config, layout)
    for measured, wanted in zip(memory.measure(config, layout), predicted, strict=True):
        assert measured.within == pytest.approx(wanted.within, rel=0.001)
        assert measured._replace(within=wanted.within) == wanted
    assert all(rank.device > 0 for rank in predicted)


def test_what_a_layout_refuses_is_left_out_and_said(load: Callable[[str], Any]) -> None:
    memory, refused = load("memory"), []
    claims = list(memory.compare(["zb_h1", "seq1f1b"], "offload", 8, refused))
    assert all(claim.peer.startswith("plan, 1 schedules") and claim.met for claim in claims)
    (line,) = refused
    assert line.startswith("policy offload: configuration: activations.offload=")


def test_each_slowed_link_has_another_best_number_of_chunks(load: Callable[[str], Any]) -> None:
    """The simulation finds it; one chunk waits for all rows both ways, twice in each layer."""
    slow = load("slow_link")
    waits = [[slow.exposed(slow.SIZE, each, n) for n in slow.CHUNKS] for each in slow.LATENCIES]
    assert [slow.CHUNKS[own.index(min(own))] for own in waits] == [4, 2, 1]
    for own, latency in zip(waits, slow.LATENCIES, strict=True):
        assert own[0] == pytest.approx(2 * slow.SIZE.layers * 2 * (slow.WAY + latency))


def test_a_slowed_link_has_one_message_at_a_time(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, now = load("slow_link"), 10.0
    monkeypatch.setattr(slow.time, "perf_counter", lambda: now)
    link = slow.SlowLink(latency=1.0, rate=4.0)
    assert link.due(8, alone=True) == 13.0
    assert link.due(4, alone=False) == 14.0, "without a latency of its own"
    assert link.due(4, alone=True) == 16.0
    now = 20.0
    assert link.due(4, alone=True) == 22.0


def test_a_row_of_peers_that_do_not_train_alike_is_void(
    load: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A rank differs by more than 2e-6. The row is in the table, not met; the exit code says so."""
    peers, file = load("peers"), tmp_path / "results.json"
    laps = [peers.Lap(1.0, 2.0)]
    for apart, void in ((2e-6, False), (2.1e-6, True), (peers.difference(2.0, math.nan), True)):
        ranks = [peers.Measured(each, laps, laps) for each in (0.0, apart)]
        monkeypatch.setattr(peers, "run_world", lambda *_, ranks=ranks, **__: ranks)
        code = peers.main(["--quick", "--only", "FSDP2", "--json", str(file)])
        found = json.loads(file.read_text(encoding="utf-8"))
        assert (code, len(found)) == ((1, 1) if void else (0, 2))
        value = apart if math.isfinite(apart) else None
        assert [each["value"] for each in found] == ([value] if void else [1.0, 1.0])
        if void:
            assert "void" in found[0]["claim"]
            assert found[0]["met"] is False
        assert ("void" in capsys.readouterr().out) is void
    assert peers.difference(2.0, 2.5) == peers.difference(2.0, 1.5) == 0.25


def row(claim: str, value: float | None, *, at_least: bool = False) -> dict[str, Any]:
    return {
        "claim": claim,
        "value": value,
        "target": 1.0,
        "unit": "x",
        "peer": "p",
        "met": True,
        "at_least": at_least,
    }


def test_a_row_that_is_worse_by_a_tenth_is_told_with_its_commit(load: Callable[[str], Any]) -> None:
    every = load("all")
    before = [
        row("time", 1.0),
        row("rate", 2.0, at_least=True),
        row("gone", 3.0),
        row("zero", 0.0),
        row("lost", 1.0),
        row("never", None),
    ]
    kept = {"commit": "abc", "date": "2026-11-01", "results": before}
    same = [row("time", 1.1), row("rate", 1.8, at_least=True), row("new", 9.0), row("zero", 0.0)]
    assert list(every.fallen([*same, row("never", None)], kept)) == []
    worse = [
        row("time", 1.11),
        row("rate", 1.79, at_least=True),
        row("zero", 0.01),
        row("lost", None),
    ]
    assert list(every.fallen(worse, kept)) == [
        "time: 1.11 x, was 1 at abc (2026-11-01)",
        "rate: 1.79 x, was 2 at abc (2026-11-01)",
        "zero: 0.01 x, was 0 at abc (2026-11-01)",
        "lost: none x, was 1 at abc (2026-11-01)",
    ]


def test_benchmarks_are_run_kept_compared_and_written(
    load: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    every = load("all")
    monkeypatch.setattr(every, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(every, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(every, "measure", lambda name, quick: measured[name])
    every.PAGE.write_text(f"before\n{every.BEGIN}old\n{every.END}after\n")
    about: dict[str, Any] = {"commit": "abc", "date": "2026-11-01", "machine": "2 cores"}
    loads = iter([0.5, 0.5, 0.5, 2.5])
    monkeypatch.setattr(every, "quiet", lambda most: next(loads))
    about["versions"] = {"torch": "2.13.0"}
    monkeypatch.setattr(every, "circumstances", lambda: about)
    measured = {"step": [row("time", 1.0)], "zero": None}
    assert every.main(["step"]) == 0
    assert every.main(["zero"]) == 1, "it has failed"
    assert every.main(["--write"]) == 0
    found = every.PAGE.read_text()
    assert found.startswith("before\n<!--")
    assert found.endswith("-->\nafter\n")
    assert "old" not in found
    assert "| `benchmarks/step.py` | time | 1 x | at most 1 | p |" in found
    assert "`step.py` was measured at abc, 2026-11-01, 2 cores, load 0.5; torch 2.13.0." in found
    measured["step"] = [row("time", 2.0)]
    assert every.main(["step", "--since", "--json", str(tmp_path / "all.json")]) == 1
    assert "worse: time: 2 x, was 1 at abc" in capsys.readouterr().out
    assert json.loads((tmp_path / "all.json").read_text()) == measured["step"]
    assert every.read("step")["results"][0]["value"] == 1.0, "--since keeps nothing"
    assert every.main(["step"]) == 1
    assert "not measured, load above 2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        every.main(["stepp"])


def test_the_table_of_the_page_is_what_is_kept(load: Callable[[str], Any]) -> None:
    every = load("all")
    text = every.PAGE.read_text(encoding="utf-8")
    assert every.page(text) == text, "run benchmarks/all.py --write"
    listed = {*every.NAMES} | {path.stem for path in BENCHMARKS if path.stem.startswith("gpu_")}
    assert listed == {path.stem for path in BENCHMARKS}
