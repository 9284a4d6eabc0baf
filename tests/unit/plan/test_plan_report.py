"""The printed plan."""

import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.experts.map import ExpertMap
from megapipe.experts.pool_file import write_pools
from megapipe.layers.moe.specs import Routing, most_imbalance
from megapipe.layout.layout import Layout
from megapipe.layout.moe.checks import check_imbalance
from megapipe.layout.resolve import resolve
from megapipe.model.gpt.flops import layer_flops
from megapipe.plan.activation_memory import peak_activations
from megapipe.plan.commands import main as context_command
from megapipe.plan.figures import plan_figures
from megapipe.plan.json_report import as_json
from megapipe.plan.measurements import BY_UNITS
from megapipe.plan.memory import model_memory
from megapipe.plan.memory_fit import DEVICE_PARTS, HOST_PARTS, milliseconds, size_text
from megapipe.plan.report import held_by_process, report
from megapipe.plan.traffic import by_axis, step_traffic
from megapipe.plan.unit import Operation
from megapipe.plan.units import Units
from megapipe.schedule.channels import channels
from megapipe.schedule.commands import main as schedule_command
from megapipe.schedule.generators import build
from megapipe.schedule.ir import Kind
from megapipe.schedule.render import text as draw
from megapipe.schedule.timing.simulate import simulate
from tests.parity.families import count, token_flops

UNEVEN = (
    "model.layers=14",
    "model.tied_embeddings=false",
    "parallel.pp=2",
    "parallel.tp=2",
    "pipeline.chunks=2",
    "pipeline.schedule=interleaved_1f1b",
    "pipeline.stage_layout=[3, 4, 4, 3]",
)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megapipe.layout.speeds.local_device", lambda: None)


def plan(*overrides: str) -> tuple[Config, Layout, str]:
    config, layout = resolve(parse(list(overrides)).config, None, None, measure=BY_UNITS)
    return config, layout, report(config, layout)


def drawing(config: Config, layout: Layout) -> str:
    """Draw the schedule by the FLOPs of what its stages run; 1 is a layer's forward."""
    kinds: tuple[Operation, ...] = "F", "I", "W"
    unit = layer_flops(config.model, config.train.sequence_length) / layout.tp
    tokens, units = config.train.microbatch * layout.local_length, Units(config, layout)
    F, I, W = (  # noqa: E741
        tuple(
            sum(each.flops(kind) for each in units.of(stage)) / tokens / unit
            for stage in range(layout.stages)
        )
        for kind in kinds
    )
    return draw(simulate(layout.schedule, replace(layout.cost, F=F, I=I, W=W)))


def test_stage_map_adds_up() -> None:
    _, _, text = plan(*UNEVEN)
    assert "layers add up: 3+4+4+3 = 14 of 14" in text
    rows = re.findall(r"^ +(\d) +(\d)  (.*?)  +[\d,]+ +[\d.]+%$", text, re.MULTILINE)
    assert rows == [
        ("0", "0", "embedding, layers 0-2"),
        ("1", "1", "layers 3-6"),
        ("2", "0", "layers 7-10"),
        ("3", "1", "layers 11-13, head"),
    ]
    assert "as a setting: pipeline.stage_layout='E L*3 | L*4 | L*4 | L*3 H'\n" in text


def test_numbers() -> None:
    config, layout, text = plan(
        *UNEVEN, "parallel.dp=2", "train.global_batch=64", "parallel.device=cuda"
    )
    assert "pp 2 x dp 2 x cp 1 x tp 2: 8 processes" in text
    assert f"parameters    {count(config.model):,}\n" in text
    assert "64 samples x 256 = 16,384 tokens, in 8 micro-batches of 4 per replica" in text
    per_token = token_flops(config.model, 256)
    assert f"{per_token * 64 * 256:.4g} FLOPs per step, {per_token:.4g} per token" in text
    assert "2 point-to-point communicators per process" in text
    # 8 micro-batches cross 3 borders twice, on 2 replicas and on both tp ranks
    sent = 8 * 3 * 2 * 2 * 2 * (256 * 4 * config.model.hidden * 4)
    assert f"sent          {sent:,} bytes between all pipeline ranks" in text
    schedule = build("interleaved_1f1b", ranks=2, microbatches=8, chunks=2)
    assert layout.schedule == schedule
    assert drawing(config, layout) in text
    low, high = sorted(held_by_process(config, layout, schedule))
    assert f"{low:,} to {high:,} parameters" in text
    shares = [float(share) for share in re.findall(r"^ +\d .*?([\d.]+)%$", text, re.MULTILINE)]
    assert sum(shares) == pytest.approx(100, abs=0.3)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ((), ": each of 4 tensor-parallel ranks sends 1/4 of a message (pipeline.scatter_gather)"),
        (
            ("parallel.ranks_per_node=16",),
            ": each of 4 tensor-parallel ranks sends the whole message (pipeline.scatter_gather)",
        ),
        (("parallel.sequence_parallel=true",), ""),
        (("parallel.tp=1", "parallel.dp=4"), ""),
    ],
)
def test_the_plan_tells_whether_messages_go_in_shares(keys: tuple[str, ...], told: str) -> None:
    """The speeds of links decide: two nodes have two pipeline ranks each."""
    _, _, text = plan("parallel.tp=4", "parallel.pp=4", "train.global_batch=16", *keys)
    (line,) = re.findall(r"^sent .*", text, re.MULTILINE)
    assert line.partition(" bytes between all pipeline ranks")[2] == told


