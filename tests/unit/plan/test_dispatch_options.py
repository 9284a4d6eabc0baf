"""Ways to exchange rows with experts: their bytes, their times, and the commands that tell them."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.layout.buckets import process_buckets
from megapipe.layout.layout import Layout
from megapipe.layout.moe.dispatch import MOST_CHUNKS
from megapipe.layout.resolve import resolve
from megapipe.layout.speeds import Speeds
from megapipe.plan.measurements import BY_UNITS
from megapipe.plan.memory_fit import demand, milliseconds, size_text
from megapipe.plan.moe.commands import main, simulate
from megapipe.plan.moe.dispatch_options import DispatchCost, costs
from megapipe.plan.moe.dispatch_traffic import (
    SPLIT,
    DispatchTraffic,
    dispatch_traffic,
    experts_sent,
)
from megapipe.plan.moe.moe_layer_time import AssumedCosts, Products
from megapipe.plan.report import report
from megapipe.plan.step_time import exchanged
from megapipe.plan.unit import TWO_HOPS
from megapipe.plan.units import Units
from megapipe.schedule.moe_layer.search import fastest, training_order
from megapipe.schedule.moe_layer.tasks import Step, chunked
from tests.parity.tiers import in_parts

H, F, E, K, ROWS, LENGTH = 64, 32, 64, 2, 2, 128
SMALL = (
    *("model.layers=3", f"model.hidden={H}", "model.heads=4", "model.activation=swiglu"),
    *(
        "model.bias=false",
        "model.dtype=bf16",
        "model.vocab_size=300",
        "model.moe.first_dense_layers=1",
    ),
    *(f"model.moe.num_experts={E}", f"model.moe.top_k={K}", f"model.moe.expert_ffn_hidden={F}"),
    *(f"train.sequence_length={LENGTH}", f"train.microbatch={ROWS}", "train.global_batch=64"),
    *("plan.peak_tflops=0.1", "plan.time_factor=1.2", "parallel.dp=8", "parallel.ep=8"),
    *("plan.intra_node_gb_s=4", "plan.inter_node_gb_s=1", "parallel.ranks_per_node=4"),
    "plan.link_latency_us=0",
)
ONE = ("parallel.dp=1", "parallel.ep=1")
UNKNOWN = ("plan.peak_tflops=null", "parallel.device=cuda")
"""Settings for a GPU of unknown speed."""
TOKENS = ROWS * LENGTH
ROW_BYTES = TOKENS * K * (2 * H * 2 + 4)
"""Bytes of rows, both ways in a pass; each row has a weight in fp32 one way."""
GATHERED = 8 * TOKENS * (2 * H * 2 + K * (4 + 2)) + TOKENS * K * (2 * H * 2 + 4)
"""Both passes: tokens of 8 ranks, in F with their weights and choices, and rows back, in I with the
gradients of weights."""


def given(*keys: str) -> tuple[Config, Layout]:
    return resolve(parse([*SMALL, *keys]).config, None, None, measure=BY_UNITS)


def found(*keys: str, layer: int = 1, **assumed: float) -> list[DispatchCost]:
    config, layout = given(*keys)
    return costs(Units(config, layout), Speeds.of(config), layer, AssumedCosts(**assumed))


def ways_of(*keys: str) -> dict[str, DispatchTraffic]:
    return dispatch_traffic(Units(*given(*keys)), 1)


def of(name: str, *keys: str) -> DispatchTraffic:
    return ways_of(*keys)[name]


def test_bytes_are_those_of_the_formulas() -> None:
    """Two nodes of four ranks: section by section what a rank sends, forward and backward."""
    own = {name: (way.intra_node_bytes, way.inter_node_bytes) for name, way in ways_of().items()}
    assert own["all_to_all"] == (2 * ROW_BYTES * 3 / 8, 2 * ROW_BYTES * 4 / 8)
    assert own["hierarchical"] == (2 * ROW_BYTES * 3 / 4, 2 * ROW_BYTES / 2)
    assert own["all_gather"] == (GATHERED * 3 / 8, GATHERED * 4 / 8)
    matrices = E * 3 * H * F * (2 + 2 + 4)
    assert own["fetch"] == (matrices * 3 / 8, matrices * 4 / 8)


def whole(form: str, *keys: str) -> dict[str, int]:
    """Return the bytes of whole tensors in each operation of a layer, without numbers of rows."""
    unit = Units(*given(*keys)).of_layer(1, form)
    return {what: sum(each.bytes for each in experts_sent(unit, what)) for what in SPLIT}


@pytest.mark.parametrize(
    ("form", "keys", "sent"),
    [
        # 512 rows of 64 values of 2 bytes, there and back, of which each has a weight of 4 bytes
        ("all_to_all", (), {"F": 133_120, "I": 133_120, "W": 0}),
        ("all_to_all", ("model.dtype=fp32",), {"F": 264_192, "I": 264_192, "W": 0}),
        # a byte for each value, and 4 more
        ("all_to_all", ("experts.wire_dtype=int8",), {"F": 71_680, "I": 71_680, "W": 0}),
        # each row goes to both ranks that have a part of its expert
        ("all_to_all", ("parallel.ep=4", "parallel.etp=2"), {"F": 266_240, "I": 266_240, "W": 0}),
        # room for 3 rows of each of 2 sequences at 64 experts, where 4 are the mean
        (
            "all_to_all",
            ("model.moe.capacity_factor=0.75", "experts.pad_to_capacity=true"),
            {"F": 99_840, "I": 99_840},
        ),
        ("all_to_all", ("model.moe.capacity_factor=0.75",), {"F": 99_840, "I": 99_840}),
        # 2,048 tokens with 2 weights and 2 choices of 2 bytes each, and 512 rows back; in I weights
        ("all_gather", (), {"F": 352_256, "I": 329_728, "W": 0}),
        # 64 experts of 3 matrices [32, 64], and in W gradients in fp32
        ("fetch", (), {"F": 786_432, "I": 786_432, "W": 1_572_864}),
        ("fetch", ("lora.rank=4",), {"F": 786_432, "I": 786_432, "W": 0}),
    ],
)
def test_bytes_by_hand(form: str, keys: tuple[str, ...], sent: dict[str, int]) -> None:
    assert whole(form, *keys) == {"W": 0, **sent}


def test_two_hops_send_the_rows_twice() -> None:
    keys = (
        "experts.dispatch=hierarchical",
        "experts.ranks_per_node=2",
        "parallel.ranks_per_node=2",
    )
    unit = Units(*given(*keys)).of_layer(1, "hierarchical", 2)
    by_axis = [
        sum(each.bytes for each in experts_sent(unit, "F") if each.axis == axis)
        for axis in TWO_HOPS
    ]
    assert by_axis == [133_120, 133_120]


@pytest.mark.parametrize(
    ("keys", "rows", "inner"),
    [
        ((), 512, 32),
        (("model.moe.shared_ffn_hidden=32", "model.moe.shared_gate=sigmoid"), 512, 32),
        (("parallel.ep=4", "parallel.etp=2"), 1024, 16),
        (("parallel.tp=2", "parallel.dp=4", "parallel.sequence_parallel=true"), 256, 32),
        (("experts.rebalance=balance", "experts.replica_slots=1"), 512, 32),
        (("model.moe.capacity_factor=0.75", "experts.pad_to_capacity=true"), 384, 32),
        (("parallel.device=cuda",), 512, 32),
    ],
)
def test_products_are_those_of_experts(keys: tuple[str, ...], rows: int, inner: int) -> None:
    """An equally wide dense MLP is not counted. A row has three matrices [inner, 64]."""
    found = Products.of(Units(*given(*keys)), 1)
    assert sum(kernel.flops for kernel in found.kernels) == rows * 2 * 3 * 64 * inner
    assert (found.rows, found.bytes) == (rows, rows * 64 * 2)


def test_all_gather_is_less_where_choices_are_more_than_ranks() -> None:
    """It is but for the 4 bytes of a weight."""
    for ep, fewer in ((2, True), (8, False)):
        keys = (f"parallel.ep={ep}", "model.moe.top_k=4", "parallel.ranks_per_node=8")
        assert (
            of("all_gather", *keys).intra_node_bytes < of("all_to_all", *keys).intra_node_bytes
        ) == fewer


def test_a_codec_is_for_ways_of_rows() -> None:
    keys = ("model.dtype=fp32", "experts.wire_dtype=int8")
    plain, coded = ways_of(keys[0]), ways_of(*keys)
    assert coded.keys() == plain.keys() - {"fetch"}
    for name, way in coded.items():
        assert way.inter_node_bytes < plain[name].inter_node_bytes / 3


@pytest.mark.parametrize(("sequences", "fewer"), [(1, False), (8, False), (16, True), (64, True)])
def test_fetching_is_less_from_a_number_of_tokens_on(sequences: int, fewer: bool) -> None:
    """Janus: a micro-batch's forward sends 2 T k h values of rows, or E q h f of experts, which are
    fewer from 12 sequences on. In bytes a row is 4 longer."""
    keys = (f"train.microbatch={sequences}", f"train.global_batch={8 * sequences}")
    sent = {
        name: sum(hop.bytes for half in way.trips["F"] for hop in half)
        for name, way in ways_of(*keys, "parallel.ranks_per_node=8").items()
    }
    assert (sent["fetch"] < sent["all_to_all"]) == fewer
    assert (2 * sequences * LENGTH * K * H > E * 3 * H * F) == fewer


def test_ranks_of_a_group_on_other_nodes() -> None:
    """Rank 3 is on the first node of four, ranks 4 and 5 are not: all it sends leaves the node."""
    keys = ("parallel.dp=6", "parallel.ep=3", "model.moe.num_experts=48", "train.global_batch=36")
    own = ways_of(*keys, "train.microbatch=3")
    assert (own["all_to_all"].intra_node_bytes, own["all_to_all"].inter_node_bytes) == (
        0,
        2 * ROW_BYTES,
    )
    assert "hierarchical" not in own
    on_one = ways_of("parallel.ranks_per_node=8")
    assert on_one["all_to_all"].inter_node_bytes == 0
    assert "hierarchical" not in on_one


@pytest.mark.parametrize(
    "keys",
    [
        ("parallel.dp=4", "parallel.tp=2", "parallel.sequence_parallel=true"),
        ("parallel.dp=4", "parallel.cp=2"),
    ],
)
def test_ranks_with_parts_of_a_sequence_send_their_tokens(keys: tuple[str, ...]) -> None:
    assert of("all_to_all", *keys).inter_node_bytes == ROW_BYTES / 2
    assert of("all_gather", *keys).inter_node_bytes == GATHERED / 2 * 4 / 8


def steps_of(name: str, latency_us: float) -> list[Step]:
    """Return the steps of a pass at the speeds of `SMALL`, by their formulas."""
    latency = latency_us / 1e6
    half = ROW_BYTES / 2
    flops = 2 * TOKENS * K * 3 * H * F
    hops: list[Any] = [("network", half * 7 / 8 / 1e9)]
    if name == "hierarchical":
        hops = [("node", half * 3 / 4 / 4e9), ("network", half / 2 / 1e9)]
    steps = [Step("dispatch", link, seconds, latency) for link, seconds in hops]
    steps.append(Step("experts", "compute", flops / 0.05e12))
    return steps + [Step("combine", link, seconds, latency) for link, seconds in hops[::-1]]


@in_parts("name", ["all_to_all", "hierarchical"], default=["hierarchical"], full=1)
def test_the_number_of_chunks_is_the_best_of_the_simulation(name: str) -> None:
    """PipeMoE: it is the argmin over 1 to 8, which an exchange's latency makes smaller."""
    chosen = []
    for latency in (1e-6, 1e-5, 1e-3):
        steps = steps_of(name, 1e6 * latency)
        each = [2 * fastest(chunked(steps, n)).seconds for n in range(1, MOST_CHUNKS + 1)]
        best = next(cost for cost in found(latency=latency) if cost.dispatch == name)
        assert best.both == pytest.approx(min(each), rel=1e-9)
        assert best.chunks == 1 + each.index(min(each))
        chosen.append(best.chunks)
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] > chosen[1] > chosen[2] == 1


