"""The printed plan."""

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
from megapipe.plan.demand import size_text
from megapipe.plan.measurements import BY_UNITS
from megapipe.plan.memory import model_memory
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
    "pipeline.layout=[3, 4, 4, 3]",
)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megapipe.layout.speeds.local_device", lambda: None)


def plan(*overrides: str) -> tuple[Config, Layout, str]:
    config, layout = resolve(parse(list(overrides)).config, None, None, measure=BY_UNITS)
    return config, layout, report(config, layout)


def drawing(config: Config, layout: Layout) -> str:
    """The schedule at the FLOPs of what its stages run; 1 is a layer's forward."""
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
    assert "the same stages: pipeline.layout='E L*3 | L*4 | L*4 | L*3 H'\n" in text


def test_numbers() -> None:
    config, layout, text = plan(*UNEVEN, "parallel.dp=2", "train.global_batch=64")
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
        ((), ": 1/4 by each of 4 tensor-parallel ranks (pipeline.scatter_gather)"),
        (
            ("parallel.per_node=16",),
            ": the same by each of 4 tensor-parallel ranks (pipeline.scatter_gather)",
        ),
        (("parallel.sequence_parallel=true",), ""),
        (("parallel.tp=1", "parallel.dp=4"), ""),
    ],
)
def test_the_plan_tells_whether_messages_go_in_shares(keys: tuple[str, ...], told: str) -> None:
    """As it is chosen by the speeds of links: two nodes, each with two pipeline ranks."""
    _, _, text = plan("parallel.tp=4", "parallel.pp=4", "train.global_batch=16", *keys)
    (line,) = re.findall(r"^sent .*", text, re.MULTILINE)
    assert line.partition(" bytes between all pipeline ranks")[2] == told


def test_idle_share_is_that_of_uneven_stages() -> None:
    """Three ranks with 2 layers each wait for the last, which has 3."""
    _, layout, text = plan(
        "model.layers=9",
        "parallel.pp=4",
        "pipeline.layout=[2, 2, 2, 3]",
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
    assert f"wire          sent at most, per process and step: {line}\n" in text
    # messages of 8 micro-batches at rank 0's 3 borders, one way each
    assert sent["pp"] == 8 * 3 * 256 * 4 * config.model.hidden * 2 + 2 * 13 * 8 // 2


def test_copies_of_the_state_in_host_memory() -> None:
    """One for saves in the background; two in the node's memory, or four where nodes have those of
    others too."""
    given = ("parallel.dp=2", "checkpoint.background=true", "checkpoint.memory_every=10")
    for per_node, copies in (("2", 2), ("1", 4)):
        config, layout, text = plan(*given, f"parallel.per_node={per_node}")
        saved = model_memory(config, layout, 0).checkpoint_part
        assert f", copy of a checkpoint in host memory {size_text(saved)}" in text
        assert f", copies of checkpoints in the node's memory {size_text(copies * saved)}" in text


def test_a_lost_layer_is_not_reported_as_a_plan() -> None:
    config, layout, _ = plan(*UNEVEN)
    stages = list(layout.stage_layers)
    stages[1] = replace(stages[1], layers=range(3, 6))
    with pytest.raises(ConfigError, match="the stages hold layers"):
        report(config, replace(layout, stage_layers=tuple(stages)))


def test_one_layer_stages_and_ends_alone() -> None:
    _, _, text = plan("model.layers=2", "parallel.pp=4", "pipeline.layout=E | L | L | H")
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
    ("schedule", "ends", "depth"),
    [("1f1b", "2", 1), ("chimera_backward_halving", "2", 2), ("interleaved_1f1b", "2", 1)],
)
def test_messages_received_ahead(schedule: str, ends: str, depth: int) -> None:
    _, layout, text = plan(
        "model.layers=4", "parallel.pp=2", "train.global_batch=16", f"pipeline.schedule={schedule}"
    )
    assert max(channel.depth for channel in channels(layout.schedule)) == depth
    assert (
        f"{ends} point-to-point communicators per process, besides 1 for collectives; "
        f"at most {depth} messages received ahead in one"
    ) in text


