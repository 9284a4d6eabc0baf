"""Activations at the peak of a schedule by hand; benchmarks/memory.py compares what is alive."""

from __future__ import annotations

import pytest
from megapipe.model.gpt.saved import Held, Sizes, cache_bytes, cache_gradients, stage_held
from megapipe.model.gpt.workspace import peaks

from megapipe.cli import parse
from megapipe.config import Config
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.plan.activation_memory import peak_activations
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


def configure(*keys: str) -> tuple[Config, Layout]:
    return resolve(parse([*SMALL, *keys]).config, None, None)


def of_stage(config: Config, layout: Layout, stage: int, sizes: Sizes) -> Held:
    spec, spans = layout.stage_layers[stage], layout.spans[stage]
    return stage_held(config.model, spec, spans, sizes, loss_chunk=256)


@pytest.mark.parametrize(
    ("schedule", "rank", "forwards", "queued"),
    [("1f1b", 0, 3, 0), ("1f1b", 2, 1, 0), ("gpipe", 1, 8, 0), ("zb_h2", 0, 4, 1)],
)
def test_micro_batches_between_f_and_i_and_between_i_and_w(
    schedule: str, rank: int, forwards: int, queued: int
) -> None:
    """With the embedding, more waits for W than for I: there a peak is after an I, not an F."""
    keys = ("parallel.pp=3", "pipeline.layout=E L | L | L*2 H", f"pipeline.schedule={schedule}")
    config, layout = configure(*keys)
    each = of_stage(config, layout, rank, Sizes(256, 4))
    found = peak_activations(Units(config, layout), rank, inside=False)
    assert found == (forwards * each.device + queued * each.queued, 0)


def test_a_stage_that_is_run_again_holds_inputs_a_graph_and_a_gradient() -> None:
    """Of two micro-batches in flight on the first rank, which keeps tokens, and one on the last."""
    keys = ("parallel.pp=2", "pipeline.layout=E L*2 | L*2 H", "activations.policy=stage")
    config, layout = configure(*keys)
    first, last = (of_stage(config, layout, stage, Sizes(256, 4)) for stage in (0, 1))
    assert peak_activations(Units(config, layout), 0, inside=False) == (first.device + MESSAGE, 0)
    assert peak_activations(Units(config, layout), 1, inside=False) == (last.device, 0)


def test_blocks_that_are_run_again_peak_when_their_weight_gradients_wait() -> None:
    """Unless they are computed at once, as in a backward in one."""
    for schedule, split in (("1f1b", False), ("zb_h1", True)):
        keys = ("activations.policy=full", "pipeline.layout=E L*4 H")
        config, layout = configure(*keys, f"pipeline.schedule={schedule}")
        each = of_stage(config, layout, 0, Sizes(256, 4))
        assert each.device < each.queued
        assert peak_activations(Units(config, layout), 0, inside=False) == (
            each.queued if split else each.device,
            0,
        )


def test_what_waits_in_host_memory_is_apart() -> None:
    config, layout = configure("activations.offload=[norm]", "parallel.pp=2")
    each = of_stage(config, layout, 0, Sizes(256, 4))
    assert each.host > 0
    assert peak_activations(Units(config, layout), 0, inside=False) == (
        2 * each.device,
        2 * each.host,
    )


@pytest.mark.parametrize("policy", ["keep", "full"])
def test_slices_of_two_micro_batches_on_the_first_of_two_ranks(policy: str) -> None:
    """F0 F0.1 F1, then B0.1 F1.1 B0 F2 and so on."""
    keys = ("parallel.pp=2", "pipeline.layout=E L*2 | L*2 H", "pipeline.schedule=seq1f1b")
    config, layout = configure(*keys, f"activations.policy={policy}", "pipeline.slices=2")
    long, short = layout.slice_lengths
    assert long > short
    sizes = Sizes(long, 4, before=0), Sizes(short, 4, before=long)
    head, tail = (of_stage(config, layout, 0, each) for each in sizes)
    cached = cache_bytes(config.model, 2, Sizes(256, 4))
    gradients = cache_gradients(config.model, 2, sizes[1])
    moments = [
        2 * head.device + tail.device + 2 * cached,  # a whole micro-batch, and half of the next
        2 * head.device + 2 * cached + gradients,  # the second slice's B
        2 * head.device + tail.device + 2 * cached + gradients,  # the next one's second F
        head.device + tail.device + cached,  # the first slice's B: no cache
    ]
    assert peak_activations(Units(config, layout), 0, inside=False) == (max(moments), 0)


@pytest.mark.parametrize("policy", ["keep", "full", "stage"])
def test_the_peak_is_within_an_operation_while_others_wait(policy: str) -> None:
    """On the first of two ranks one micro-batch waits while another is in F or B."""
    keys = ("parallel.pp=2", "pipeline.layout=E L*2 | L*2 H", f"activations.policy={policy}")
    config, layout = configure(*keys)
    spec, spans, again = layout.stage_layers[0], layout.spans[0], policy == "stage"
    within = peaks(config.model, spec, spans, Sizes(256, 4), most_tokens=256, again=again)
    waiting = 0 if again else of_stage(config, layout, 0, Sizes(256, 4)).device
    found = peak_activations(Units(config, layout), 0)
    assert found.device == waiting + max(within.F, within.B)
    assert of_stage(config, layout, 0, Sizes(256, 4)).device < within.B


def test_the_peak_while_weight_gradients_wait() -> None:
    """I of the last micro-batch, while none is left but the weight gradients of the others."""
    keys = ("activations.policy=full", "pipeline.layout=E L*4 H", "pipeline.schedule=zb_h1")
    config, layout = configure(*keys)
    within = peaks(
        config.model, layout.stage_layers[0], layout.spans[0], Sizes(256, 4), most_tokens=256
    )
    assert peak_activations(Units(config, layout), 0).device == within.I
    assert of_stage(config, layout, 0, Sizes(256, 4)).queued < within.I