def simulated(*keys: str) -> list[float]:
    """Return the seconds of both passes of all layers, in 1 to 8 chunks, by the steps of the test:
    at the speeds of the configuration, in training's order."""
    config, layout = given(*keys)
    found = []
    for chunks in range(1, MOST_CHUNKS + 1):
        passes = [
            training_order(
                chunked(steps_of(config.experts.dispatch, config.plan.link_latency_us), chunks)
            )
            for _ in layout.model.experts()
            for _ in "FI"
        ]
        found.append(sum(timed.seconds for timed in passes))
    return found


@pytest.mark.parametrize("name", ["all_to_all", "hierarchical"])
def test_auto_is_the_argmin(name: str) -> None:
    """A brute force over the simulator finds the same at any latency. There are no more chunks than
    experts on a rank."""
    chosen = []
    for latency in (0, 1, 3, 10, 30, 1000):
        keys = (f"experts.dispatch={name}", f"plan.link_latency_us={latency}")
        seconds = simulated(*keys)
        config, _ = given(*keys, "experts.overlap_chunks=auto")
        chosen.append(config.experts.overlap_chunks)
        assert chosen[-1] == 1 + seconds.index(min(seconds))
        assert config.experts.number_of_chunks == chosen[-1]
        assert resolve(config, None, None)[0] == config
    assert chosen == sorted(chosen, reverse=True)
    assert len(set(chosen)) > 2
    for experts, most in ((32, 4), ("[16,32]", 2)):
        keys = (
            f"model.moe.num_experts={experts}",
            "plan.link_latency_us=0",
            "experts.overlap_chunks=auto",
        )
        assert given(*keys)[0].experts.overlap_chunks == most