def test_idle_share_is_that_of_uneven_stages() -> None:
    """Three ranks with 2 layers each wait for the last, which has 3."""
    _, layout, text = plan(
        "model.layers=9",
        "parallel.pp=4",
        "pipeline.stage_layout=[2, 2, 2, 3]",
        "train.global_batch=4000",
        "model.hidden=1280",
        "model.heads=10",
    )
    table = layout.cost.table(4)
    work = [sum(each) for each in zip(table[Kind.F], table[Kind.B], strict=True)]
    mean = sum(work) / 4
    (idle,) = re.findall(r"idle ([\d.]+)% of the makespan", text)
    assert float(idle) == pytest.approx(100 * (1 - mean / max(work)), abs=0.5)
    assert float(idle) > 24
    excess = float(max(work) / mean) - 1
    assert f"balance       busiest rank {excess:.1%}, slowest stage {excess:.1%} above" in text


def test_balance_is_told_against_an_even_split() -> None:
    """10 layers and a head of about one and a half: 3 + 3 + 3 + 1, not 2 + 3 + 2 + 3."""
    _, layout, text = plan("model.layers=10", "parallel.pp=4", "model.vocab_size=3072")
    assert [len(spec.layers) for spec in layout.stage_layers] == [3, 3, 3, 1]
    _, layer, *_, head = layout.model.unit_costs(None)
    mean = (10 * layer + head) / 4
    ours, even = (float(most / mean) - 1 for most in (3 * layer, 3 * layer + head))
    assert (
        f"balance       busiest rank {ours:.1%}, slowest stage {ours:.1%} above the mean; with "
        f"layers split evenly busiest rank {even:.1%}, slowest stage {even:.1%}\n"
    ) in text


def test_memory_and_wire_are_of_the_process_with_most() -> None:
    keys = ("parallel.dp=2", "train.global_batch=64", "model.dtype=bf16")
    config, layout, text = plan(*UNEVEN, *keys)
    most = max(held_by_process(config, layout, layout.schedule))  # no padding: even, and dp is 2
    states = most // 2 * (4 + 4 + 4)
    activations = max(peak_activations(Units(config, layout), rank).device for rank in range(2))
    assert (
        f"at most, per process: parameters {2 * most / 1e6:.3g} MB, gradients {4 * most / 1e6:.3g} "
        f"MB, optimizer state {states / 1e6:.3g} MB, more during a step "
        f"{4 * most // 2 / 1e6:.3g} MB, activations {activations / 1e6:.3g} MB\n"
    ) in text
    by_rank = [by_axis(step_traffic(Units(config, layout), rank)) for rank in range(2)]
    sent = {axis: max(each[axis] for each in by_rank) for axis in ("dp", "pp", "tp")}
    shown = {axis: f"{float(size) / 1e6:.3g} MB" for axis, size in sent.items()}
    line = ", ".join(f"{axis} {size}" for axis, size in shown.items())
    assert f"wire          maximum sent by a process in a step: {line}\n" in text
    # messages of 8 micro-batches at rank 0's 3 borders, one way each
    assert sent["pp"] == 8 * 3 * 256 * 4 * config.model.hidden * 2 + 2 * 13 * 8 // 2


