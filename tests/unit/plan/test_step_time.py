"""Time of a step at assumed speeds, and whether it fits."""

from typing import Any

import pytest

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.layout.buckets import process_buckets
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.layout.speeds import Speeds
from megapipe.plan.activation_memory import peak_activations
from megapipe.plan.memory import model_memory
from megapipe.plan.memory_fit import fit_text, fits
from megapipe.plan.moe.moe_layer_time import training_passes
from megapipe.plan.report import report
from megapipe.plan.step_time import simulate_step, timed_cost
from megapipe.plan.traffic import step_traffic
from megapipe.plan.units import Units
from megapipe.schedule.ir import Kind
from megapipe.schedule.timing.simulate import simulate
from tests.parity.families import kernel_flops, token_flops

BASE = ("model.vocab_size=512", "model.layers=4", "plan.peak_tflops=1", "plan.time_factor=1.2")
MESH = ("plan.intra_node_gb_s=2", "plan.inter_node_gb_s=0.5", "plan.link_latency_us=0")

EXPERTS = ("model.moe.num_experts=8", "parallel.ep=2")


def plan(*overrides: str) -> tuple[Config, Layout]:
    return resolve(parse([*BASE, *overrides]).config, None, None)


def seconds(*overrides: str) -> float:
    config, layout = plan(*overrides)
    return float(simulate_step(Units(config, layout), Speeds.of(config)).makespan)


def computed(config: Config, layout: Layout) -> float:
    """Return the seconds that a process computes in a step."""
    tokens = config.train.global_batch * config.train.sequence_length
    flops = tokens * kernel_flops(config.model, config.train.sequence_length)
    return flops / layout.world / 0.5e12


def sent(config: Config, layout: Layout, axis: str, what: str) -> float:
    exchanges = step_traffic(Units(config, layout), 0)
    return float(sum(e.wire for e in exchanges if (e.axis, e.what) == (axis, what)))


def test_one_process_computes_at_the_share_of_the_peak() -> None:
    config, layout = plan()
    assert seconds() == pytest.approx(computed(config, layout))
    length = config.train.sequence_length
    mfu = 50 * token_flops(config.model, length) / kernel_flops(config.model, length)
    assert f"MFU {mfu:.1f}%, without the update\n" in report(config, layout)
    assert "assumed       50% of 1 TFLOP/s (plan.time_factor)\n" in report(config, layout)


@pytest.mark.parametrize("extra", [(), ("parallel.sequence_parallel=true",)])
def test_tensor_parallel_collectives_are_waited_for(extra: tuple[str, ...]) -> None:
    overrides = ("parallel.tp=2", *MESH, *extra, "kernels.tp_comm_overlap=false")
    config, layout = plan(*overrides)
    wire = sum(sent(config, layout, "tp", what) for what in "FB")
    within, between = seconds(*overrides), seconds(*overrides, "parallel.ranks_per_node=1")
    assert within == pytest.approx(computed(config, layout) + wire / 2e9)
    assert between == pytest.approx(computed(config, layout) + wire / 0.5e9)


@pytest.mark.parametrize(
    "extra", [("parallel.dp=2",), ("parallel.tp=2", "parallel.sequence_parallel=true")]
)
def test_rows_of_experts_are_waited_for(extra: tuple[str, ...]) -> None:
    """So are the counts of choices, and what one stage exchanges of its weights."""
    experts = ("model.moe.num_experts=4", "model.moe.capacity_factor=1.5", "parallel.ep=2")
    overrides = (
        *extra,
        *experts,
        "model.tied_embeddings=false",
        "kernels.tp_comm_overlap=false",
        *MESH,
    )
    config, layout = plan(*overrides)
    told = [e for e in step_traffic(Units(config, layout), 0) if e.what not in ("totals", "tokens")]
    assert {(e.axis, e.what) for e in told} >= {("ep", "F"), ("ep", "B")}
    wire = float(sum(e.wire for e in told if e.what != "sequence shards"))
    waited = wire / 0.5e9 - wire / 2e9
    between = seconds(*overrides, "parallel.ranks_per_node=1")
    assert between - seconds(*overrides) == pytest.approx(waited)


