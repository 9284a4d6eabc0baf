"""Bytes on the wire by hand; that a step does say this much is tests/unit/test_large_worlds.py."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.plan.traffic import (
    CollectiveTraffic,
    by_axis,
    largest_message,
    operation_transfers,
    step_traffic,
)
from megapipe.plan.unit import OPERATIONS, Transfer
from megapipe.plan.units import Units
from megapipe.schedule.generators import names
from megapipe.schedule.memory import traffic, volume

X = 4 * 16 * 32 * 4
"""Hidden states of a micro-batch of 4 samples of 16 tokens, hidden 32, fp32."""
SMALL = (
    "model.layers=4",
    "model.hidden=32",
    "model.vocab_size=500",
    "model.tied_embeddings=false",
    "model.positions=rotary",
    "model.bias=false",
    "train.sequence_length=16",
    "train.microbatch=4",
    "kernels.loss_chunk_tokens=40",
)


def plan(*keys: str) -> tuple[Config, Layout]:
    return resolve(parse([*SMALL, *keys]).config, None, None)


def found(exchanges: list[CollectiveTraffic]) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Sum calls and bytes by axis, collective and purpose, all stages together."""
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for e in exchanges:
        count, size = sums.get((e.axis, e.collective, e.what), (0, 0))
        sums[e.axis, e.collective, e.what] = (count + e.count, size + e.bytes)
    return sums


PIPELINE = (
    "parallel.pp=2",
    "parallel.tp=2",
    "parallel.dp=3",
    "train.global_batch=60",
    "pipeline.scatter_gather=off",
)
LOSS = 5 * 2, 5 * 64 * 2 * 3 * 4
"""Calls and bytes of the loss of 5 micro-batches: three numbers a token, two chunks each."""
LAYER = 12 * 32 * 32 // 2 + 2 * 32
"""Parameters of a layer on one of two tp ranks: matrices, and the norms whole."""


def test_every_number_of_a_small_job() -> None:
    """Two stages of two layers, 5 micro-batches: what the last rank says."""
    config, layout = plan(*PIPELINE, "pipeline.stage_layout=E L*2 | L*2 H")
    numel = 2 * LAYER + 32 + 256 * 32  # 500 words are 2 x 256 with padding
    numel += -numel % 3
    assert found(step_traffic(Units(config, layout), 1)) == {
        ("tp", "all_reduce", "F"): (5 * 4, 5 * 4 * X),
        ("tp", "all_reduce", "B"): (5 * 5, 5 * 5 * X),
        ("tp", "all_gather", "B"): LOSS,
        ("dp", "reduce_scatter", "gradients"): (1, 4 * numel),
        ("dp", "all_gather", "weights"): (1, 4 * numel),
        ("pp", "send", "to 0"): (5, 5 * X),
        ("dp", "all_gather", "tokens"): (1, 3 * 8),
        ("tp", "all_gather", "totals"): (1, 2 * 11 * 8),
        ("dp", "all_gather", "totals"): (1, 3 * 11 * 8),
        ("pp", "all_gather", "totals"): (1, 2 * 11 * 8),
    }


@pytest.mark.parametrize("apart", [False, True])
def test_sequence_parallelism_splits_each_all_reduce_and_gathers_again_in_w(apart: bool) -> None:
    """The inputs of column layers; gradients of four row layers too, where W is apart from I. The
    head's input is gathered with the loss."""
    config, layout = plan(
        *PIPELINE,
        "pipeline.stage_layout=E L*2 | L*2 H",
        "parallel.sequence_parallel=true",
        f"pipeline.schedule={'zb_h1' if apart else '1f1b'}",
    )
    units = Units(config, layout)
    first, last = (found(step_traffic(units, rank)) for rank in (0, 1))
    assert first["tp", "all_reduce", "sequence shards"] == (1, 2 * 2 * 32 * 4), "the norms"
    assert first["pp", "send", "to 1"] == (5, 5 * X // 2)
    gathers = {"F": 4, **({"I": 4, "W": 4 + 4} if apart else {"B": 4 + 4})}
    scatters = {"F": 4, "I" if apart else "B": 4}
    for sums, more in (
        (first, {("all_gather", "W"): 1, ("reduce_scatter", "F"): 1}),  # the embedding's
        (last, {("all_gather", "I"): 1, ("reduce_scatter", "I"): 1}),  # the head's
    ):
        for collective, counts in (("all_gather", gathers), ("reduce_scatter", scatters)):
            wanted = Counter(counts)
            for (name, what), count in more.items():
                if name == collective:
                    wanted[what if apart or what == "F" else "B"] += count
            for what, count in wanted.items():
                of_loss = LOSS if sums is last and collective == "all_gather" else (0, 0)
                calls, size = of_loss if what in "IB" else (0, 0)
                found_there = sums["tp", collective, what]
                assert found_there == (5 * count + calls, 5 * count * X + size), what


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "dualpipe"])
def test_operations_say_together_what_a_step_says(schedule: str) -> None:
    """DualPipe has both kinds of backward."""
    keys = ("model.layers=8", "parallel.sequence_parallel=true", f"pipeline.schedule={schedule}")
    units = Units(*plan("parallel.pp=2", "parallel.tp=2", "train.global_batch=24", *keys))
    for rank in range(2):
        whole = sum(e.wire for e in step_traffic(units, rank) if e.what in OPERATIONS.values())
        assert whole == sum(
            each.wire
            for op in units.layout.schedule.rank_ops(rank)
            for each in operation_transfers(units, op.stage, OPERATIONS[op.kind])
        )