def test_copies_of_the_state_in_host_memory() -> None:
    """One for saves in the background; two in the node's memory, or four where nodes have those of
    others too."""
    given = ("parallel.dp=2", "checkpoint.async_save=true", "checkpoint.in_memory_every=10")
    for per_node, copies in (("2", 2), ("1", 4)):
        config, layout, text = plan(*given, f"parallel.ranks_per_node={per_node}")
        saved = model_memory(config, layout, 0).checkpoint_part
        assert f", checkpoint snapshot in host memory {size_text(saved)}" in text
        assert f", in-memory checkpoints on the node {size_text(copies * saved)}" in text


def test_the_same_figures_as_json() -> None:
    given = ("plan.device=H100", "plan.gpus=16", "parallel.ranks_per_node=8", "model.dtype=bf16")
    host = ("checkpoint.in_memory_every=10", "activations.offload=[mlp_activation]")
    config, layout, text = plan(*UNEVEN, *given, *host, "train.global_batch=64")
    found = json.loads(json.dumps(as_json(plan_figures(config, layout))))
    assert found["mesh"] == {"pp": 2, "dp": 4, "cp": 1, "tp": 2, "ep": 1, "etp": 1}
    assert (found["processes"], found["tokens_per_step"]) == (16, 64 * 256)
    assert f"pp 2 x dp 4 x cp 1 x tp 2: {found['processes']} processes" in text
    assert f"parameters    {found['parameters']['total']:,}\n" in text
    low, high = sorted(found["parameters"]["by_pipeline_rank"])
    assert f"{low:,} to {high:,} parameters" in text
    schedule = found["schedule"], found["microbatches"]
    assert schedule == ("interleaved_1f1b", 4)
    assert f"idle {found['bubble']:.1%} of the makespan" in text

    memory = found["memory"]
    assert (memory["fits"], memory["device_bytes"], memory["margin_bytes"]) == (True, 80e9, 2.4e9)
    ranks = memory["by_pipeline_rank"]
    assert all(each["total"] == sum(each["device"].values()) for each in ranks)
    assert len({each["total"] for each in ranks}) == 2
    most = max(ranks, key=lambda each: each["total"])
    both = (most["device"], DEVICE_PARTS), (most["host"], HOST_PARTS)
    parts = [
        f"{names[part]} {size_text(size)}"
        for sizes, names in both
        for part, size in sizes.items()
        if size
    ]
    assert f"at most, per process: {', '.join(parts)}\n" in text
    assert {"libraries", "activations"} <= {*most["device"]}
    totals = ", ".join(size_text(each["total"]) for each in ranks)
    assert f"total         {size_text(most['total'])} ({totals} by pipeline rank); fits in" in text

    wire = ", ".join(f"{axis} {size_text(size)}" for axis, size in found["wire_bytes"].items())
    assert f"wire          maximum sent by a process in a step: {wire}\n" in text
    time = found["time"]
    assert (
        f"time          {time['seconds']:.3g} s per step, {time['tokens_per_second']:,.0f} tokens "
        f"per second, MFU {time['mfu']:.1%}, {milliseconds(time['update'])} ms for the update\n"
    ) in text
    assert time["exposed_gather"] > 0 < time["exposed_reduce"]
    assumed = found["assumed"]
    assert (assumed["device"], assumed["peak_tflops"]) == ("H100", 989.4)
    assert f"{assumed['intra_node_gb_s']:g} GB/s within nodes of 8" in text
    assert f"{assumed['inter_node_gb_s']:g} GB/s between nodes" in text


def test_what_is_not_known_is_null_in_json() -> None:
    config, layout, _ = plan("parallel.device=cuda")
    found = as_json(plan_figures(config, layout))
    memory = found["memory"]
    assert (memory["fits"], memory["device_bytes"], memory["margin_bytes"]) == (None, None, 0)
    assert (found["time"], found["assumed"]["device"]) == (None, None)
    assert found["wire_bytes"] == {}
    assert found["bubble"] == 0


def test_a_lost_layer_is_not_reported_as_a_plan() -> None:
    config, layout, _ = plan(*UNEVEN)
    stages = list(layout.stage_layers)
    stages[1] = replace(stages[1], layers=range(3, 6))
    with pytest.raises(ConfigError, match="the stages hold layers"):
        report(config, replace(layout, stage_layers=tuple(stages)))


def test_one_layer_stages_and_ends_alone() -> None:
    _, _, text = plan("model.layers=2", "parallel.pp=4", "pipeline.stage_layout=E | L | L | H")
    assert "layers add up: 0+1+1+0 = 2 of 2" in text
    rows = re.findall(r"^ +\d +\d  (.*?)  +[\d,]+ ", text, re.MULTILINE)
    assert rows == ["embedding", "layer 0", "layer 1", "head"]
    assert "2 to 4 point-to-point communicators per process" in text


