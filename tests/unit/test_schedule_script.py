"""scripts/schedule.py: what each command prints, and every mistake in one line."""

import csv
import io
import json
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.schedule.commands import COMMANDS, main
from megapipe.schedule.commands.arguments import number
from megapipe.schedule.commands.scenario import placement_names
from megapipe.schedule.generators import aliases, build, names
from megapipe.schedule.placement import Placement, loop, mirrored, replicated, vee, wave
from megapipe.schedule.render import svg, text
from megapipe.schedule.text import from_csv, to_csv
from megapipe.schedule.timing.simulate import simulate

SMALL = ("--ranks", "4", "--microbatches", "8")


@pytest.mark.parametrize("command", [[], *([m.__name__.rpartition(".")[2]] for m in COMMANDS)])
def test_help(command, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["schedule.py"])
    command = ["list"] if command == ["listing"] else command
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(" ".join(["usage: schedule.py", *command]))


def test_list_names_every_schedule(ask):
    told = {entry["schedule"]: entry for entry in json.loads(ask("list", "--json"))}
    assert set(told) == set(names())
    assert {alias: name for name in told for alias in told[name]["aliases"]} == aliases()
    assert all(entry["about"] for entry in told.values())
    assert (told["1f1b"]["placement"], told["1f1b"]["backward"]) == ("single", "fused")
    assert told["zb_h1"]["backward"] == "split"
    assert told["zb_h1"]["papers"] == ["2401.10241"]
    assert told["interleaved_1f1b"]["options"] == ["chunks", "microbatch_group_size"]
    assert told["chimera"]["weights"] == 2
    shown = ask("list")
    for name, entry in told.items():
        assert f"{name}" in shown
        assert entry["about"] in shown


def test_simulate_json_of_zb_h1(ask):
    told = json.loads(ask("simulate", "zb_h1", *SMALL, "--json"))
    seconds = {told.pop("generate_seconds"), told.pop("simulate_seconds")}
    assert all(0 < each < 10 for each in seconds)
    assert told == {
        "schedule": "zb_h1",
        "ranks": 4,
        "microbatches": 8,
        "chunks": 1,
        "slices": 1,
        "placement": "single",
        "valid": True,
        "bitwise_order": True,
        "ops": 96,
        "messages": 48,
        "volume": 48,
        "makespan": 27,
        "stream": None,
        "span": 27,
        "bubble": {"makespan": 1 / 9, "ideal": 1 / 8, "span": 1 / 9},
        "exposed": {"gather": 0, "reduce": 0},
        "replicas": {"zero": 1, "gathers": 0, "reductions": 0, "added": 0},
        "idle": [{"warmup": 3, "waiting": 0, "drain": 0, "imbalance": 0}] * 4,
        "peak_held": [4, 4, 4, 4],
        "peak_weighted": [4, 4, 4, 4],
        "weight_copies": [1, 1, 1, 1],
        "activation_limit": None,
        "memory_accounting": "held",
        "fits": True,
    }


def test_costs_are_those_of_a_full_rank(ask):
    """A chunk takes 1/V of it; latency is not shared."""

    def makespan(*more):
        told = json.loads(ask("simulate", "interleaved_1f1b", *SMALL, *more, "--json"))
        return told["makespan"]

    assert makespan("--chunks", 2) == 28.5
    assert makespan("--chunks", 2, "--cost", "F=2,I=2,W=2") == 57
    assert makespan("--chunks", 2, "--cost", "F=2/3,I=2/3,W=2/3") == 19
    assert makespan("--chunks", 1, "--cost", "B=5") == 6 * (8 + 3)
    one = ("--ranks", "2", "--microbatches", "1", "--chunks", "1")
    assert makespan(*one, "--cost", "F=0.5,I=0.5,W=0.5,comm=10") == 0.5 + 10 + 1.5 + 10 + 1
    assert makespan(*one, "--chunks", 2, "--cost", "F=0.5,comm=10") == 1 + 3 * 10 + 4 + 3 * 10


