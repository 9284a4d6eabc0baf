"""Layers of a GPT with experts, from their configuration: routing, parameters. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megapipe.config.model import ModelConfig
from megapipe.config.moe import MoEConfig
from megapipe.layers.moe.specs import Routing, expert_matrices, of_tokens
from megapipe.layers.specs import ParameterSpec, column_linear, row_linear

GATES = {"none": 0, "sigmoid": 1, "softmax": 2}
"""Outputs of the linear layer of a shared MLP's gate."""


def routing_of(moe: MoEConfig, layer: int) -> Routing:
    """The routing of a layer with experts, by a resolved section."""
    assert moe.group_top_k is not None
    return Routing(
        moe.experts_of(layer),
        moe.top_k,
        scores=moe.scores,
        normalise=moe.normalise,
        scale=moe.scale,
        groups=moe.groups,
        group_top_k=moe.group_top_k,
        capacity=moe.capacity,
        drop=moe.drop,
        aux_loss_coeff=moe.balance,
        scope=moe.balance_scope,
        first_only=moe.balance_choices == "first",
        z_loss_coeff=moe.z,
        jitter=moe.jitter,
        random_second=moe.second == "random",
        has_expert_bias=moe.bias_rate is not None,
    )


def moe_parameters(model: ModelConfig, layer: int) -> Iterator[ParameterSpec]:
    """The parameters of a layer's experts, of their router and of what is beside them. Expert
    matrices are [experts, f, h], with a gate [experts, 2, f, h], and [experts, h, f]."""
    moe, h, std, bias = model.moe, model.hidden, model.init_std, model.bias
    assert moe.ffn is not None
    experts = moe.experts_of(layer)
    name, inner = f"layers.{layer}.moe", (2,) if model.gated else ()
    residual_std = std / math.sqrt(2 * model.layers)
    router_std = std * moe.router_init_scale
    yield of_tokens(f"{name}.router.weight", (experts, h), router_std)
    up, down = (experts, *inner, moe.ffn, h), (experts, h, moe.ffn)
    yield from expert_matrices(f"{name}.up", up, bias=bias, std=std, inner_dim=len(up) - 2)
    yield from expert_matrices(f"{name}.down", down, bias=bias, std=residual_std, inner_dim=2)
    if moe.shared is not None:
        wide, narrow = (*inner, moe.shared, h), (h, moe.shared)
        yield from column_linear(f"{name}.shared.up", wide, bias=bias, std=std)
        yield from row_linear(f"{name}.shared.down", narrow, bias=bias, std=residual_std)
    if gates := GATES[moe.shared_gate]:
        yield of_tokens(f"{name}.shared_gate.weight", (gates, h), std)


def row_widths(model: ModelConfig, etp: int) -> tuple[int, ...]:
    """Of the inputs and outputs of experts' products, whose width is split over `etp` ranks."""
    if model.moe.experts is None:
        return ()
    assert model.moe.ffn is not None
    inner = model.moe.ffn // etp
    return tuple(sorted({model.hidden, inner, inner * (2 if model.gated else 1)}))


def unused_parameters(model: ModelConfig, layer: int) -> int:
    """Parameters of the experts of a layer, which has some, that a token does not meet."""
    moe = model.moe
    assert moe.ffn is not None
    up = moe.ffn * (2 if model.gated else 1)
    each = model.hidden * (up + moe.ffn) + model.bias * (up + model.hidden)
    return (moe.experts_of(layer) - moe.top_k) * each