def test_chunks_hide_what_travels_behind_what_is_computed() -> None:
    """If transfers take long, one chunk of n is exposed each way. If they take no time, the link is
    never idle, and all of them are hidden. FLOPs are a third each of F, of I and of W."""
    experts = (
        "model.moe.num_experts=8",
        "parallel.dp=2",
        "parallel.ep=2",
        "kernels.tp_comm_overlap=false",
    )
    overrides = (*experts, "model.tied_embeddings=false", *MESH, "pipeline.schedule=1f1b")
    config, layout = plan(*overrides)
    told = [e for e in step_traffic(Units(config, layout), 0) if e.collective == "all_to_all"]
    ways = [float(sum(e.wire for e in told if e.what == kind)) / 2e9 for kind in "FB"]
    tokens = config.train.global_batch * config.train.sequence_length / 2
    flops = 4 * 2 * config.model.hidden * 2 * 2 * config.model.moe.expert_ffn_hidden * tokens  # type: ignore[operator]

    for chunks in (2, 4):
        share = 1 / chunks
        for rate, hidden in ((1e6, True), (1e-6, False)):
            peak = f"plan.peak_tflops={rate}"
            saved = seconds(*overrides, peak) - seconds(
                *overrides, peak, f"experts.overlap_chunks={chunks}"
            )
            own = flops / (rate * 0.5e12)
            wanted = [own if hidden else way * (1 - share) for way in ways]
            assert saved == pytest.approx(sum(wanted), rel=1e-6), hidden


@pytest.mark.parametrize("form", ["all_to_all", "all_gather", "fetch"])
def test_rows_are_waited_for_as_a_layer_is_simulated(form: str) -> None:
    """F and I of each layer and micro-batch; gradients of fetched experts, which W sends, beside
    that, and all else that is exchanged."""
    experts = (
        "model.moe.num_experts=8",
        "parallel.dp=2",
        "parallel.ep=2",
        "kernels.tp_comm_overlap=false",
    )
    keys = (f"experts.dispatch={form}", "experts.overlap_chunks=2", "plan.link_latency_us=30")
    overrides = (*MESH, *experts, *keys, "model.tied_embeddings=false")
    config, layout = plan(*overrides)
    told = [e for e in step_traffic(Units(config, layout), 0) if e.what not in ("totals", "tokens")]
    late = [e for e in told if e.axis != "ep" or e.collective == "reduce_scatter"]
    others, calls = float(sum(e.wire for e in late)), sum(e.count for e in late)
    if form != "fetch":
        others += 4 * layout.microbatches * 8 * 8  # numbers of rows for 8 experts, int64
        calls += 4 * layout.microbatches
    passes = training_passes(Units(config, layout), Speeds.of(config), 0, form, 2)
    exposed = 4 * layout.microbatches * sum(timed.exposed for timed in passes.values())
    waited = seconds(*overrides) - computed(config, layout)
    assert waited == pytest.approx(exposed + others / 2e9 + calls * 30e-6)


def test_two_hops_go_over_two_links() -> None:
    """Three quarters of the bytes cross between the two nodes in one hop of four ranks, half of
    them in two hops, and half stay within nodes."""
    experts = (
        "model.moe.num_experts=4",
        "parallel.dp=4",
        "parallel.ep=4",
        "parallel.ranks_per_node=2",
    )
    overrides = (*experts, "model.tied_embeddings=false", *MESH)
    config, layout = plan(*overrides)
    told = [e for e in step_traffic(Units(config, layout), 0) if e.collective == "all_to_all"]
    whole = float(sum(e.bytes for e in told))
    hops = seconds(*overrides, "experts.dispatch=hierarchical", "experts.ranks_per_node=2")
    flat = 3 / 4 * whole / 0.5e9
    assert seconds(*overrides) - hops == pytest.approx(flat - whole / 2 / 0.5e9 - whole / 2 / 2e9)


def test_stages_of_two_holders_wait_once() -> None:
    """Both ways take as long as one."""
    shape = ("parallel.pp=2", "parallel.tp=2", "train.global_batch=16", *MESH)
    found = []
    for name in ("gpipe", "chimera"):
        config, layout = plan(*shape, f"pipeline.schedule={name}")
        found.append(
            timed_cost(Units(config, layout), Speeds.of(config)).table(layout.stages)[Kind.F]
        )
    assert sum(found[0]) == pytest.approx(sum(found[1]))