def test_costs_of_joined_operations_and_of_the_network(ask):
    def makespan(name, *more):
        return json.loads(ask("simulate", name, *SMALL, *more, "--json"))["makespan"]

    assert makespan("dualpipe", "--cost", "overlap=1/2") < makespan("dualpipe")
    assert makespan("1f1b", "--bandwidth", "4") == makespan("1f1b", "--cost", "comm=1/4")
    drawn = {makespan("1f1b", "--jitter", "0.1", "--seed", seed) for seed in (0, 0, 1)}
    assert len(drawn) == 2


def test_stage_costs(ask, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps([{"F": "1/2", "I": 1, "W": 0.25}, {"F": 3, "I": 1, "W": 1}]))
    size = ("--ranks", "2", "--microbatches", "1", "--json")
    told = json.loads(ask("simulate", "1f1b", *size, "--stage-cost", path, "--cost", "comm=2"))
    assert told["makespan"] == 0.5 + 2 + 3 + 2 + 2 + 1.25


def test_gathers_and_reductions(ask, tmp_path):
    """The costs are those of a full rank, and a chunk takes 1/V; in a file they are of a stage."""

    def told(name, *more):
        return json.loads(ask("simulate", name, *SMALL, *more, "--json"))

    both = ("--cost", "reduce=6,gather=2")
    one, two = told("1f1b", *both), told("breadth_first", *both, "--chunks", "2")
    assert (one["makespan"], one["exposed"]) == (33 + 6 + 2, {"gather": 2, "reduce": 6})
    assert (two["makespan"], two["exposed"]) == (28.5 + 3 + 1, {"gather": 1, "reduce": 3})
    assert one["span"] == 33
    shown = ask("simulate", "1f1b", *SMALL, *both).splitlines()
    assert shown[-1] == (
        "  exposed   2 of the gathers, before the first operation; "
        "6 of the reductions, after the last"
    )
    assert shown[-2] == "  replicas  ZeRO-1: 4 gathers and 4 reductions add 8 to the makespan"
    path = tmp_path / "costs.json"
    stages = [{"F": 1, "I": 1, "W": 1, "reduce": stage, "gather": "1/2"} for stage in range(4)]
    path.write_text(json.dumps(stages))
    assert told("1f1b", "--stage-cost", path)["exposed"] == {"gather": 0.5, "reduce": 0}
    assert told("gpipe", "--stage-cost", path)["makespan"] == 33.5


COLLECTIVES = ("--cost", "reduce=8,gather=4")


def test_zero_stages(ask):
    """Two chunks on each of two ranks, 4 micro-batches: depth-first has two runs of each."""

    def told(name, *more):
        size = ("--ranks", "2", "--microbatches", "4", "--chunks", "2")
        return json.loads(ask("simulate", name, *size, *COLLECTIVES, *more, "--json"))

    def counts(*more):
        replicas = told("interleaved_1f1b", *more)["replicas"]
        return replicas["zero"], replicas["gathers"], replicas["reductions"]

    assert counts() == (1, 4, 4)
    assert counts("--zero", "0") == (0, 4, 4)
    assert counts("--zero", "2") == (2, 4, 8)
    assert counts("--zero", "3") == (3, 4, 8)  # both chunks are there all the time
    assert counts("--zero", "3", "--prefetch", "0") == (3, 16, 8)
    for name in ("interleaved_1f1b", "breadth_first"):
        plain = told(name, "--cost", "comm=0")
        assert plain["replicas"] == {"zero": 1, "gathers": 0, "reductions": 0, "added": 0}
        for zero in ("1", "2", "3"):
            more = told(name, "--zero", zero, "--prefetch", "0")
            assert more["makespan"] == plain["makespan"] + more["replicas"]["added"]


