"""Activations at the peak of a schedule by hand; benchmarks/memory.py compares what is alive."""

from __future__ import annotations

import pytest

from megapipe.cli import parse
from megapipe.layout.resolve import resolve
from megapipe.plan.activation_memory import peak_activations
from megapipe.plan.unit import Unit
from megapipe.plan.units import Units

SMALL = (
    "model.layers=4",
    "model.hidden=64",
    "model.vocab_size=1024",
    "model.tied_embeddings=false",
    "parallel.device=cpu",
    "train.global_batch=32",
)
MESSAGE = 256 * 4 * 64 * 4


def plan(*keys: str) -> Units:
    return Units(*resolve(parse([*SMALL, *keys]).config, None, None))


def unit_of(units: Units, stage: int) -> Unit:
    (unit,) = units.of(stage)
    return unit


@pytest.mark.parametrize(
    ("schedule", "rank", "forwards", "queued"),
    [("1f1b", 0, 3, 0), ("1f1b", 2, 1, 0), ("gpipe", 1, 8, 0), ("zb_h2", 0, 4, 1)],
)
def test_micro_batches_between_f_and_i_and_between_i_and_w(
    schedule: str, rank: int, forwards: int, queued: int
) -> None:
    """With the embedding, more waits for W than for I: there a peak is after an I, not an F."""
    keys = (
        "parallel.pp=3",
        "pipeline.stage_layout=E L | L | L*2 H",
        f"pipeline.schedule={schedule}",
    )
    units = plan(*keys)
    each = unit_of(units, rank)
    found = peak_activations(units, rank, inside=False)
    assert found == (forwards * each.held + queued * each.queued, 0)


def test_a_stage_that_is_run_again_holds_inputs_a_graph_and_a_gradient() -> None:
    """Two micro-batches are in flight on the first rank, which keeps tokens, one on the last."""
    keys = ("parallel.pp=2", "pipeline.stage_layout=E L*2 | L*2 H", "activations.policy=stage")
    units = plan(*keys)
    first, last = (unit_of(units, stage) for stage in (0, 1))
    assert (first.kept, last.kept, first.gradient) == (0, MESSAGE, MESSAGE)
    assert peak_activations(units, 0, inside=False) == (first.held + MESSAGE, 0)
    assert peak_activations(units, 1, inside=False) == (last.held, 0)


def test_blocks_that_are_run_again_peak_when_their_weight_gradients_wait() -> None:
    """They do not if weight gradients are computed at once, as in a backward in one."""
    for schedule, split in (("1f1b", False), ("zb_h1", True)):
        keys = ("activations.policy=full", "pipeline.stage_layout=E L*4 H")
        units = plan(*keys, f"pipeline.schedule={schedule}")
        each = unit_of(units, 0)
        assert each.held < each.queued
        expected = each.queued if split else each.held
        assert peak_activations(units, 0, inside=False) == (expected, 0)


def test_what_waits_in_host_memory_is_apart() -> None:
    units = plan("activations.offload=[norm]", "parallel.pp=2")
    each = unit_of(units, 0)
    assert each.host > 0
    assert peak_activations(units, 0, inside=False) == (2 * each.held, 2 * each.host)


@pytest.mark.parametrize("policy", ["keep", "full"])
def test_slices_of_two_micro_batches_on_the_first_of_two_ranks(policy: str) -> None:
    """F0 F0.1 F1, then B0.1 F1.1 B0 F2 and so on."""
    keys = ("parallel.pp=2", "pipeline.stage_layout=E L*2 | L*2 H", "pipeline.schedule=seq1f1b")
    units = plan(*keys, f"activations.policy={policy}", "pipeline.sequence_slices=2")
    long, short = units.layout.slice_lengths
    assert long > short
    head, tail = units.of(0)
    cached, gradients = head.cached[0], tail.cached[1] - tail.cached[0]
    assert head.cached == (cached, 0)
    assert gradients > 0
    moments = [
        2 * head.held + tail.held + 2 * cached,  # a whole micro-batch, and half of the next
        2 * head.held + 2 * cached + gradients,  # the second slice's B
        2 * head.held + tail.held + 2 * cached + gradients,  # the next one's second F
        head.held + tail.held + cached,  # the first slice's B: no cache
    ]
    assert peak_activations(units, 0, inside=False) == (max(moments), 0)


@pytest.mark.parametrize("policy", ["keep", "full", "stage"])
def test_the_peak_is_within_an_operation_while_others_wait(policy: str) -> None:
    """On the first of two ranks one micro-batch waits while another is in F or B."""
    keys = ("parallel.pp=2", "pipeline.stage_layout=E L*2 | L*2 H", f"activations.policy={policy}")
    units = plan(*keys)
    each = unit_of(units, 0)
    most = max(each.peak("F"), each.peak("B", rebuilt=policy != "stage"))
    assert each.held < most
    assert peak_activations(units, 0).device == each.kept + most


def test_the_peak_while_weight_gradients_wait() -> None:
    """I of the last micro-batch, while none is left but the weight gradients of the others."""
    keys = ("activations.policy=full", "pipeline.stage_layout=E L*4 H", "pipeline.schedule=zb_h1")
    units = plan(*keys)
    each = unit_of(units, 0)
    assert peak_activations(units, 0).device == each.peak("I")
    assert each.queued < each.peak("I")


@pytest.mark.parametrize("plan_of_ranks", ["ring", "all_gather"])
def test_gradients_of_keys_and_values_in_one_tensor_are_counted_once(plan_of_ranks: str) -> None:
    """After the last slice's I there are those of the cache, which has their type."""
    keys = ("parallel.pp=2", "parallel.cp=2", f"context.algorithm={plan_of_ranks}")
    units = plan(*keys, "pipeline.schedule=seq1f1b", "pipeline.sequence_slices=2")
    first, last = units.of(0)
    assert first.cached[0] > 0
    assert last.cached == (first.cached[0], 2 * first.cached[0])