def test_the_plan_draws_the_schedule_of_the_layout() -> None:
    config, layout, text = plan(
        "model.layers=4", "parallel.pp=2", "train.global_batch=8", "pipeline.schedule=seq1f1b"
    )
    assert layout.schedule == build("seq1f1b", ranks=2, microbatches=2, slices=2)
    assert f"schedule seq1f1b: {2 * 2 * 2 * 2} operations, proved executable" in text
    assert drawing(config, layout) in text


def test_slices_and_what_they_take() -> None:
    """All but attention is 2 x 12 x 128^2 FLOPs a token, attention 4 x 128 for each position."""
    _, layout, text = plan(
        "pipeline.schedule=seq1f1b", "pipeline.slices=2", "train.sequence_length=1024"
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
    config, layout, text = plan("parallel.pp=2", "pipeline.channels=in_process")
    assert "no communicators" in text
    schedule = build("1f1b", ranks=2, microbatches=layout.microbatches)
    padding = (384 - 257) * config.model.hidden
    assert held_by_process(config, layout, schedule) == [count(config.model) + padding]


def test_what_is_different_in_odd_settings() -> None:
    """Weights within one process exist once, ZeRO-3 keeps a part of them, auto goes on searching,
    and where ranks wait for nothing they are idle for 0.0%."""
    chimera = ("parallel.pp=2", "pipeline.schedule=chimera")
    assert "weights held 2 times" in plan(*chimera)[2]
    assert "weights held" not in plan(*chimera, "pipeline.channels=in_process")[2]
    zero = ("parallel.dp=2", "optimizer.zero=3", "log.peak_tflops=1")
    assert "parameters, of which it keeps 1/2 of each stage between uses\n" in plan(*zero)[2]
    assert "of each stage between uses" not in plan(*zero[1:])[2]
    assert "schedule zb_h1, with which auto begins: " in plan("pipeline.schedule=auto")[2]
    assert "-0.0%" not in plan("log.peak_tflops=0.7", "train.global_batch=96")[2]


def test_unknown_vocabulary() -> None:
    config, layout = resolve(parse(["data.tokenizer=some/where"]).config, None, None)
    with pytest.raises(ConfigError, match=r"model\.vocab_size: not known without"):
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
        (("context.travels=keys",), "ring of 4, zigzag, keys travel back; stored"),
        (("context.travels=queries",), "ring of 4, zigzag, queries travel back; stored"),
        (("context.plan=teams", "context.team=2"), "teams of 4, zigzag; stored"),
        (("context.plan=all_gather", "context.order=striped"), "all_gather of 4, striped; stored"),
        (("context.ulysses=2",), "heads over 2 ranks (heads_first); ring of 2, zigzag, keys tr"),
    ],
)
def test_how_positions_are_split(keys: tuple[str, ...], words: str) -> None:
    """Row 6.02: with both memories of scores, that of none and that of stored ones, s^2 / n."""
    text = plan(*LONG, *keys)[2]
    (line,) = re.findall(r"^context +(.*)$", text, re.MULTILINE)
    assert line.startswith("2,048 of 8,192 positions per rank; ")
    assert words in line
    stored = 2 * 8 * 8192**2 // 4 * 4
    told = f"; stored scores of a layer: 0 B, where s^2 / n would be {size_text(stored)}"
    assert line.endswith(told)
    assert "context" not in plan(*LONG[:-3], "parallel.cp=1")[2]