def test_what_auto_has_chosen_is_told() -> None:
    config, layout = given("experts.overlap_chunks=auto", "plan.link_latency_us=3")
    chunks = config.experts.overlap_chunks
    by = f"experts over ep 8 of a pipeline rank by all_to_all in {chunks} chunks\n"
    assert config.experts.number_of_chunks > 1
    assert by in report(config, layout)
    assert "of a pipeline rank by fetch\n" in report(*given("experts.dispatch=fetch"))


def test_where_no_experts_travel_auto_is_one_chunk() -> None:
    for keys in (ONE, (*ONE, "model.moe.num_experts=null", "model.moe.first_dense_layers=0")):
        dense = "model.moe.num_experts=null" in keys
        given_ = [key for key in SMALL if not (dense and key.startswith("model.moe."))]
        config, _ = resolve(
            parse([*given_, *keys, "experts.overlap_chunks=auto"]).config, None, None
        )
        assert config.experts.overlap_chunks == 1


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            UNKNOWN,
            (
                "experts.overlap_chunks=auto needs the speed of the device, which is not "
                "known: set plan.de"
            ),
        ),
        (
            ("model.moe.num_experts=60",),
            "model.moe.num_experts=60 is not divisible by parallel.ep=8",
        ),
        (("experts.dispatch=hierarchical", "experts.ranks_per_node=16"), "all in one node"),
    ],
)
def test_auto_without_sizes_or_speeds_is_refused(
    keys: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megapipe.layout.speeds.local_device", lambda: None)
    with pytest.raises(ConfigError) as caught:
        given(*keys, "experts.overlap_chunks=auto")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_ways_are_there_the_fastest_first() -> None:
    rows = found()
    assert [cost.both for cost in rows] == sorted(cost.both for cost in rows)
    there = {(cost.dispatch, cost.chunks) for cost in rows}
    names = ("all_to_all", "hierarchical", "all_gather", "fetch")
    assert there == {(name, chunks) for name in names for chunks in range(1, 9)}
    assert {cost.chunks for cost in found("model.moe.num_experts=16")} == {1, 2}, (
        "experts of a rank"
    )
    for cost in rows:
        assert (cost.order is None) == (cost.chunks == 1)
        computed = {what: cost.seconds[what] - cost.exposed[what] for what in cost.seconds}
        assert computed["F"] == pytest.approx(2 * TOKENS * K * 3 * H * F / 0.05e12)
        assert computed["I"] == pytest.approx(computed["F"])


def test_rows_that_are_put_in_order_take_time() -> None:
    """Rows are permuted before they leave and when they have come; with gathered tokens or fetched
    experts, once."""
    keys = ("parallel.ranks_per_node=8",)
    free, paid = (
        {cost.dispatch: cost.seconds["F"] for cost in costs_ if cost.chunks == 1}
        for costs_ in (found(*keys), found(*keys, copy_gb_s=8.0))
    )
    for name, times in (("all_to_all", 2), ("all_gather", 1), ("fetch", 1)):
        seconds = times * 2 * TOKENS * K * H * 2 / 8e9
        assert paid[name] - free[name] == pytest.approx(seconds)


def test_reductions_in_pieces_are_waited_for_less() -> None:
    """Lina, in a layer: the wait is one piece at most, and longer for a whole bucket."""
    waits = {}
    for mib in ("null", "0.05"):
        keys = (f"optimizer.bucket_mib={mib}", "optimizer.zero=1")
        config, layout = given(*keys)
        pieces = [
            exchanged(config, layout, bucket)[0]
            for bucket in process_buckets(config, layout, 0)
            if not bucket.over_ep and bucket.stage == 0
        ]
        assert (len(pieces) > 1) == (mib != "null")
        waits[mib] = max(cost.wait for cost in found(*keys))
        assert 0 < waits[mib] <= max(pieces)
    assert waits["0.05"] < waits["null"] / 2
    assert {cost.wait for cost in found("parallel.ranks_per_node=8")} != {0.0}


def test_experts_of_another_stage_of_the_rank_are_waited_for_as_one_piece() -> None:
    """Their gradients are not cut. Owners without replicas reduce nothing; with replicas, gradients
    are reduced at the end of a step."""
    keys = ("model.layers=4", "parallel.pp=2", "parallel.ep=4", "parallel.ranks_per_node=2")
    keys = (*keys, "optimizer.bucket_mib=0.05", "optimizer.zero=1")
    turns = ("pipeline.schedule=interleaved_1f1b", "pipeline.chunks=2")

    def longest(*more: str) -> tuple[float, float, float]:
        """Return the last layer's longest wait, and its rank's longest dense and expert pieces."""
        config, layout = given(*keys, *more)
        pieces: dict[bool, list[float]] = {False: [], True: []}
        for bucket in process_buckets(config, layout, 1):
            pieces[bucket.over_ep].append(exchanged(config, layout, bucket)[0])
        wait = max(cost.wait for cost in found(*keys, *more, layer=3))
        return wait, max(pieces[False]), max(pieces[True])

    wait, dense, of_experts = longest(*turns)
    assert dense < wait <= of_experts
    copies = ("experts.rebalance=balance", "experts.replica_slots=1")
    for others in ((), (*turns, "parallel.ep=8"), (*turns, *copies)):
        wait, dense, _ = longest(*others)
        assert 0 < wait <= dense


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 0
    return capsys.readouterr().out


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "simulate", *SMALL, "--rows", "5").splitlines()
    assert lines[0] == "layer 1: 2 of 64 experts over 8 ranks, per micro-batch of 2 x 128 tokens"
    assert lines[1].split()[:3] == ["dispatch", "chunks", "order"]
    assert len(lines) == 10
    assert lines[7].startswith("... 5 of ")
    whole = printed(capsys, "simulate", *SMALL, "--rows", "500", "--layer", "2").splitlines()
    assert whole[0].startswith("layer 2: ")
    assert any(line.startswith("hierarchical") for line in whole)
    assert not any(line.startswith("...") for line in whole)