@pytest.mark.parametrize("extra", [(), ("parallel.sequence_parallel=true",)])
def test_those_of_a_backward_hide_behind_weight_gradients(extra: tuple[str, ...]) -> None:
    """All of them where links are fast; where computing takes no time, nothing is hidden."""
    overrides = ("parallel.tp=2", "plan.inter_node_gb_s=1", "plan.link_latency_us=0", *extra)
    config, layout = plan(*overrides)
    forward, backward = (sent(config, layout, "tp", what) for what in "FB")
    fast = seconds(*overrides, "plan.intra_node_gb_s=1000")
    assert fast == pytest.approx(computed(config, layout) + forward / 1e12, rel=1e-9)
    slow = seconds(*overrides, "plan.intra_node_gb_s=1", "plan.peak_tflops=1e9")
    assert slow == pytest.approx((forward + backward) / 1e9, rel=1e-3)


@pytest.mark.parametrize(
    ("keys", "policy", "share"),
    [
        (("parallel.tp=2",), "full", 4 / 9),  # all but the last of a block; not the embedding's
        (("parallel.tp=2",), "stage", 1),
        (("parallel.cp=2",), "full", 1),
        (("parallel.cp=2",), "stage", 1),
        # 512 bytes and a weight there, and none of the 512 back
        ((*EXPERTS, "parallel.dp=2"), "full", 516 / 1028),
        ((*EXPERTS, "parallel.dp=2", "experts.dispatch=fetch"), "full", 1),
    ],
)
def test_what_is_sent_again_is_waited_for_where_that_runs(
    keys: tuple[str, ...], policy: str, share: float
) -> None:
    """Computing takes no time here, and the numbers of a loss little: F of a stage that runs again
    has them."""
    kept, again = (
        timed_cost(Units(config, layout), Speeds.of(config)).table(1)
        for config, layout in (
            plan(*keys, *MESH, "plan.peak_tflops=1e9", f"activations.policy={name}")
            for name in ("keep", policy)
        )
    )
    forward = kept[Kind.F][0]
    assert again[Kind.F][0] == pytest.approx(forward, rel=5e-3)
    if policy == "stage":
        assert again[Kind.R][0] == pytest.approx(share * forward, rel=5e-3)
        share = 0
    for kind in (Kind.I, Kind.B):
        more = again[kind][0] - kept[kind][0]
        assert more == pytest.approx(share * forward, rel=5e-3, abs=5e-3 * forward), kind


@pytest.mark.parametrize(("policy", "share"), [("keep", 0), ("full", 4 / 9)])
def test_no_weight_gradient_hides_what_a_second_forward_sends(policy: str, share: float) -> None:
    """On fast links these hide all else that a backward sends."""
    keys = ("parallel.tp=2", f"activations.policy={policy}")
    fast, at_once = (
        timed_cost(Units(config, layout), Speeds.of(config)).table(1)
        for config, layout in (plan(*keys, f"plan.intra_node_gb_s={gb}") for gb in (1e3, 1e12))
    )
    forward, backward = (float(fast[kind][0] - at_once[kind][0]) for kind in (Kind.F, Kind.B))
    assert forward > 0
    assert backward == pytest.approx(share * forward, rel=1e-6, abs=1e-6 * forward)


def test_of_what_replicas_exchange_that_counts_which_nothing_hides() -> None:
    """One stage: it is gathered before the first operation and reduced after the last."""
    overrides = ("parallel.dp=2", "model.tied_embeddings=false", *MESH)
    config, layout = plan(*overrides)
    wire = sum(sent(config, layout, "dp", what) for what in ("gradients", "weights"))
    assert seconds(*overrides) == pytest.approx(computed(config, layout) + wire / 2e9)


def test_messages_take_what_their_link_takes() -> None:
    """One micro-batch through two stages: a message forward and one back."""
    overrides = ("parallel.pp=2", "train.global_batch=4", "model.tied_embeddings=false", *MESH)
    config, layout = plan(*overrides)
    size = 256 * 4 * config.model.hidden * 4
    for more, rate in (((), 2e9), (("parallel.ranks_per_node=1",), 0.5e9)):
        expected_seconds = 2 * computed(config, layout) + 2 * size / rate
        assert seconds(*overrides, *more) == pytest.approx(expected_seconds)


def test_a_process_that_runs_all_ranks_runs_them_one_after_the_other() -> None:
    config, layout = plan("parallel.pp=2", "pipeline.transport=in_process")
    assert f"time          {computed(config, layout):.3g} s per step" in report(config, layout)


def test_what_is_to_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megapipe.layout.speeds.local_device", lambda: None)
    words = "time          not known: set plan.device (as in H100) or plan.peak_tflops\n"
    for key, known in (("plan.device=H100", True), ("plan.device=null", False)):
        text = report(*plan("parallel.tp=2", "plan.peak_tflops=null", "parallel.device=cuda", key))
        assert (words not in text) == known


