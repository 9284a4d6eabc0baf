"""Routing and parameters of a GPT's MoE layers, from the section `model.moe`. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megapipe.config.model import ModelConfig
from megapipe.config.moe import MoEConfig
from megapipe.layers.moe.specs import Routing, expert_matrices, of_tokens
from megapipe.layers.specs import ParameterSpec, column_linear, row_linear

GATES = {"none": 0, "sigmoid": 1, "softmax": 2}
"""Number of the shared expert's gate outputs, by ``shared_gate``."""


def routing_of(moe: MoEConfig, layer: int) -> Routing:
    """Return the routing of an MoE layer. `moe`: the resolved section `model.moe`."""
    assert moe.topk_groups is not None
    return Routing(
        moe.experts_of(layer),
        moe.top_k,
        scores=moe.score_function,
        normalise=moe.norm_topk_prob,
        scale=moe.routed_scaling_factor,
        groups=moe.num_groups,
        group_top_k=moe.topk_groups,
        capacity=moe.capacity_factor,
        drop=moe.drop_policy,
        aux_loss_coeff=moe.aux_loss_coeff,
        scope=moe.aux_loss_scope,
        first_only=moe.aux_loss_choices == "first",
        z_loss_coeff=moe.z_loss_coeff,
        jitter=moe.jitter,
        random_second=moe.second_expert == "random",
        has_expert_bias=moe.bias_update_rate is not None,
    )


def moe_parameters(model: ModelConfig, layer: int) -> Iterator[ParameterSpec]:
    """Yield the parameters of an MoE layer: router, experts, shared expert, gate. The experts' up
    matrices are [experts, f, h], or [experts, 2, f, h] with a gate; down [experts, h, f]."""
    moe, h, std, bias = model.moe, model.hidden, model.init_std, model.bias
    assert moe.expert_ffn_hidden is not None
    experts = moe.experts_of(layer)
    name, inner = f"layers.{layer}.moe", (2,) if model.gated else ()
    residual_std = std / math.sqrt(2 * model.layers)
    router_std = std * moe.router_init_scale
    yield of_tokens(f"{name}.router.weight", (experts, h), router_std)
    up, down = (experts, *inner, moe.expert_ffn_hidden, h), (experts, h, moe.expert_ffn_hidden)
    yield from expert_matrices(f"{name}.up", up, bias=bias, std=std, inner_dim=len(up) - 2)
    yield from expert_matrices(f"{name}.down", down, bias=bias, std=residual_std, inner_dim=2)
    if moe.shared_ffn_hidden is not None:
        wide, narrow = (*inner, moe.shared_ffn_hidden, h), (h, moe.shared_ffn_hidden)
        yield from column_linear(f"{name}.shared.up", wide, bias=bias, std=std)
        yield from row_linear(f"{name}.shared.down", narrow, bias=bias, std=residual_std)
    if gates := GATES[moe.shared_gate]:
        yield of_tokens(f"{name}.shared_gate.weight", (gates, h), std)


def row_widths(model: ModelConfig, etp: int) -> tuple[int, ...]:
    """Return the input and output widths of the experts' GEMMs; `etp` splits their FFN hidden
    size."""
    if model.moe.num_experts is None:
        return ()
    assert model.moe.expert_ffn_hidden is not None
    inner = model.moe.expert_ffn_hidden // etp
    return tuple(sorted({model.hidden, inner, inner * (2 if model.gated else 1)}))


def unused_parameters(model: ModelConfig, layer: int) -> int:
    """Return the number of expert parameters of an MoE layer that a token does not use."""
    moe = model.moe
    assert moe.expert_ffn_hidden is not None
    up = moe.expert_ffn_hidden * (2 if model.gated else 1)
    each = model.hidden * (up + moe.expert_ffn_hidden) + model.bias * (up + model.hidden)
    return (moe.experts_of(layer) - moe.top_k) * each
