"""Bytes of layers on a GPU as they are planned, against published formulas."""

from __future__ import annotations

from typing import Any

import pytest

from megapipe.config.config import Config
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.plan.unit import Unit
from megapipe.plan.units import Units

GPT3 = {"hidden": 12288, "heads": 96, "dropout": 0.1, "dtype": "bf16", "vocab_size": 50257}
SBH = 2048 * 12288
"""Number of values of hidden states."""
STATISTICS = 2048 * (2 * 2 + 96) * 4
"""Bytes of the mean and the deviation of two norms, and of attention's logsumexp."""
GENERATOR = 24
"""Bytes of the state of a random generator that attention keeps."""


def resolved(model: dict[str, Any], layers: int, **sections: Any) -> tuple[Config, Layout]:
    """Return the configuration and the layout of a first stage with `layers` layers."""
    parallel = {"device": "cuda", **sections.pop("parallel", {})}
    pp, tp = parallel.get("pp", 1), parallel.get("tp", 1)
    train = {"sequence_length": 2048, "microbatch": 1, "global_batch": 4}
    given = {"model": {**model, "layers": pp * layers}, "parallel": parallel, **sections}
    given["train"] = {**train, **sections.get("train", {})}
    return resolve(Config.model_validate(given), pp * tp, None)


def of_layers(model: dict[str, Any], layers: int = 1, **sections: Any) -> list[Unit]:
    """Return what `layers` more layers add, by slice."""
    pairs = zip(
        Units(*resolved(model, 6, **sections)).of(0),
        Units(*resolved(model, 6 + layers, **sections)).of(0),
        strict=True,
    )
    return [_difference(fewer, more) for fewer, more in pairs]


def of_layer(model: dict[str, Any], layers: int = 1, **sections: Any) -> Unit:
    (unit,) = of_layers(model, layers, **sections)
    return unit


def _difference(fewer: Unit, more: Unit) -> Unit:
    sizes = ("held", "host", "queued", "kept")
    found = {name: getattr(more, name) - getattr(fewer, name) for name in sizes}
    cached = tuple(b - a for a, b in zip(fewer.cached, more.cached, strict=True))
    return more.model_copy(update={**found, "cached": cached})


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "per_value", "statistics"),
    [
        (1, False, 34, STATISTICS),
        (8, False, 10 + 24 / 8, 2048 * (2 * 2 + 96 / 8) * 4),
        (8, True, 34 / 8, STATISTICS / 8),
    ],
)
def test_a_layer_keeps_what_the_papers_say(
    tp: int, sequence_parallel: bool, per_value: float, statistics: float
) -> None:
    """Korthikanti et al. (2205.05198), equations 1 to 4: without scores, which fused attention
    does not keep, and with statistics, which they leave out."""
    unit = of_layer(GPT3, parallel={"tp": tp, "sequence_parallel": sequence_parallel})
    assert unit.held == per_value * SBH + statistics + GENERATOR


@pytest.mark.parametrize("tp", [1, 8])
def test_a_layer_of_llama_70b_keeps_33_and_a_half_bytes_per_value(tp: int) -> None:
    """Two norms 4 + 4; queries, keys and values 2.5, attention's output 2; the MLP's two wide
    inputs 14 and the narrow one 7: nothing twice, whether keys are copied (tp 1) or viewed."""
    llama = {
        "hidden": 8192,
        "heads": 64,
        "kv_heads": 8,
        "ffn_hidden": 28672,
        "norm": "rmsnorm",
        "positions": "rotary",
        "activation": "swiglu",
        "dtype": "bf16",
        "vocab_size": 128256,
    }
    parallel = {"tp": tp, "sequence_parallel": tp > 1}
    unit = of_layer(llama, parallel=parallel, train={"sequence_length": 4096})
    statistics = 4096 * (2 + 64) * 4
    assert unit.held == (33.5 * 4096 * 8192 + statistics) / tp + GENERATOR


def test_full_recomputation_keeps_inputs() -> None:
    parallel = {"tp": 8, "sequence_parallel": True}

    def held(layers: int, **activations: Any) -> tuple[int, int]:
        given = {"policy": "full", **activations}
        unit = of_layer(GPT3, layers, parallel=parallel, activations=given)
        return unit.held, unit.host

    assert held(3) == (3 * 2 * SBH / 8, 0)
    assert held(6, blocks_per_recompute=3) == (2 * 2 * SBH / 8, 0)
    assert held(3, offload=["norm"]) == (0, 3 * 2 * SBH / 8)


def test_selective_recomputation_keeps_what_the_linear_layers_make() -> None:
    """Two residuals, q, k and v, and the wide values: 2 + 3 + 4 of h per token."""
    assert of_layer(GPT3, 2, activations={"policy": "selective"}).held == 2 * 9 * 2 * SBH


@pytest.mark.parametrize("policy", ["keep", "full", "selective"])
def test_what_waits_for_the_weight_gradients(policy: str) -> None:
    """Inputs 1 + 1 + 1 + 4 and output gradients 3 + 1 + 4 + 1 of h per token."""

    def queued(tp: int, *, split: bool) -> int:
        parallel = {"tp": tp, "sequence_parallel": split}
        return of_layer(GPT3, parallel=parallel, activations={"policy": policy}).queued

    assert queued(1, split=False) == 16 * 2 * SBH
    assert queued(8, split=True) == 16 * 2 * SBH / 8
    assert queued(8, split=False) == (12 / 8 + 4) * 2 * SBH


def test_the_slices_of_a_sequence_and_their_carry() -> None:
    """A slice keeps what its own tokens do, and the cache their keys and values again: 2 + 2 bytes
    of h, whose gradients take 4 + 4."""
    model = {**GPT3, "dropout": 0.0}
    parallel = {"tp": 8, "pp": 2}
    pipeline = {"schedule": "seq1f1b", "sequence_slices": 3}
    whole = of_layer(model, parallel=parallel)
    parts = of_layers(model, parallel=parallel, pipeline=pipeline)
    _, layout = resolved(model, 6, parallel=parallel, pipeline=pipeline)
    first, second, third = layout.slice_lengths
    assert sum(each.held - GENERATOR for each in parts) == whole.held - GENERATOR
    assert sum(each.queued for each in parts) == whole.queued
    cache, row = 4 * SBH / 8, 8 * 12288 / 8
    assert [each.cached for each in parts] == [
        (cache, 0),
        (cache, cache + (first + second) * row),
        (cache, cache + (first + second + third) * row),
    ]
