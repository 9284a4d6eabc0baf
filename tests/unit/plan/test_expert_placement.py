"""Maps of experts judged by the log of a run: their costs, and the command that tells them."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megapipe.cli import parse
from megapipe.experts.map import ExpertMap
from megapipe.experts.pool_file import read_pools, write_pools
from megapipe.experts.traffic import ExpertBytes, RankTraffic, migration, most, replica_traffic
from megapipe.layout.resolve import resolve
from megapipe.layout.speeds import Speeds
from megapipe.plan.moe.commands import main
from megapipe.plan.moe.placement import Costs
from megapipe.plan.units import Units

ROOT = Path(__file__).parents[3]
RUN = str(ROOT / "tests/unit/experts/recorded")
RANKS = ("parallel.dp=4", "parallel.ep=4", "plan.peak_tflops=1")
PAGE = (ROOT / "docs/moe.md").read_text(encoding="utf-8")


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["rebalance", *argv]) == 0
    return capsys.readouterr().out


def formulas() -> dict[str, str]:
    """Return the formulas of the page, as Python has them."""
    _, _, after = PAGE.partition("of a row's weight; copies are those of `edp`:\n\n")
    lines = [line.strip() for line in after.partition("\n\n")[0].splitlines()]
    return {
        name: re.sub(r"(?<=[\w)]) (?=[\w(])", "*", text)
        for name, _, text in (line.partition(" = ") for line in lines)
    }


@pytest.mark.parametrize(
    ("keys", "given"),
    [
        ((), {"copies": 1, "owners": 1}),
        (("parallel.dp=8",), {"copies": 2, "owners": 2}),
        (("parallel.dp=8", "optimizer.zero=0"), {"copies": 2, "owners": 1}),
        (("parallel.dp=8", "parallel.etp=2"), {"etp": 2}),
        (("model.dtype=bf16",), {"e": 2, "s": 12, "r": 64 * 2}),
        (("experts.wire_dtype=int8",), {"r": 64 + 4}),
        (
            ("model.activation=gelu", "optimizer.rule=sgd", "optimizer.options.momentum=0"),
            {"q": 2, "s": 0},
        ),
    ],
)
def test_costs_are_those_of_the_formulas(keys: tuple[str, ...], given: dict[str, int]) -> None:
    config, layout = resolve(
        parse([f"{RUN}/config.yaml", *RANKS, "plan.intra_node_gb_s=4", *keys]).config, None, None
    )
    found = Costs.of(Units(config, layout), Speeds.of(config), 1)
    known: dict[str, Any] = dict(zip("qhfegsw", (3, 64, 32, 4, 4, 8, 4), strict=True))
    known |= {"r": 64 * 4, "ep": 4, "etp": 1, "copies": 1, "owners": 1, "link": 4e9, "steps": 5}
    known |= {"flops": 1e12 * 0.6 / config.plan.time_factor, **given}
    for name, text in formulas().items():
        known[name] = eval(text, {}, dict(known))
    assert formulas().keys() == {*ExpertBytes._fields, *found.times._fields, "worth"}
    assert found.sizes == tuple(known[name] for name in ExpertBytes._fields)
    for name in found.times._fields:
        assert getattr(found.times, name) == pytest.approx(known[name], rel=1e-12)
    assert found.worth(5) == pytest.approx(known["worth"], rel=1e-12)


def test_ranks_of_a_node() -> None:
    """Only ranks of ep count, on whole nodes."""
    for keys, node in (
        (("parallel.ranks_per_node=2",), 2),
        (("parallel.ranks_per_node=3",), 4),
        (("parallel.ranks_per_node=8",), 4),
        (("parallel.ranks_per_node=4", "parallel.dp=8", "parallel.etp=2"), 2),
        (
            (
                "experts.dispatch=hierarchical",
                "experts.ranks_per_node=2",
                "parallel.ranks_per_node=4",
            ),
            2,
        ),
    ):
        config, layout = resolve(parse([f"{RUN}/config.yaml", *RANKS, *keys]).config, None, None)
        assert Costs.of(Units(config, layout), Speeds.of(config), 2).node == node, keys


def test_copies_travel_there_and_back_in_each_step() -> None:
    """Owners send weights, and who has a copy sends gradients."""
    found = ExpertMap.even(3, 3, 2).with_replicas([[1, 2], [2], []])
    sent = replica_traffic(found, ExpertBytes(weights=10, gradients=7, states=100))
    assert sent == [RankTraffic(14, 20), RankTraffic(10 + 7, 7 + 10), RankTraffic(20, 14)]
    assert most(sent) == 20


def test_owners_that_change_take_all_that_belongs_to_them() -> None:
    before, after = ExpertMap((0, 0, 1, 1), ((), ())), ExpertMap((1, 0, 1, 0), ((), ()))
    sent = migration(before, after, ExpertBytes(weights=10, gradients=7, states=100))
    assert sent == [RankTraffic(110, 110), RankTraffic(110, 110)]
    assert most(migration(before, before, ExpertBytes(10, 7, 100))) == 0


@pytest.mark.full
def test_the_page_shows_what_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, shown = PAGE.partition("    $ python scripts/experts.py rebalance ")
    command, *lines = shown.partition("\n\n")[0].splitlines()
    monkeypatch.chdir(ROOT)
    assert printed(capsys, *command.split()).splitlines() == [line[4:] for line in lines]


@pytest.mark.full
def test_other_forms(capsys: pytest.CaptureFixture[str]) -> None:
    keys = (RUN, *RANKS, "--layer", "2", "--replica-slots", "1")
    told = json.loads(printed(capsys, *keys, "--json"))
    rows = list(csv.DictReader(io.StringIO(printed(capsys, *keys, "--csv"))))
    assert [each["policy"] for each in told] == ["shadow", "balance", "migrate"]
    assert [float(row["after"]) for row in rows] == [each["after"] for each in told]
    assert all(0 < each["after"] < each["before"] for each in told)
    by_name = {each["policy"]: each for each in told}
    assert by_name["migrate"]["copies"] == by_name["balance"]["moved"] == 0
    assert by_name["balance"]["copies"] <= 4, "one slot on each of four ranks"


def test_a_policy_that_needs_no_speed_is_judged_without(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys may come after options."""
    monkeypatch.setattr("megapipe.layout.speeds.local_device", lambda: None)
    ranks, shorter = RANKS[:2], ("--layer", "2", "--replica-slots", "1", "--json")
    alone = printed(
        capsys,
        RUN,
        "--policy",
        "balance",
        *shorter,
        *ranks,
        "plan.peak_tflops=null",
        "parallel.device=cuda",
    )
    of_all = json.loads(printed(capsys, RUN, ranks[0], *shorter, ranks[1], "plan.peak_tflops=1"))
    assert json.loads(alone) == [each for each in of_all if each["policy"] == "balance"]