@pytest.mark.parametrize(
    "keys",
    [
        ("context.plan=double_ring", "context.inner=2", "parallel.per_node=2"),
        ("context.ulysses=2", "context.order=striped", "context.ranks=context_first"),
        ("context.ulysses=4",),
    ],
)
def test_the_line_of_what_compare_lists(
    keys: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Heading by heading the row of the chosen way; without its time where no device is known."""
    assert context_command(["compare", *LONG, *keys, "log.device=H100"]) == 0
    table = capsys.readouterr().out.splitlines()
    number = int(re.findall(r"this configuration: number (\d+) of", table[-1])[0])
    headings, cells = (re.split(r" {2,}", table[line].strip()) for line in (0, number))
    listed = {h: cell for h, cell in zip(headings, cells, strict=True) if cell != "-"}
    for device in ("H100", "null"):
        text = plan(*LONG, *keys, f"log.device={device}")[2]
        (line,) = re.findall(r"^attention +of a layer and micro-batch: (.*)$", text, re.MULTILINE)
        known = device != "null"
        of = [f"{h} {cell}" for h, cell in listed.items() if known or h not in ("ms", "exposed")]
        assert line == ", ".join(of) + ("" if known else "; its time is not known")


def test_the_line_of_attention_to_slices() -> None:
    """Compared is what whole sequences take."""
    sliced = plan(*LONG, "pipeline.schedule=seq1f1b", "pipeline.slices=2")[2]
    assert "\nattention     of a layer and micro-batch that is not cut: plan ring, " in sliced
    assert "\nattention " not in plan(*LONG, "parallel.cp=1")[2]


def test_costs_of_operations_over_long_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    """F 2w + 2a, I 2w + 5a, W 2w per token and layer; schedule.py takes what is printed."""
    text = plan(*LONG, "kernels.loss_chunk=0")[2]
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
    "model.moe.experts=8",
    "parallel.dp=4",
    "parallel.ep=4",
    "train.global_batch=64",
    "log.device_gb=80",
)


def total_of(text: str) -> str:
    return re.findall(r"^total +(.*?);", text, re.MULTILINE)[0]


def test_blocks_that_a_run_compiles_are_planned_uncompiled() -> None:
    line = "\ncompiled      blocks are planned as they run uncompiled: a run takes this or less\n"
    assert line in plan("kernels.compile=true")[2]
    assert line not in plan()[2]


def test_rows_of_experts_that_memory_is_for() -> None:
    """Those of experts that are chosen evenly, of a rank that gets more, and of a capacity."""
    config, layout, even = plan(*EXPERTS)
    assert "\nrows          those of experts chosen evenly; --imbalance 1.5 plans for" in even
    more = report(config, layout, Fraction(5, 2))
    assert (
        "\nrows          2.5 times the mean of all ranks, for the experts of one; with experts "
        f"chosen evenly {total_of(even)} in total\n"
    ) in more
    by_hand = peak_activations(Units(config, layout), 0, imbalance=Fraction(5, 2)).device
    fewer = peak_activations(Units(config, layout), 0).device
    assert (
        by_hand > fewer == peak_activations(Units(config, layout), 0, imbalance=Fraction(1)).device
    )
    assert f"activations {size_text(by_hand)}" in more
    limited = plan(*EXPERTS, "model.moe.capacity=2")[2]
    assert "\nrows          as many as experts have places for; with experts chosen" in limited
    assert f"chosen evenly {total_of(even)} in total\n" in limited
    assert total_of(limited) != total_of(even)
    for keys in (("experts.pad=true", "model.moe.capacity=2"), ("experts.dispatch=fetch",)):
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
        (("model.moe.capacity=1.25",), "has no effect with model.moe.capacity=1.25, for which mem"),
        (("experts.dispatch=fetch",), "has no effect with experts.dispatch=fetch, where rows stay"),
        (("parallel.ep=1",), "has no effect with parallel.ep=1, where each rank has all experts"),
        (("parallel.ep=2",), "of model.moe.top_k=2 choices of a token a rank gets at most 2 times"),
        (
            ("model.moe.experts=4", "model.moe.top_k=4"),
            "of model.moe.top_k=4 choices of a token a rank",
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
    wide = ("model.bias=false", "parallel.dp=8", "log.peak_tflops=1", "optimizer.zero=0")
    keys = (*EXPERTS, *wide)
    config, _, text = plan(*keys, "experts.policy=balance", "experts.slots=2")
    layers, of_two = range(config.model.layers), 2 * 2 * 128 * 512
    size = size_text(len(layers) * of_two * 4)
    assert (
        f"\ncopies        of these in each step {size} of weights of experts and {size} of their "
        "gradients, with all slots full; other copies take no more\n"
    ) in text
    assert "\nowners " not in text
    pool = tmp_path / "pool.json"
    write_pools(pool, {layer: [ExpertMap.even(8, 4)] for layer in layers})
    moving = plan(*keys, "experts.policy=migrate", f"experts.pool={pool}", "experts.replan=7")[2]
    size = size_text(len(layers) * of_two * 3 * 4)
    line = f"\nowners        beside these at most once in 7 steps, of all experts: ep {size}\n"
    assert line in moving
    assert "\ncopies " not in moving + plan(*keys)[2]
    assert "\nowners " not in plan(*keys)[2]