def test_what_a_run_does_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """The fastest of it, which can be configured, and the place of the configured one."""
    rows = [cost for cost in found() if cost.order in (None, "any", "in_turns")]
    assert len(rows) == 4 * MOST_CHUNKS
    best = f"experts.dispatch={rows[0].dispatch} experts.overlap_chunks={rows[0].chunks}"
    place = 1 + [(cost.dispatch, cost.chunks) for cost in rows].index(("fetch", 3))
    for keys, said in (
        (("experts.dispatch=fetch", "experts.overlap_chunks=3"), f"number {place} of {len(rows)}"),
        (best.split(), f"number 1 of {len(rows)}"),
    ):
        last = printed(capsys, "simulate", *SMALL, *keys).splitlines()[-1]
        assert last == f"fastest in training: {best}; this configuration: {said}"
    other = (
        "experts.dispatch=hierarchical",
        "experts.ranks_per_node=2",
        "parallel.ranks_per_node=8",
    )
    assert ": number " in printed(capsys, "simulate", *SMALL, *other)


def test_the_page_shows_what_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[3]
    page = (root / "docs/moe.md").read_text()
    _, _, shown = page.partition("    $ python scripts/experts.py ")
    command, *lines = shown.partition("\n\n- ")[0].splitlines()
    monkeypatch.chdir(root)
    assert printed(capsys, *command.split()).splitlines() == [line[4:] for line in lines]