def test_replicated_stages_are_held_by_several_ranks() -> None:
    config, layout, text = plan(
        "model.layers=4", "parallel.pp=4", "train.global_batch=16", "pipeline.schedule=chimera"
    )
    rows = re.findall(r"^ +(\d) +(\d\+\d)  ", text, re.MULTILINE)
    assert rows == [("0", "0+3"), ("1", "1+2"), ("2", "1+2"), ("3", "0+3")]
    sizes = [count(config.model, spec) for spec in layout.stage_layers]
    hidden = config.model.hidden
    ends = sizes[0] + sizes[3] - 257 * hidden + (384 - 257) * hidden  # tied, once, and padded
    middle = sizes[1] + sizes[2]
    assert held_by_process(config, layout, layout.schedule) == [ends, middle, middle, ends]
    low, high = sorted((ends, middle))
    assert f"{low:,} to {high:,} parameters" in text


@pytest.mark.parametrize(
    ("schedule", "ends", "depth", "messages"),
    [
        ("1f1b", "2", 1, "message"),
        ("chimera_backward_halving", "2", 2, "messages"),
        ("interleaved_1f1b", "2", 1, "message"),
    ],
)
def test_messages_received_ahead(schedule: str, ends: str, depth: int, messages: str) -> None:
    _, layout, text = plan(
        "model.layers=4", "parallel.pp=2", "train.global_batch=16", f"pipeline.schedule={schedule}"
    )
    assert max(channel.depth for channel in channels(layout.schedule)) == depth
    assert (
        f"{ends} point-to-point communicators per process, and 1 for collectives; "
        f"a channel holds at most {depth} received {messages}\n"
    ) in text


def test_the_plan_draws_the_schedule_of_the_layout() -> None:
    config, layout, text = plan(
        *("model.layers=4", "parallel.pp=2", "train.global_batch=8", "pipeline.schedule=seq1f1b"),
        "parallel.device=cuda",
    )
    assert layout.schedule == build("seq1f1b", ranks=2, microbatches=2, slices=2)
    assert f"schedule seq1f1b: {2 * 2 * 2 * 2} operations, proved executable" in text
    assert drawing(config, layout) in text


def test_slices_and_what_they_take() -> None:
    """All but attention is 2 x 12 x 128^2 FLOPs a token, attention 4 x 128 for each position."""
    _, layout, text = plan(
        "pipeline.schedule=seq1f1b", "pipeline.sequence_slices=2", "train.sequence_length=1024"
    )
    first, second = layout.slice_lengths
    assert first + second == 1024
    flops = [2 * 12 * 128**2 * n + 4 * 128 * n * (n + 1) // 2 for n in (first, 1024)]
    share = flops[0] / flops[1]
    line = (
        f"slices        of {first}, {second} tokens, with {share:.1%}, {1 - share:.1%} of a layer"
    )
    assert line in text


def test_in_process() -> None:
    config, layout, text = plan("parallel.pp=2", "pipeline.transport=in_process")
    assert "without communicators" in text
    schedule = build("1f1b", ranks=2, microbatches=layout.microbatches)
    padding = (384 - 257) * config.model.hidden
    assert held_by_process(config, layout, schedule) == [count(config.model) + padding]


def test_what_is_different_in_odd_settings() -> None:
    """Weights within one process exist once, ZeRO-3 keeps a part of them, auto goes on searching,
    and where ranks wait for nothing they are idle for 0.0%."""
    chimera = ("parallel.pp=2", "pipeline.schedule=chimera")
    assert "maximum weights per rank, in 1/2 of the model: 2" in plan(*chimera)[2]
    assert "maximum weights" not in plan(*chimera, "pipeline.transport=in_process")[2]
    zero = ("parallel.dp=2", "optimizer.zero=3", "plan.peak_tflops=1")
    assert (
        "parameters, of which ZeRO-3 keeps 1/2 in memory between uses of a stage\n"
        in plan(*zero)[2]
    )
    assert "between uses" not in plan(*zero[1:])[2]
    assert "schedule zb_h1 (where auto begins): " in plan("pipeline.schedule=auto")[2]
    assert "-0.0%" not in plan("plan.peak_tflops=0.7", "train.global_batch=96")[2]


def test_unknown_vocabulary() -> None:
    config, layout = resolve(parse(["data.tokenizer=some/where"]).config, None, None)
    with pytest.raises(ConfigError, match=r"model\.vocab_size is not known without"):
        report(config, layout)


LONG = (
    "model.layers=6",
    "model.hidden=64",
    "model.heads=8",
    "model.kv_heads=2",
    "model.vocab_size=384",
    "model.positions=rotary",
    "parallel.cp=4",
    "parallel.pp=2",
    "train.sequence_length=8192",
    "train.microbatch=2",
    "train.global_batch=8",
)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            ("context.backward_circulates=keys",),
            "ring of 4, zigzag, the backward circulates keys; scores",
        ),
        (
            ("context.backward_circulates=queries",),
            "ring of 4, zigzag, the backward circulates queries; scores",
        ),
        (("context.algorithm=teams", "context.team_size=2"), "teams of 4, zigzag; scores"),
        (
            ("context.algorithm=all_gather", "context.position_split=striped"),
            "all_gather of 4, striped; scores",
        ),
        (("context.ulysses=2",), "heads over 2 ranks (heads_first); ring of 2, zigzag, the back"),
    ],
)
def test_how_positions_are_split(keys: tuple[str, ...], words: str) -> None:
    """Both memories of scores are told: none, and s^2 / n if scores were stored."""
    text = plan(*LONG, *keys)[2]
    (line,) = re.findall(r"^context +(.*)$", text, re.MULTILINE)
    assert line.startswith("2,048 of 8,192 positions per rank; ")
    assert words in line
    stored = 2 * 8 * 8192**2 // 4 * 4
    told = f"; scores are not stored (they would take {size_text(stored)} per layer)"
    assert line.endswith(told)
    assert "context" not in plan(*LONG[:-3], "parallel.cp=1")[2]