def test_the_device_of_this_machine_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megapipe.layout.speeds.local_device", lambda: "NVIDIA A100-SXM4-40GB")

    def known(*overrides: str) -> tuple[Any, ...]:
        speeds = Speeds.of(parse(list(overrides)).config)
        return speeds.memory_gb, speeds.tflops

    assert known() == (40, 312)
    assert known("plan.device=H100", "plan.device_gb=70") == (70, 989.4)
    assert known("parallel.device=cpu") == (None, 0.11)
    with pytest.raises(ConfigError, match=r"plan\.device=H1000 is not known"):
        plan("plan.device=H1000")


def test_fits() -> None:
    config, layout = plan("parallel.pp=2", "plan.device_gb=1")
    each = [
        model_memory(config, layout, rank).total
        + peak_activations(Units(config, layout), rank).device
        for rank in range(2)
    ]
    shown = [f"{size / 1e6:.3g} MB" for size in each]
    left = f"{(1e9 - max(each)) / 1e6:.3g} MB"
    assert each[0] != each[1]
    assert (
        f"total         {max(each) / 1e6:.3g} MB ({shown[0]}, {shown[1]} by pipeline rank); "
        f"fits in 1 GB, {left} left\n"
    ) in report(config, layout)
    half = max(each) / 2e9
    config, layout = plan("parallel.pp=2", f"plan.device_gb={half}")
    assert f"does NOT fit in {half:g} GB: {max(each) / 2e6:.3g} MB too much\n" in report(
        config, layout
    )


@pytest.mark.parametrize(
    ("keys", "need", "told", "answer"),
    [
        ("plan.device=H100", 77_000, "fits in 80 GB of H100 with a margin of 2.4 GB, 600 MB", True),
        (
            "plan.device=H100",
            79_977,
            "does NOT fit in 80 GB of H100 with a margin of 2.4 GB: 2.38 GB",
            False,
        ),
        ("plan.device=H100 plan.device_gb=80", 79_977, "fits in 80 GB of H100, 23 MB", True),
        ("parallel.device=cpu", 79_977, "set plan.device_gb to see whether that", None),
    ],
)
def test_a_margin_of_the_device_is_left_free(
    keys: str, need: int, told: str, answer: bool | None
) -> None:
    """But none of what the user says that a process may take. `need`: MB."""
    speeds, nbytes = Speeds.of(parse(keys.split()).config), need * 10**6
    words = {True: "left", False: "too much", None: "fits"}
    assert fit_text(nbytes, speeds) == f"{told} {words[answer]}"
    assert fits(nbytes, speeds) is answer


def test_pieces_of_a_reduction_hide_behind_the_last_backward() -> None:
    """On fast links all have arrived that left within it, and the last layers' leave first; on slow
    ones the first begins when the head's gradient is in, and the others follow without a break."""
    shape = ("parallel.dp=2", "model.tied_embeddings=false", *MESH)
    cut, whole = (f"optimizer.bucket_mib={mib}" for mib in (0.25, "null"))
    config, layout = plan(*shape, cut)
    buckets = list(process_buckets(config, layout, 0))
    assert len(buckets) == 1 + 4 * 3 + 1 + 1, "head, layers, embedding, the rest"
    matrices = [bucket.matmul_numel for bucket in buckets]
    total = sum(bucket.numel for bucket in buckets)
    for rate in (0.01, 1000.0):
        link = f"plan.intra_node_gb_s={rate}"
        speeds = Speeds.of(config)
        cost = timed_cost(Units(*plan(*shape, cut, link)), speeds)
        backward = float(cost.table(1)[Kind.B][0])
        wire = sent(*plan(*shape, whole, link), "dp", "gradients") / (rate * 1e9)
        assert seconds_exposed(*plan(*shape, whole, link)) == pytest.approx(wire)
        if rate < 1:
            hidden = backward * (1 - matrices[0] / sum(matrices))
            assert seconds_exposed(*plan(*shape, cut, link)) == pytest.approx(wire - hidden)
        else:
            late = sum(bucket.numel for bucket in buckets[-3:]) / total
            assert seconds_exposed(*plan(*shape, cut, link)) == pytest.approx(wire * late)


def seconds_exposed(config: Config, layout: Layout) -> float:
    """Return the exposed seconds of the reductions of a step."""
    cost = timed_cost(Units(config, layout), Speeds.of(config))
    return float(simulate(layout.schedule, cost).exposed_reduce)