@pytest.mark.full
def test_a_pool_is_written_and_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same maps give the same judgement, and one map is worse than four."""
    keys, path = (RUN, *RANKS, "--layer", "1", "--json"), str(tmp_path / "pool.json")
    made, small = printed(capsys, *keys, "-o", path), printed(capsys, *keys, "--pool-size", "1")
    assert printed(capsys, *keys, "--pool", path) == made
    (pool,) = json.loads(Path(path).read_text())["layers"].values()
    assert len(pool) == 4
    after = [json.loads(text)[-1]["after"] for text in (made, small)]
    assert after[0] < after[1]


def test_pools_in_files(tmp_path: Path) -> None:
    begin = {n: ExpertMap.even(4, 2) for n in (1, 10)}
    pools = {1: [ExpertMap((1, 0, 0, 1), ((), ()))], 10: []}
    write_pools(tmp_path / "pool.json", pools)
    assert read_pools(tmp_path / "pool.json", begin) == pools
    assert read_pools(tmp_path / "pool.json", {1: begin[1]}) == {1: pools[1]}


def stored(owners: list[int], copies: list[list[int]]) -> dict[str, Any]:
    return {"owners": owners, "replicas": copies, "slots": 1}


EVEN = [e // 4 for e in range(16)]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["{run}", "parallel.ep=1"], "parallel.ep=1 splits no experts: expected more"),
        (["{run}", "parallel.dp=2", "parallel.etp=2"], "parallel.ep=1 has all experts on each"),
        (["{run}", *RANKS, "--layer", "0"], "--layer 0 has no experts: expected one of 1-2"),
        (
            ["{run}", *RANKS, "--replica-slots", "0"],
            "--replica-slots: '0' is not a whole number from 1 to",
        ),
        (["{run}", *RANKS, "--pool-size", "x"], "--pool-size: 'x' is not a whole number from 1 to"),
        (["{run}", *RANKS, "--pool-size", "2", "--pool", "x"], "--pool: not allowed with argument"),
        (
            ["{run}", *RANKS, "plan.peak_tflops=null", "parallel.device=cuda"],
            "the speed of the device is not known",
        ),
        (
            [
                "{run}",
                *RANKS,
                "plan.peak_tflops=null",
                "parallel.device=cuda",
                "--policy",
                "shadow",
            ],
            "plan.peak_tflops=TFLOP/S",
        ),
        (["{run}", *RANKS, "--policy", "balance", "-o", "x"], "--policy balance has no pool: remo"),
        (["{run}", *RANKS, "--policy", "best"], "--policy: invalid choice: 'best'"),
        (
            ["{run}", *RANKS, "model.moe.num_experts=8"],
            "log.jsonl: layer 1 has 16 experts: expected 8",
        ),
        (["{run}", *RANKS, "model.layers=4"], "0 steps with the choices of layer 3: expected 2"),
        (["{one}", *RANKS], "log.jsonl: 1 step with the choices of layer 1: expected 2 or more"),
        (["no/such", *RANKS], "no/such/config.yaml: no such file"),
        (["{run}", *RANKS, "-o", "/nowhere/x.json"], "/nowhere/x.json: cannot be written: No such"),
        (["{run}", *RANKS, "--pool", "no.json"], "no.json: No such file or directory"),
        (
            ["{run}", *RANKS, "--pool", "{cut}"],
            "cut.json: expected a pool as experts.py rebalance -o",
        ),
        (
            ["{run}", *RANKS, "--pool", "{list}"],
            "list.json: expected a pool as experts.py rebalance",
        ),
        (
            ["{run}", *RANKS, "--pool", "{half}"],
            "maps are missing for layers 2: expected one list per layer 1-2",
        ),
        (["{run}", *RANKS, "--pool", "{wrong}"], 'layer 1: expected {{"owners": [..], "replicas"'),
        (["{run}", *RANKS, "--pool", "{small}"], "map of 2 experts over 2 ranks: expected 16 over"),
        (
            ["{run}", *RANKS, "--pool", "{copied}"],
            "layer 1: a map with replicas: expected only owners",
        ),
        (["{run}", *RANKS, "--pool", "{uneven}"], "layer 1: rank 0 owns 5 experts: expected 4, as"),
    ],
)
def test_bad_input(
    argv: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megapipe.layout.speeds.local_device", lambda: None)
    first = {"1": [stored(EVEN, [[]] * 4)]}
    texts = {
        "cut": '{"layers": ',
        "list": "[1]",
        "half": json.dumps({"layers": first}),
        "wrong": json.dumps({"layers": {"1": [3], "2": []}}),
        "small": json.dumps({"layers": {"1": [stored([0, 1], [[], []])], "2": []}}),
        "copied": json.dumps({"layers": {"1": [stored(EVEN, [[15], [], [], []])], "2": []}}),
        "uneven": json.dumps({"layers": {"1": [stored([0, *EVEN[:-1]], [[]] * 4)], "2": []}}),
    }
    places = {"run": RUN, "one": str(tmp_path)}
    for name, text in texts.items():
        path = tmp_path / f"{name}.json"
        path.write_text(text)
        places[name] = str(path)
    (tmp_path / "config.yaml").write_text(Path(RUN, "config.yaml").read_text())
    step = Path(RUN, "log.jsonl").read_text().splitlines()[0]
    (tmp_path / "log.jsonl").write_text(step + "\n")
    assert main(["rebalance", *(word.format(**places) for word in argv)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert words.format(**places) in said