@pytest.mark.parametrize(
    "keys",
    [
        ("context.algorithm=double_ring", "context.inner_ring_size=2", "parallel.ranks_per_node=2"),
        ("context.ulysses=2", "context.position_split=striped", "context.rank_order=context_first"),
        ("context.ulysses=4",),
    ],
)
def test_the_line_of_what_compare_lists(
    keys: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Heading by heading the row of the chosen way; without its time where no device is known."""
    assert context_command(["compare", *LONG, *keys, "plan.device=H100"]) == 0
    table = capsys.readouterr().out.splitlines()
    number = int(re.findall(r"this configuration: number (\d+) of", table[-1])[0])
    headings, cells = (re.split(r" {2,}", table[line].strip()) for line in (0, number))
    listed = {h: cell for h, cell in zip(headings, cells, strict=True) if cell != "-"}
    for device in ("H100", "null"):
        text = plan(*LONG, *keys, "parallel.device=cuda", f"plan.device={device}")[2]
        (line,) = re.findall(r"^attention +of a layer and micro-batch: (.*)$", text, re.MULTILINE)
        known = device != "null"
        of = [f"{h} {cell}" for h, cell in listed.items() if known or h not in ("ms", "exposed")]
        assert line == ", ".join(of) + ("" if known else "; its time is not known")


def test_the_line_of_attention_to_slices() -> None:
    """Compared is what whole sequences take."""
    sliced = plan(*LONG, "pipeline.schedule=seq1f1b", "pipeline.sequence_slices=2")[2]
    assert "\nattention     of a layer and micro-batch without slices: algorithm ring, " in sliced
    assert "\nattention " not in plan(*LONG, "parallel.cp=1")[2]


def test_costs_of_operations_over_long_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    """F 2w + 2a, I 2w + 5a, W 2w per token and layer; schedule.py takes what is printed."""
    text = plan(*LONG, "kernels.loss_chunk_tokens=0")[2]
    weights = 64 * (64 + 2 * 2 * 8 + 64 + 2 * 4 * 64)
    attended, head = 8192 * 64, 2 * 64 * 384
    F, I, W = (  # noqa: E741
        6 * (2 * weights + products * attended) + head for products in (2, 5, 0)
    )
    assert f"F : I : W = 1 : {I / F:.2f} : {W / F:.2f} by FLOPs of kernels" in text
    (costs,) = re.findall(r"\(scripts/schedule.py (--cost \S+)\)", text)
    size = ("--ranks", "4", "--microbatches", "8")
    assert schedule_command(["show", "zb_h1", *size, *costs.split()]) == 0
    assert "idle" in capsys.readouterr().out


EXPERTS = (
    "model.moe.num_experts=8",
    "parallel.dp=4",
    "parallel.ep=4",
    "train.global_batch=64",
    "plan.device_gb=80",
)


def total_of(text: str) -> str:
    return re.findall(r"^total +(.*?);", text, re.MULTILINE)[0]


def test_blocks_that_a_run_compiles_are_planned_uncompiled() -> None:
    line = "\ncompiled      blocks are planned as if uncompiled: a run takes at most this\n"
    assert line in plan("kernels.compile=true")[2]
    assert line not in plan()[2]


def test_rows_of_experts_that_memory_is_for() -> None:
    """Experts are chosen evenly, a rank gets more rows, or a capacity limits them."""
    config, layout, even = plan(*EXPERTS)
    assert "\nrows          planned for evenly loaded experts; --imbalance 1.5 plans for" in even
    more = report(config, layout, Fraction(5, 2))
    assert (
        "\nrows          2.5 times the mean of all ranks, for the experts of one rank; with "
        f"evenly loaded experts {total_of(even)} in total\n"
    ) in more
    by_hand = peak_activations(Units(config, layout), 0, imbalance=Fraction(5, 2)).device
    fewer = peak_activations(Units(config, layout), 0).device
    assert (
        by_hand > fewer == peak_activations(Units(config, layout), 0, imbalance=Fraction(1)).device
    )
    assert f"activations {size_text(by_hand)}" in more
    limited = plan(*EXPERTS, "model.moe.capacity_factor=2")[2]
    assert "\nrows          as many as the capacity of all experts; with evenly loaded" in limited
    assert f"loaded experts {total_of(even)} in total\n" in limited
    assert total_of(limited) != total_of(even)
    for keys in (
        ("experts.pad_to_capacity=true", "model.moe.capacity_factor=2"),
        ("experts.dispatch=fetch",),
    ):
        assert "\nrows " not in plan(*EXPERTS, *keys)[2]
    assert "\nrows " not in plan("parallel.dp=4")[2]


def test_rows_of_a_rank_are_at_most_all_choices() -> None:
    """A token chooses an expert once, so of two choices a rank with one expert gets one."""
    routing = Routing(experts=4, top_k=2)
    assert most_imbalance(routing, ep=2) == 2
    assert most_imbalance(routing, ep=4) == 2


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            ("model.moe.capacity_factor=1.25",),
            "has no effect with model.moe.capacity_factor=1.25, for which mem",
        ),
        (("experts.dispatch=fetch",), "has no effect with experts.dispatch=fetch, where rows stay"),
        (("parallel.ep=1",), "has no effect with parallel.ep=1, where each rank has all experts"),
        (
            ("parallel.ep=2",),
            "with model.moe.top_k=2 and parallel.ep=2 no rank can get more than 2 times",
        ),
        (
            ("model.moe.num_experts=4", "model.moe.top_k=4"),
            "with model.moe.top_k=4 and parallel.ep=4 no rank",
        ),
    ],
)
def test_rows_that_no_rank_gets_are_refused(keys: tuple[str, ...], words: str) -> None:
    config, _, _ = plan(*EXPERTS, *keys)
    with pytest.raises(ConfigError, match=f"^--imbalance 2.5:? {re.escape(words)}"):
        check_imbalance(config, Fraction(5, 2))
    check_imbalance(config, None)
    check_imbalance(plan(*EXPERTS)[0], Fraction(4))


def test_bytes_of_copies_and_of_experts_that_move(tmp_path: Path) -> None:
    """Copies are a part of what travels over ep; experts that move are beside it."""
    wide = ("model.bias=false", "parallel.dp=8", "plan.peak_tflops=1", "optimizer.zero=0")
    keys = (*EXPERTS, *wide)
    config, _, text = plan(*keys, "experts.rebalance=balance", "experts.replica_slots=2")
    layers, of_two = range(config.model.layers), 2 * 2 * 128 * 512
    size = size_text(len(layers) * of_two * 4)
    assert (
        f"\nreplicas      included above: {size} of expert weights and {size} of their "
        "gradients, with all slots full; a change of replicas sends nothing more\n"
    ) in text
    assert "\nowners " not in text
    pool = tmp_path / "pool.json"
    write_pools(pool, {layer: [ExpertMap.even(8, 4)] for layer in layers})
    moving = plan(
        *keys,
        "experts.rebalance=migrate",
        f"experts.rebalance_pool={pool}",
        "experts.rebalance_every=7",
    )[2]
    size = size_text(len(layers) * of_two * 3 * 4)
    line = f"\nowners        in addition, once in 7 steps, if all experts move: ep {size}\n"
    assert line in moving
    assert "\ncopies " not in moving + plan(*keys)[2]
    assert "\nowners " not in plan(*keys)[2]
