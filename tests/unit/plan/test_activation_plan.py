"""Policies as configured, and the bytes of published formulas."""

from __future__ import annotations

from typing import Any

import pytest

from megapipe.config import ActivationsConfig, Config
from megapipe.errors import ConfigError
from megapipe.layout import resolve
from megapipe.model.config import ModelConfig
from megapipe.model.partition import parse_layout
from megapipe.plan.activations import (
    BlockPolicy,
    Sizes,
    Unit,
    held,
    held_tensors,
    queued_bytes,
    recomputed_stages,
    saved_tensors,
    stage_units,
)

STAGES = parse_layout("E L*3 | L*4 | L H", 8)
ALL = ["norm", "attention", "mlp_activation"]
KEEP, FULL = BlockPolicy(), BlockPolicy(recompute=frozenset({"block"}))
SELECTIVE = BlockPolicy(recompute=frozenset(ALL))


def units(**keys: Any) -> tuple[tuple[tuple[int, BlockPolicy], ...], ...]:
    return stage_units(ActivationsConfig(**keys), STAGES)


def test_units() -> None:
    assert units() == (((3, KEEP),), ((4, KEEP),), ((1, KEEP),))
    assert units(policy="full") == (((1, FULL),) * 3, ((1, FULL),) * 4, ((1, FULL),))
    assert units(policy="full", unit=3) == (((3, FULL),), ((3, FULL), (1, FULL)), ((1, FULL),))
    assert units(policy="full", unit=3, blocks=2)[1] == ((2, FULL), (2, KEEP))
    assert units(policy="selective", blocks=[3, 2, 0]) == (
        ((3, SELECTIVE),),
        ((2, SELECTIVE), (2, KEEP)),
        ((1, KEEP),),
    )
    assert units(policy=["full", "selective", "stage"], modules=["norm"]) == (
        ((1, FULL),) * 3,
        ((4, BlockPolicy(recompute=frozenset({"norm"}))),),
        ((1, KEEP),),
    )
    config = ActivationsConfig(policy="full", offload=["norm"])
    assert stage_units(config, STAGES, {0, 2})[::2] == (((3, KEEP),), ((1, KEEP),))


def test_a_stage_of_embedding_or_head_alone_has_no_units() -> None:
    config = ActivationsConfig(policy="full")
    assert stage_units(config, parse_layout("E | L*2 | H", 2)) == ((), ((1, FULL),) * 2, ())


def test_offloading() -> None:
    away = frozenset({"attention"})
    assert units(offload=["attention"])[2] == ((1, BlockPolicy(offload=away)),)
    assert units(policy="full", offload=["attention"])[2] == ((1, FULL),)
    ((_, full),) = units(policy="full", offload=["norm"])[2]
    assert full == BlockPolicy(recompute=frozenset({"block"}), offload=frozenset({"block"}))
    assert full.offloads_input
    assert units(offload=["norm"])[2][0][1].offloads_input
    assert not units(offload=["attention", "mlp_activation"])[2][0][1].offloads_input


def test_stages_run_again_as_a_whole() -> None:
    assert recomputed_stages(ActivationsConfig(policy="stage"), 2) == {0, 1}
    config = ActivationsConfig(policy=["keep", "stage", "full"])
    assert recomputed_stages(config, 3) == {1}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"policy": ["full"] * 2}, "activations.policy has 2 items for 3 virtual stages"),
        ({"blocks": [1] * 4}, "activations.blocks has 4 items for 3 virtual stages"),
        ({"blocks": -1}, "activations.blocks=-1: expected no negative number"),
        ({"blocks": [1, -2, 1]}, r"activations.blocks=\[1, -2, 1\]: expected no negative"),
    ],
)
def test_what_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        units(**keys)


def config_of(activations: dict[str, Any], pipeline: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "parallel": {"pp": 2},
            "pipeline": pipeline,
            "activations": activations,
            "train": {"global_batch": 16, "microbatch": 4},
        }
    )