def test_the_example_of_the_help_can_be_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be run anywhere. `show` and `plan` need a run (tests/dist/test_quickstart_moe.py)."""
    monkeypatch.setattr("megapipe.layout.speeds.local_device", lambda: None)
    monkeypatch.chdir(Path(__file__).parents[3])
    (example,) = re.findall(r"^example: experts\.py (.*)$", simulate.__doc__ or "", re.MULTILINE)
    assert "layer 0: 2 of 8 experts" in printed(capsys, *example.split())
    assert main(["simulate", "configs/quickstart_moe.yaml", "parallel.device=cuda"]) == 2
    assert "set plan.device (as in H100) or plan.peak_tflops=TFLOP/S" in capsys.readouterr().err
    printed(
        capsys, "simulate", "configs/quickstart_moe.yaml", "--rows", "1", "plan.peak_tflops=0.1"
    )


def rows_of_the_page() -> list[list[str]]:
    """Return the cells of the table by which the page has one choose."""
    page = (Path(__file__).parents[3] / "docs/moe.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## Choosing ep, etp, dispatch and chunks\n")
    lines = re.findall(
        r"^\| (`(?:qwen3|mixtral).*) \|$", section.partition("\n## ")[0], re.MULTILINE
    )
    return [line.split(" | ") for line in lines]


NAMES = {"qwen3": "configs/qwen3_30b_a3b.yaml", "mixtral": "configs/mixtral_8x7b.yaml"}


@in_parts("row", rows_of_the_page(), default=3, full=1, ids=lambda row: row[0])
def test_choices_of_the_page_rest_on_what_is_printed(
    row: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    name, *keys = row[0].strip("`").split()
    given = [NAMES[name], *(key for key in keys if "=" in key)]
    latency = keys[-1] if "--latency-us" in keys else "20"
    told = json.loads(printed(capsys, "simulate", *given, "--latency-us", latency, "--json"))
    rows = [each for each in told if each["order"] in (None, "any", "in_turns")]

    def ms(of: dict[str, Any]) -> str:
        return f"{milliseconds(of['seconds_F'] + of['seconds_I'])} ms"

    whole = next(each for each in rows if (each["dispatch"], each["chunks"]) == ("all_to_all", 1))
    best = min(rows, key=lambda each: each["seconds_F"] + each["seconds_I"])
    config, layout = resolve(parse(given).config, None, None)
    assert row[1:] == [
        size_text(max(demand(Units(config, layout)).totals)),
        f"{size_text(whole['within'])}, {size_text(whole['between'])}",
        ms(whole),
        f"`{best['dispatch']}` in {best['chunks']}: {ms(best)}",
    ]


def test_the_page_has_rows_to_choose_by() -> None:
    assert len(rows_of_the_page()) == 9


def test_other_forms(capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(printed(capsys, "simulate", *SMALL, "--latency-us", "10", "--json"))
    text = printed(capsys, "simulate", *SMALL, "--latency-us", "10", "--csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["dispatch"] for row in rows] == [row["dispatch"] for row in told]
    assert float(rows[0]["seconds_F"]) == told[0]["seconds_F"]
    assert [row["chunks"] for row in told] == [c.chunks for c in found(latency=1e-5)]


def log(folder: Path, *records: dict[str, Any]) -> str:
    """Write a run folder with a log of these records."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(record) + "\n" for record in records]
    (folder / "log.jsonl").write_text("".join(lines))
    return str(folder)


