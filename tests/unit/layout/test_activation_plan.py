"""Policies as configured."""

from __future__ import annotations

from typing import Any

import pytest

from megapipe.config.activations import ActivationsConfig
from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.layers.activation_policy import BlockPolicy
from megapipe.layout.activations import block_policies, recomputed_stages
from megapipe.layout.resolve import resolve
from megapipe.model.partition import parse_layout

STAGES = parse_layout("E L*3 | L*4 | L H", 8)
ALL = ["norm", "attention", "mlp_activation"]
KEEP, FULL = BlockPolicy(), BlockPolicy(recompute=frozenset({"block"}))
SELECTIVE = BlockPolicy(recompute=frozenset(ALL))


def spans(**keys: Any) -> tuple[tuple[tuple[int, BlockPolicy], ...], ...]:
    return block_policies(ActivationsConfig(**keys), STAGES)


def test_spans() -> None:
    assert spans() == (((3, KEEP),), ((4, KEEP),), ((1, KEEP),))
    assert spans(policy="full") == (((1, FULL),) * 3, ((1, FULL),) * 4, ((1, FULL),))
    assert spans(policy="full", blocks_per_recompute=3) == (
        ((3, FULL),),
        ((3, FULL), (1, FULL)),
        ((1, FULL),),
    )
    assert spans(policy="full", blocks_per_recompute=3, num_blocks=2)[1] == ((2, FULL), (2, KEEP))
    assert spans(policy="selective", num_blocks=[3, 2, 0]) == (
        ((3, SELECTIVE),),
        ((2, SELECTIVE), (2, KEEP)),
        ((1, KEEP),),
    )
    assert spans(policy=["full", "selective", "stage"], modules=["norm"]) == (
        ((1, FULL),) * 3,
        ((4, BlockPolicy(recompute=frozenset({"norm"}))),),
        ((1, KEEP),),
    )
    config = ActivationsConfig(policy="full", offload=["norm"])
    assert block_policies(config, STAGES, {0, 2})[::2] == (((3, KEEP),), ((1, KEEP),))


def test_a_stage_of_embedding_or_head_alone_has_no_spans() -> None:
    config = ActivationsConfig(policy="full")
    assert block_policies(config, parse_layout("E | L*2 | H", 2)) == ((), ((1, FULL),) * 2, ())


def test_offloading() -> None:
    away = frozenset({"attention"})
    assert spans(offload=["attention"])[2] == ((1, BlockPolicy(offload=away)),)
    assert spans(policy="full", offload=["attention"])[2] == ((1, FULL),)
    ((_, full),) = spans(policy="full", offload=["norm"])[2]
    assert full == BlockPolicy(recompute=frozenset({"block"}), offload=frozenset({"block"}))
    assert full.offloads_input
    assert spans(offload=["norm"])[2][0][1].offloads_input
    assert not spans(offload=["attention", "mlp_activation"])[2][0][1].offloads_input


def test_stages_run_again_as_a_whole() -> None:
    assert recomputed_stages(ActivationsConfig(policy="stage"), 2) == {0, 1}
    config = ActivationsConfig(policy=["keep", "stage", "full"])
    assert recomputed_stages(config, 3) == {1}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"policy": ["full"] * 2}, "activations.policy has 2 items for 3 virtual stages"),
        ({"num_blocks": [1] * 4}, "activations.num_blocks has 4 items for 3 virtual stages"),
        ({"num_blocks": -1}, "activations.num_blocks=-1: expected a number >= 0"),
        (
            {"num_blocks": [1, -2, 1]},
            r"activations.num_blocks=\[1, -2, 1\]: expected a number >= 0",
        ),
    ],
)
def test_what_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spans(**keys)


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
    assert layout.block_policies == (((2, KEEP),), ((1, FULL),) * 2)
    merak = config_of({"policy": ["full", "stage"]}, {"schedule": "merak"})
    _, layout = resolve(merak, 2, None)
    assert layout.schedule.recompute == {0, 1}
    assert layout.block_policies == (((2, KEEP),),) * 2, "no block is run a third time"


@pytest.mark.parametrize(
    ("activations", "pipeline", "message"),
    [
        (
            {"policy": "stage"},
            {"schedule": "seq1f1b", "sequence_slices": 2},
            "policy=stage: .*seq1f1b cuts",
        ),
        (
            {"offload": ["norm"]},
            {"schedule": "seq1f1b", "sequence_slices": 2},
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