def test_buckets_of_a_reduction(ask):
    """Two of 4 each: the first begins half-way through the last backward, from 6 to 8."""

    def added(*more):
        size = ("--ranks", "1", "--microbatches", "2", "--cost", "F=2,B=2,reduce=8")
        told = json.loads(ask("simulate", "1f1b", *size, *more, "--json"))
        return told["replicas"]["reductions"], told["replicas"]["added"]

    assert added() == (1, 8)
    assert added("--buckets", "2") == (2, 7)
    assert added("--buckets", "8") == (8, 8 - 2 * 7 / 8)


def test_a_chunked_loss_is_a_run_of_its_own(ask, tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("0F0,1F0,1I0,0I0,0W0,1W0\n")
    size = (path, "--ranks", "1", "--microbatches", "1", "--zero", "2", *COLLECTIVES)
    for more, reductions in ((), 2), (("--chunked-loss",), 3):
        told = json.loads(ask("simulate", *size, *more, "--json"))
        assert told["replicas"]["reductions"] == reductions


def test_memory_limits_and_accountings(ask):
    def fits(*more):
        told = json.loads(ask("simulate", "zb_h1", *SMALL, *more, "--json"))
        return told["fits"], max(told["peak_held"]), max(told["peak_weighted"])

    assert fits("--activation-limit", "4") == (True, 4, 4)
    assert fits("--activation-limit", "3.999") == (False, 4, 4)
    freed = ("--freed-by-input-grad", "1/2", "--activation-limit", "4")
    assert fits(*freed, "--memory-accounting", "weighted") == (True, 4, 4)
    freed = ("--freed-by-input-grad", "1", "--activation-limit", "3")
    assert fits(*freed) == (False, 4, 4)
    told = json.loads(ask("simulate", "zb_h1", *SMALL, *freed, "--json"))
    assert told["peak_weighted"] == [4, 3, 2, 1]


def test_weighted_memory_is_what_a_schedule_may_use(ask):
    """The published ZB-2p of 2401.10241 (table 5, p 8, m 24) counts what I frees."""
    given = "--ranks 8 --microbatches 24 --activation-limit 16 --freed-by-input-grad 0.634 --json "
    given += "--cost F=18.522,I=18.086,W=9.337,comm=0.601 --memory-accounting "
    told = {
        accounting: json.loads(ask("simulate", "zb_2p", *(given + accounting).split()))
        for accounting in ("held", "weighted")
    }
    assert max(told["weighted"]["peak_weighted"]) <= 16 < max(told["weighted"]["peak_held"])
    assert told["weighted"]["bubble"]["span"] == pytest.approx(0.0433, abs=5e-5)
    assert told["held"]["bubble"]["span"] > told["weighted"]["bubble"]["span"] + 0.01


def test_simulate_for_a_reader(ask):
    shown = ask("simulate", "zb_h1", *SMALL, "--activation-limit", "3").splitlines()
    assert shown[:8] == [
        "zb_h1",
        "  sizes     4 ranks, 8 micro-batches, chunks 1, slices 1, placement single",
        "  valid     96 operations; gradients in micro-batch order",
        "  time      makespan 27, longest span of a rank 27",
        "  bubble    11.11% of the makespan, 12.50% of the ideal time, 11.11% of the longest span",
        "  idle      warmup 12, waiting 0, drain 0, imbalance 0 (summed over ranks)",
        "  held      4 micro-batches of a full rank, from F to W",
        "  weighted  4, with what I frees",
    ]
    assert shown[-1] == "  limit     3, held: EXCEEDED"


def test_a_schedule_of_the_user(ask, tmp_path, monkeypatch):
    (tmp_path / "mine_of_test.py").write_text(
        "from megapipe.schedule.generators import build\n"
        "def plain(ranks, microbatches):\n"
        "    return build('gpipe', ranks=ranks, microbatches=microbatches)\n"
    )
    monkeypatch.chdir(tmp_path)
    told = json.loads(ask("simulate", "mine_of_test:plain", *SMALL, "--json"))
    assert (told["makespan"], told["peak_held"]) == (33, [8, 8, 8, 8])
    ask("export", "mine_of_test:plain", *SMALL, "-o", "plain.csv")
    again = json.loads(ask("simulate", "plain.csv", *SMALL, "--json"))
    assert (again["schedule"], again["makespan"]) == ("plain.csv", 33)


def test_costs_that_are_given_are_what_a_schedule_is_made_for(ask, tmp_path, monkeypatch):
    (tmp_path / "asked_by_test.py").write_text(
        "from megapipe.schedule.generators import build\n"
        "def plain(ranks, microbatches, cost=None):\n"
        "    name = 'gpipe' if cost is None else '1f1b'\n"
        "    print(cost and (cost.F, cost.jitter))\n"
        "    return build(name, ranks=ranks, microbatches=microbatches)\n"
    )
    monkeypatch.chdir(tmp_path)
    plain = ask("export", "asked_by_test:plain", *SMALL, "--jitter", "0.5")
    assert plain == "None\n" + to_csv(build("gpipe", ranks=4, microbatches=8))
    given = ask("export", "asked_by_test:plain", *SMALL, "--cost", "F=7", "--jitter", "0.5")
    assert given == "None\n(7, 0.0)\n" + to_csv(build("1f1b", ranks=4, microbatches=8))


def test_compare_sorts_and_tells_why_not(ask):
    told = json.loads(
        ask(
            "compare",
            "gpipe",
            "1f1b",
            "zb_h1",
            "chimera",
            "--json",
            "--ranks",
            "3",
            "--microbatches",
            "6",
        )
    )
    assert [entry["schedule"] for entry in told] == ["zb_h1", "1f1b", "gpipe", "chimera"]
    assert told[-1].keys() == {"schedule", "refused"}
    assert told[-1]["refused"].startswith("ranks must be a multiple of 2, not 3")


def test_compare_csv(ask):
    shown = ask("compare", "1f1b", "gpipe", "zb_h1", *SMALL, "--csv", "--sort", "held")
    rows = list(csv.DictReader(io.StringIO(shown)))
    assert [row["schedule"] for row in rows] == ["1f1b", "zb_h1", "gpipe"]
    assert rows[1] == {
        "schedule": "zb_h1",
        "chunks": "1",
        "makespan": "27",
        "span": "27",
        "bubble": str(1 / 9),
        "bubble_ideal": "0.125",
        "bubble_span": str(1 / 9),
        "held": "4",
        "weighted": "4",
        "weights": "1",
        "messages": "48",
        "fits": "True",
        "refused": "",
    }


def test_compare_table(ask):
    shown = ask("compare", "1f1b", "gpipe", *SMALL, "--activation-limit", "4").splitlines()
    assert [line.split() for line in shown[1:]] == [
        ["1f1b", "1", "33", "33", "27.3%", "37.5%", "27.3%", "4", "4", "1", "48", "yes"],
        ["gpipe", "1", "33", "33", "27.3%", "37.5%", "27.3%", "8", "8", "1", "48", "NO"],
    ]
    assert shown[0].split()[-1] == "fits"
    assert "fits" not in ask("compare", "1f1b", *SMALL)


def test_compare_has_every_schedule_and_leaves_out_options_it_lacks(ask):
    told = json.loads(ask("compare", *SMALL, "--chunks", "2", "--json"))
    assert {entry["schedule"] for entry in told} == set(names())
    by_name = {entry["schedule"]: entry for entry in told}
    assert by_name["1f1b"]["chunks"] == 1
    assert by_name["interleaved_1f1b"]["chunks"] == 2


def test_compare_by_placement(ask):
    told = json.loads(ask("compare", *SMALL, "--placement", "loop", "--json"))
    placed = {entry["placement"] for entry in told if "placement" in entry}
    assert placed == {"loop"}
    refused = {entry["schedule"]: entry.get("refused") for entry in told}
    assert refused["1f1b"] == "its placement is single, not loop"


@pytest.mark.parametrize(
    ("placement", "called"),
    [
        (loop(4), ("single",)),
        (loop(4, 2), ("loop",)),
        (vee(4), ("v", "wave")),
        (wave(4, 2), ("wave",)),
        (loop(1, 2), ("loop", "v", "wave")),
        (mirrored(loop(4)), ("bidirectional",)),
        (replicated([2, 1]), ("replicated",)),
        (Placement(2, ((0, 0, 1),)), ("own",)),
    ],
)
def test_placement_names(placement, called):
    assert placement_names(placement) == called


def test_show(ask):
    shown = ask("show", "zb_h1", *SMALL, "--width", "120", "--cost", "W=2")
    schedule = build("zb_h1", ranks=4, microbatches=8)
    from megapipe.schedule.cost import Cost

    assert shown.splitlines() == text(simulate(schedule, Cost(W=2)), width=120).splitlines()


def test_show_in_colour(ask, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = ask("show", "1f1b", "--ranks", "1", "--microbatches", "1", "--width", "60")
    assert "48;2;106;153;214mF0" in shown


def test_draw(ask, tmp_path):
    path = tmp_path / "x.svg"
    assert ask("draw", "zb_h1", *SMALL, "-o", path) == f"{path}\n"
    assert path.read_text() == svg(build("zb_h1", ranks=4, microbatches=8))
    ask("draw", "zb_h1", *SMALL, "-o", path, "--width", "300")
    assert path.read_text() == svg(build("zb_h1", ranks=4, microbatches=8), width=300)
    ask("draw", "zb_h1", *SMALL, "-o", path.with_suffix(".json"))
    events = json.loads(path.with_suffix(".json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 96
    ask("draw", "1f1b", "--ranks", "2", "--microbatches", "2", "-o", path.with_suffix(".png"))
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"


def test_export_and_validate(ask, tmp_path):
    schedule = build("zb_h1", ranks=4, microbatches=8)
    assert ask("export", "zb_h1", *SMALL) == to_csv(schedule)
    path = tmp_path / "x.csv"
    assert ask("export", "zb_h1", *SMALL, "-o", path) == f"{path}\n"
    assert from_csv(path.read_text()).ops == schedule.ops
    assert ask("validate", path) == (
        f"{path}: valid: 4 ranks, 8 micro-batches, chunks 1, placement single, 96 operations, "
        "48 messages; at most 4 micro-batches of a full rank held; gradients in micro-batch order\n"
    )
    assert ask("export", "zb_h1", *SMALL, "--format", "torch") == to_csv(schedule)
    told = json.loads(ask("validate", path, "--json"))
    assert (told["valid"], told["ops"], told["peak_held"]) == (True, 96, [4] * 4)


@given(st.floats(0, 1e30))
def test_numbers_are_taken_as_python_prints_floats(value):
    assert number(repr(value)) == Fraction(repr(value))


def test_costs_of_17_digits_are_exact(capsys, tmp_path):
    long, short = "0.30000000000000004", "1e-05"
    costs = ("--cost", f"F={long},I=1,W={short},comm={short}")
    assert main(["simulate", "1f1b", *SMALL, *costs, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    exact = 11 * (Fraction(long) + 1 + Fraction(short))
    path = tmp_path / "costs.json"
    path.write_text(json.dumps([{"F": float(long), "I": 1, "W": float(short)}] * 4))
    assert main(["simulate", "1f1b", *SMALL, "--stage-cost", str(path), "--json"]) == 0
    without_messages = json.loads(capsys.readouterr().out)
    assert without_messages["makespan"] == float(exact)
    assert told["makespan"] > without_messages["makespan"]


def test_deviation(ask):
    size = ("simulate", "1f1b", *("--ranks", "4", "--microbatches", "8", "--jitter", "0.5"))
    kept = json.loads(ask(*size, "--json"))
    assert "deviating" not in kept
    told = (json.loads(ask(*size, "--out-of-order", n, "--json")) for n in (1, 3))
    one, three = (each["deviating"] for each in told)
    assert one == {"window": 1, "makespan": kept["makespan"]}
    assert three["makespan"] < one["makespan"]
    shown = f"deviating makespan {three['makespan']:g}, within the 3 next operations"
    assert shown in ask(*size, "--out-of-order", 3)