def test_the_layout_has_the_units_and_the_schedule_the_stages_run_again() -> None:
    config = config_of({"policy": ["stage", "full"]}, {"schedule": "zb_h1"})
    _, layout = resolve(config, 2, None)
    assert layout.schedule.recompute == {0}
    assert layout.units == (((2, KEEP),), ((1, FULL),) * 2)
    merak = config_of({"policy": ["full", "stage"]}, {"schedule": "merak"})
    _, layout = resolve(merak, 2, None)
    assert layout.schedule.recompute == {0, 1}
    assert layout.units == (((2, KEEP),),) * 2, "no block is run a third time"


@pytest.mark.parametrize(
    ("activations", "pipeline", "message"),
    [
        ({"policy": "stage"}, {"schedule": "seq1f1b", "slices": 2}, "policy=stage: .*seq1f1b cuts"),
        (
            {"offload": ["norm"]},
            {"schedule": "seq1f1b", "slices": 2},
            r"offload=\['norm'\]: .*cuts",
        ),
        ({"policy": "stage"}, {"schedule": "auto"}, "policy=stage: pipeline.schedule=auto"),
        ({"policy": ["full"]}, {}, "configuration: activations.policy has 1 items for 2"),
    ],
)
def test_what_a_layout_refuses(
    activations: dict[str, Any], pipeline: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(config_of(activations, pipeline), 2, None)


GPT3 = ModelConfig(layers=96, hidden=12288, heads=96, dropout=0.1, dtype="bf16").resolved(
    vocab_size=50257, sequence_length=2048
)
SBH = 2048 * 12288


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "bytes_per_value"),
    [(1, False, 34), (8, False, 10 + 24 / 8), (8, True, 34 / 8)],
)
def test_a_layer_keeps_what_the_papers_say(
    tp: int, sequence_parallel: bool, bytes_per_value: float
) -> None:
    """Korthikanti et al. (2205.05198), equations 1 to 4: without scores, which fused attention
    does not keep, and norm statistics and logsumexp, which they leave out."""
    sizes = Sizes(2048, 1, tp=tp, sequence_parallel=sequence_parallel, cuda=True)
    ours = sum(
        tensor.bytes
        for tensor in saved_tensors(GPT3, sizes)
        if tensor.name not in ("mean", "rstd", "logsumexp")
    )
    assert ours == bytes_per_value * SBH


def test_full_recomputation_keeps_inputs() -> None:
    sizes = Sizes(2048, 1, tp=8, sequence_parallel=True, cuda=True)
    full = [Unit(1, FULL)] * 3
    assert held(GPT3, full, sizes)[:2] == (3 * 2 * SBH / 8, 0)
    assert held(GPT3, [Unit(3, FULL)], sizes)[:2] == (2 * SBH / 8, 0)
    away = BlockPolicy(recompute=FULL.recompute, offload=FULL.recompute)
    assert held(GPT3, [Unit(1, away)] * 3, sizes)[:2] == (0, 3 * 2 * SBH / 8)


def test_selective_recomputation_keeps_what_the_linear_layers_make() -> None:
    """Two residuals, q, k and v, and the wide values: 2 + 3 + 4 of h per token."""
    assert held(GPT3, [Unit(2, SELECTIVE)], Sizes(2048, 1, cuda=True))[:2] == (2 * 9 * 2 * SBH, 0)
    names = [tensor.name for tensor, _ in held_tensors(GPT3, [Unit(1, SELECTIVE)], Sizes(8, 1))]
    assert names == ["input", "qkv", "input", "up"]


def test_what_waits_for_the_weight_gradients() -> None:
    """Inputs 1 + 1 + 1 + 4 and output gradients 3 + 1 + 4 + 1 of h per token."""
    assert queued_bytes(GPT3, Sizes(2048, 1)) == 16 * 2 * SBH
    split = Sizes(2048, 1, tp=8, sequence_parallel=True)
    assert queued_bytes(GPT3, split) == 16 * 2 * SBH / 8
    replicated = Sizes(2048, 1, tp=8)
    assert queued_bytes(GPT3, replicated) == (12 / 8 + 4) * 2 * SBH
    for policy in (KEEP, FULL, SELECTIVE):
        assert held(GPT3, [Unit(2, policy)], split).queued == 2 * queued_bytes(GPT3, split)