def test_a_b_of_compiled_blocks_is_an_i_and_a_w() -> None:
    """Their backward leaves weight gradients for later, so gradients are gathered twice."""
    keys = ("parallel.tp=2", "parallel.sequence_parallel=true", "kernels.compile=true")
    units = Units(*plan(*keys))
    fused, *apart = (operation_transfers(units, 0, kind) for kind in ("B", "I", "W"))
    assert fused == [*apart[0], *apart[1]]
    (unit,) = units.of(0)
    assert len(fused) > sum(isinstance(each, Transfer) for each in unit.operations["B"])


@pytest.mark.parametrize(
    ("policy", "extra"),
    [
        ("keep", 0),
        ("selective", 0),  # recomputed modules have no collective
        ("full", 2 * 1),  # all reductions of a block but its last
        ("stage", 3 + 1),  # those of the stage, and the embedding
    ],
)
def test_what_is_run_again_reduces_again(policy: str, extra: int) -> None:
    """It does so in the backward, where it runs."""
    keys = (*PIPELINE, "pipeline.stage_layout=E L*2 | L*2 H", f"activations.policy={policy}")
    sums = found(step_traffic(Units(*plan(*keys)), 0))
    for what, wanted in (("F", 2 * 2 + 1), ("B", 2 * 2 + extra)):
        assert sums["tp", "all_reduce", what] == (5 * wanted, 5 * wanted * X)


def test_a_forward_that_an_r_runs_counts_there() -> None:
    """All but the stage's last reduction."""
    keys = (*PIPELINE, "pipeline.stage_layout=E L*2 | L*2 H", "pipeline.schedule=merak")
    sums = found(step_traffic(Units(*plan(*keys)), 0))
    for what, wanted in (("F", 2 * 2 + 1), ("R", 3 + 1), ("B", 2 * 2)):
        assert sums["tp", "all_reduce", what] == (5 * wanted, 5 * wanted * X)


@pytest.mark.parametrize(
    ("schedule", "runs"), [("breadth_first", 1), ("interleaved_1f1b", 3), ("gpipe", 1)]
)
def test_zero_2_reduces_once_per_run_of_weight_gradients(schedule: str, runs: int) -> None:
    """6 micro-batches, 2 chunks: depth-first goes through them 2 at a time."""
    chunks = "null" if schedule == "gpipe" else "2"
    keys = (f"pipeline.schedule={schedule}", f"pipeline.chunks={chunks}", "optimizer.zero=2")
    config, layout = plan("parallel.pp=2", "parallel.dp=2", "train.global_batch=48", *keys)
    sums = found(step_traffic(Units(config, layout), 1))
    count, _ = sums["dp", "reduce_scatter", "gradients"]
    assert count == runs * len(layout.schedule.placement.stages_of(1))


@pytest.mark.parametrize(("prefetch", "gathers"), [(0, 3), (1, 2)])
def test_zero_3_gathers_what_was_let_go(prefetch: int, gathers: int) -> None:
    """Two chunks on each of two ranks, breadth-first: forwards 0 2, backwards 2 0."""
    config, layout = plan(
        "parallel.pp=2",
        "parallel.dp=2",
        "train.global_batch=24",
        "pipeline.schedule=breadth_first",
        "pipeline.chunks=2",
        "optimizer.zero=3",
        f"optimizer.weight_prefetch={prefetch}",
    )
    sums = found(step_traffic(Units(config, layout), 0))
    assert sums["dp", "all_gather", "weights"][0] == gathers


def test_hybrid_sharding_reduces_in_two_steps() -> None:
    keys = ("parallel.dp=8", "train.global_batch=32", "optimizer.shard_group_size=2")
    config, layout = plan(*keys)
    sums = found(step_traffic(Units(config, layout), 0))
    _, whole = sums["dp:shard", "reduce_scatter", "gradients"]
    assert sums["dp:replicate", "all_reduce", "gradients"] == (1, whole // 2)
    assert sums["dp:shard", "all_gather", "weights"] == (1, whole)
    config, layout = plan(*keys, "optimizer.reduce_dtype=bf16")
    sums = found(step_traffic(Units(config, layout), 0))
    assert sums["dp:shard", "all_to_all", "gradients"] == (1, whole // 2)
    assert sums["dp:replicate", "all_to_all", "gradients"] == (1, whole // 4)
    assert sums["dp:replicate", "all_gather", "gradients"] == (1, whole // 4)


@pytest.mark.parametrize("schedule", names())
def test_messages_are_those_of_the_schedule(schedule: str) -> None:
    keys = ("parallel.pp=4", "model.layers=16", "train.global_batch=32")
    config, layout = plan(*keys, f"pipeline.schedule={schedule}")
    counts, volumes = traffic(layout.schedule), volume(layout.schedule)
    for rank in range(4):
        sent = {
            e.what: (e.count, e.bytes)
            for e in step_traffic(Units(config, layout), rank)
            if e.collective == "send"
        }
        assert sent == {
            f"to {to}": (count, volumes[source, to] * largest_message(config, layout))
            for (source, to), count in counts.items()
            if source == rank
        }


def test_wire_is_the_share_that_a_ring_sends() -> None:
    for collective, share in (
        ("all_reduce", Fraction(3, 2)),
        ("all_gather", Fraction(3, 4)),
        ("reduce_scatter", Fraction(3, 4)),
        ("all_to_all", Fraction(3, 4)),
        ("send", Fraction(1)),
    ):
        exchange = CollectiveTraffic("dp", collective, "", 7, 1000, 4)
        assert exchange.wire == share * 1000
    both = [
        CollectiveTraffic("dp", "all_gather", "", 1, 8, 2),
        CollectiveTraffic("tp", "send", "", 1, 5, 2),
    ]
    assert by_axis([*both, both[0]]) == {"dp": 8, "tp": 5}


def test_a_single_process_says_nothing() -> None:
    assert step_traffic(Units(*plan()), 0) == []