def step(number: int, **counts: list[int]) -> dict[str, Any]:
    own = {layer.removeprefix("l"): each for layer, each in counts.items()}
    return {"kind": "step", "step": number, "routing": {"aux_loss": 1.0, "counts": own}}


RECORDS = (
    step(2, l1=[4, 4, 4, 4], l10=[1, 1]),
    {"kind": "note", "text": 'not "counts"'},
    {"kind": "step", "step": 3, "routing": {"aux_loss": 1.0, "counts": None}},
    step(4, l1=[16, 0, 0, 0], l10=[1, 1]),
    step(4, l1=[0, 1, 5, 10], l10=[3, 1]),
)


def test_a_heat_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It shows the last step as it was repeated, another step, or a layer through the run. A layer
    with fewer experts has its bars closer together: between them a blank is an expert."""
    folder = log(tmp_path / "run", RECORDS[0], *RECORDS[2:])
    assert printed(capsys, "show", folder).splitlines() == [
        "step 4: choices of each expert, relative to the mean of its layer",
        " layer 1 | :*@| largest 2.50, 1 without",
        "layer 10 |#-|   largest 1.50, 0 without",
    ]
    assert " layer 1 |++++|" in printed(capsys, "show", folder, "--step", "2")
    assert printed(capsys, "show", folder, "--layer", "10").splitlines() == [
        "layer 10: choices of each expert, relative to their mean",
        "step 2 |++| largest 1.00, 0 without",
        "step 4 |#-| largest 1.50, 0 without",
    ]
    out = tmp_path / "map.svg"
    assert printed(capsys, "show", folder, "-o", str(out)) == ""
    assert out.read_text().startswith("<svg")
    assert ">largest 2.50, 1 without</text>" in out.read_text()
    assert out.read_text().count("<rect") == 1 + 4 + 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["simulate", "parallel.dp=8"],
            "no MoE layer: expected model.moe.num_experts of 2 or",
        ),
        (["simulate", *SMALL, "parallel.ep=1"], "parallel.ep=1 splits no experts: ep could be 1,"),
        (["simulate", *SMALL, *ONE], "parallel.ep=1 splits no experts: expected more, over"),
        (["simulate", *SMALL, "parallel.ep=3"], "parallel.ep=3 does not divide dp 8"),
        (["simulate", *SMALL, "--layer", "0"], "--layer 0 has no experts: expected one of 1-2"),
        (["simulate", *SMALL, "--layer", "x"], "--layer: 'x' is not a whole number from 0 to"),
        (["simulate", *SMALL, "--latency-us", "-1"], "'-1' is not a number >= 0"),
        (["simulate", *SMALL, "--permute-gb-s", "fast"], "'fast' is not a number >= 0"),
        (["simulate", *SMALL, "--rows", "0"], "--rows: '0' is not a whole number from 1 to"),
        (["simulate", *SMALL, *UNKNOWN], "the speed of the device is not known"),
        (["simulate", "dance"], "dance: no such file"),
        (
            ["show", "no/such/run"],
            "no/such/run/log.jsonl: No such file or directory; expected the folder",
        ),
        (["show", "{run}", "--step", "3"], "--step 3: {run}/log.jsonl has the choices of steps 2"),
        (["show", "{run}", "--layer", "2"], "--layer 2 has no experts: expected one of 1, 10"),
        (
            ["show", "{run}", "--layer", "1", "--step", "2"],
            "--step cannot be combined with --layer",
        ),
        (["show", "{run}", "-o", "/nowhere/x.svg"], "/nowhere/x.svg: cannot be written: No such"),
        (["show", "{dense}"], "{dense}/log.jsonl has no choices of experts"),
        (["show", "{cut}"], "{cut}/log.jsonl: line 1: expected a step as a run logs it"),
        (["show", "{odd}"], "{odd}/log.jsonl: line 1: expected choices of the experts of each"),
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
    places = {
        "run": log(tmp_path / "run", RECORDS[0], *RECORDS[2:]),
        "dense": log(tmp_path / "dense", {"kind": "step", "step": 1, "routing": None}),
        "cut": log(tmp_path / "cut", {"kind": "step", "routing": {"counts": [1]}}),
        "odd": log(tmp_path / "odd", step(1, l0=[0, 0])),
    }
    assert main([word.format(**places) for word in argv]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert words.format(**places) in said
