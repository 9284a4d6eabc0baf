"""Plain MoE layers: a loop over tokens and choices, on full tensors.

Written for the reader and not for speed, and without the package's code. Python sorts, so ties go
to the expert with the lower index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megapipe.config.model import ModelConfig

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Wire:
    """What rows of experts on other ranks go through."""

    codec: str = "none"
    parts: int = 1
    """Number of ranks with parts of an expert, each of which sends its own results."""
    near: tuple[tuple[float, ...], ...] = ()
    """For each sample, the bandwidths from its rank to the experts' ranks, which weight the
    auxiliary loss; empty: all count alike."""

    def distance(self, row: int, expert: int, experts: int) -> float:
        """Return the weight of an expert, seen from a sample's rank; the mean over experts is 1."""
        if not self.near:
            return 1.0
        far = [1 / self.near[row][e * len(self.near[row]) // experts] for e in range(experts)]
        return far[expert] * experts / sum(far)

    def pass_on(self, rows: Tensor) -> Tensor:
        """Return rows as they arrive; their gradients come back the same way."""
        return rows if self.codec == "none" else _Passed.apply(rows, self.codec)


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, codec: str) -> Tensor:
        ctx.codec = codec
        return coded(rows, codec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return coded(grad, ctx.codec), None


def coded(row: Tensor, codec: str) -> Tensor:
    """Return a row [h] after its conversion to a wire type and back."""
    if codec == "bf16":
        return row.to(torch.bfloat16).to(row.dtype)
    step = max(row.abs().max().item() / 127, 2.0**-126)
    step = torch.tensor(step, dtype=torch.float32).item()
    return torch.tensor([round(x / step) * step for x in row.tolist()], dtype=row.dtype)


@dataclass
class Told:
    """What MoE layers add to the loss, and the routing statistics that they report."""

    rows: int
    """Number of samples of a micro-batch."""
    terms: list[Tensor] = field(default_factory=list)
    """Auxiliary loss and z-loss with their coefficients, for each MoE layer."""
    balance: list[float] = field(default_factory=list)
    """Auxiliary loss without its coefficient: 1 if tokens are spread evenly."""
    z: list[float] = field(default_factory=list)
    counts: list[list[int]] = field(default_factory=list)
    """Choices of each expert, including dropped ones."""
    counted: list[list[int]] = field(default_factory=list)
    """Choices of each expert that the auxiliary loss counts."""
    dropped: list[set[tuple[int, int, int]]] = field(default_factory=list)
    """Dropped choices: (sample, position, number of the choice)."""
    given: Sequence[Tensor] = ()
    """Choices of each MoE layer, [b, s, k], ~expert for a dropped one; by default they are
    computed."""
    wire: Wire = Wire()
    ranked: list[Tensor] = field(default_factory=list)
    """Scores [b, s, experts] by which tokens choose."""
    weights: list[Tensor] = field(default_factory=list)
    """Weights of the choices, [b, s, k]."""


def has_experts(model: ModelConfig, layer: int) -> bool:
    moe = model.moe
    if moe.num_experts is None or layer < moe.first_dense_layers or layer in moe.dense_layers:
        return False
    return (layer - moe.first_dense_layers) % moe.layer_freq == moe.layer_freq - 1


def experts_of(model: ModelConfig, layer: int) -> int:
    """Return an MoE layer's number of experts: from a list, one number per MoE layer, in order."""
    numbers = model.moe.num_experts
    if isinstance(numbers, list):
        return numbers[[has_experts(model, n) for n in range(layer)].count(True)]
    assert numbers is not None
    return numbers


def counts_of(name: str, model: ModelConfig) -> str | None:
    """Return the name of the choice counts that a router keeps, if the auxiliary loss uses them."""
    if model.moe.aux_loss_scope != "step":
        return None
    return f"{name}.{'first_counts' if model.moe.aux_loss_choices == 'first' else 'counts'}"


def tells_first(model: ModelConfig) -> bool:
    """Whether a run reports first choices in addition to all: if they are kept."""
    return (model.moe.aux_loss_scope, model.moe.aux_loss_choices) == ("step", "first")


def shapes(model: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the weights and biases of a layer's experts, router and shared expert."""
    moe, h = model.moe, model.hidden
    two = (2,) if model.activation in ("swiglu", "geglu_tanh") else ()
    experts = experts_of(model, layer)
    linear: dict[str, tuple[int, ...]] = {
        "up": (experts, *two, moe.expert_ffn_hidden, h),
        "down": (experts, h, moe.expert_ffn_hidden),
    }
    if moe.shared_ffn_hidden is not None:
        linear |= {
            "shared.up": (*two, moe.shared_ffn_hidden, h),
            "shared.down": (h, moe.shared_ffn_hidden),
        }
    name = f"layers.{layer}.moe"
    out = {f"{name}.router.weight": (experts, h)}
    if moe.bias_update_rate is not None:
        out[f"{name}.router.bias"] = (experts,)
    if (counts := counts_of(f"{name}.router", model)) is not None:
        out[counts] = (experts,)
    for each, shape in linear.items():
        out[f"{name}.{each}.weight"] = shape
        if model.bias:
            out[f"{name}.{each}.bias"] = shape[:-1]
    if moe.shared_gate != "none":
        out[f"{name}.shared_gate.weight"] = (1 if moe.shared_gate == "sigmoid" else 2, h)
    return out


def mixture(
    x: Tensor,
    params: Mapping[str, Tensor],
    name: str,
    model: ModelConfig,
    mlp: Callable[[Tensor, Mapping[str, Tensor], str], Tensor],
    told: Told,
    noise: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Apply an MoE layer, [b, s, h] -> [b, s, h]; `mlp` is an MLP of (x, parameters, their name).
    `noise` are factors of the router's input [b, s, h], and numbers [b, s] by which second choices
    are kept."""
    moe, (b, s, _) = model.moe, x.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    seen = x.to(wide) if noise is None else x.to(wide) * noise[0].to(wide)
    logits = seen @ params[f"{name}.router.weight"].to(wide).T  # [b, s, E]
    p = logits.softmax(-1) if moe.score_function == "softmax" else logits.sigmoid()
    ranked = p + params[f"{name}.router.bias"].to(wide) if moe.bias_update_rate is not None else p
    given = told.given[len(told.ranked)] if told.given else None
    if given is None:
        chosen = [[choose(ranked[row, t].tolist(), model) for t in range(s)] for row in range(b)]
    else:
        chosen = torch.where(given < 0, ~given, given).tolist()
    weights = [[_weights(p[row, t], chosen[row][t], model) for t in range(s)] for row in range(b)]
    told.ranked.append(ranked.detach())
    told.weights.append(torch.stack([torch.stack(row) for row in weights]).detach())
    if given is None:
        drawn = None if noise is None else noise[1]
        dropped = dropped_of(chosen, told.weights[-1], drawn, model, p.shape[-1])
    else:
        dropped = {tuple(each) for each in (given < 0).nonzero().tolist()}
    samples = []
    for row in range(b):
        tokens = []
        for t in range(s):
            y = torch.zeros(x.shape[-1], dtype=wide)
            for j, expert in enumerate(chosen[row][t]):
                if (row, t, j) not in dropped:
                    own = {
                        f"{each}.{kind}": _used(params[f"{name}.{each}.{kind}"], t)[expert]
                        for each in ("up", "down")
                        for kind in ("weight", "bias")
                        if f"{name}.{each}.{kind}" in params
                    }
                    for part in range(told.wire.parts):
                        here = _part(own, part, told.wire.parts)
                        z = mlp(told.wire.pass_on(x[row, t]), here, "expert").to(wide)
                        y = y + told.wire.pass_on(weights[row][t][j] * z)
            tokens.append(y)
        samples.append(torch.stack(tokens))
    counts = counts_of(f"{name}.router", model)
    _tell(told, logits, p, chosen, model, None if counts is None else params[counts].tolist())
    told.dropped.append(dropped)
    return _beside(torch.stack(samples).to(x.dtype), x, params, name, model, mlp)


def _used(values: Tensor, position: int) -> Tensor:
    """Return the values with which a position computes, if positions have copies of their own
    (:mod:`tests.parity.by_position`)."""
    return values.at(position) if hasattr(values, "at") else values


def _part(own: Mapping[str, Tensor], part: int, parts: int) -> dict[str, Tensor]:
    """Return a part of an expert with some of its inner values; the first part has the last
    bias."""
    inner = {"up.weight": -2, "up.bias": -1, "down.weight": -1}
    here = {
        f"expert.{name}": value.chunk(parts, inner[name])[part] if name in inner else value
        for name, value in own.items()
    }
    if part:
        here.pop("expert.down.bias", None)
    return here


def choose(p: list[float], model: ModelConfig) -> list[int]:
    moe, size = model.moe, len(p) // model.moe.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(moe.num_groups)]
    two = [sum(sorted((p[e] for e in group), reverse=True)[:2]) for group in groups]
    best = sorted(range(moe.num_groups), key=lambda g: (-two[g], g))[: moe.topk_groups]
    allowed = [e for g in best for e in groups[g]]
    return sorted(allowed, key=lambda e: (-p[e], e))[: moe.top_k]


def kept(name: str) -> bool:
    """Whether a value is router state, moved by choices and not by a gradient."""
    return name.endswith((".router.bias", "counts"))


def of_experts(name: str) -> bool:
    """Whether a parameter belongs to experts, and not to their router or a shared expert."""
    return ".moe.up." in name or ".moe.down." in name


def moved(
    params: Mapping[str, Tensor],
    model: ModelConfig,
    counts: Sequence[Sequence[int]],
    counted: Sequence[Sequence[int]],
) -> dict[str, Tensor]:
    """Return router state after a step with `counts` choices of each expert of each layer. The
    auxiliary loss counts `counted` of them."""
    out: dict[str, Tensor] = {}
    layers = [layer for layer in range(model.layers) if has_experts(model, layer)]
    for layer, of_layer, kept_of_layer in zip(layers, counts, counted, strict=True):
        name, mean = f"layers.{layer}.moe.router", Fraction(sum(of_layer), len(of_layer))
        if model.moe.bias_update_rate is not None:
            bias = params[f"{name}.bias"]
            signs = torch.tensor([(count < mean) - (count > mean) for count in of_layer])
            out[f"{name}.bias"] = bias + model.moe.bias_update_rate * signs.to(bias.dtype)
        if (last := counts_of(name, model)) is not None:
            out[last] = torch.tensor(kept_of_layer, dtype=params[last].dtype)
    return out


def _weights(p: Tensor, chosen: list[int], model: ModelConfig) -> Tensor:
    weight = torch.stack([p[e] for e in chosen])
    if model.moe.norm_topk_prob:
        weight = weight / weight.sum()
    return weight * model.moe.routed_scaling_factor


def dropped_of(
    chosen: list[list[list[int]]],
    weights: Tensor,
    drawn: Tensor | None,
    model: ModelConfig,
    experts: int,
) -> set[tuple[int, int, int]]:
    """Return the (sample, position, number of the choice) of dropped choices, among choices
    [b][s][k] of `experts` with weights [b, s, k]. Second ones are dropped by numbers from 0 to 1,
    [b, s]."""
    dropped = set()
    for row, choices in enumerate(chosen):
        numbers = None if drawn is None else drawn[row].tolist()
        unchosen = _left_out(weights[row].tolist(), numbers, model)
        full = _full(choices, weights[row].tolist(), unchosen, model, experts)
        dropped |= {(row, *each) for each in unchosen | full}
    return dropped


def _left_out(
    weights: list[list[float]], drawn: list[float] | None, model: ModelConfig
) -> set[tuple[int, int]]:
    """Return the (position, 1) of a sequence's dropped second choices, by numbers from 0 to 1."""
    if model.moe.second_expert == "always" or drawn is None:
        return set()
    shares = [weight[1] / model.moe.routed_scaling_factor for weight in weights]
    return {(t, 1) for t, share in enumerate(shares) if 2 * share <= drawn[t]}


def _full(
    chosen: list[list[int]],
    weights: list[list[float]],
    unchosen: set[tuple[int, int]],
    model: ModelConfig,
    experts: int,
) -> set[tuple[int, int]]:
    """Return the (position, number of the choice) of a sequence's choices whose expert, one of
    `experts`, is full. Choices that are left out take no capacity."""
    moe, s = model.moe, len(chosen)
    if moe.capacity_factor is None:
        return set()
    places = math.ceil(Fraction(repr(moe.capacity_factor)) * moe.top_k * s / experts)
    choices = [(t, j) for t in range(s) for j in range(moe.top_k)]
    first = {
        "choice": lambda c: (c[1], c[0]),
        "position": lambda c: c,
        "score": lambda c: (-weights[c[0]][c[1]], c),
    }[moe.drop_policy]
    taken = [0] * experts
    out = set()
    for t, j in sorted(set(choices) - unchosen, key=first):
        expert = chosen[t][j]
        if taken[expert] == places:
            out.add((t, j))
        else:
            taken[expert] += 1
    return out


def _tell(
    told: Told,
    logits: Tensor,
    p: Tensor,
    chosen: list[list[list[int]]],
    model: ModelConfig,
    last: list[float] | None,
) -> None:
    """Record the terms of a layer, for all positions of the global batch; `last` are the choices of
    the step before, if they count."""
    moe, (b, s, experts) = model.moe, p.shape
    scope = {"sequence": 1, "microbatch": told.rows, "step": b}[moe.aux_loss_scope]
    k = 1 if moe.aux_loss_choices == "first" else moe.top_k
    q = p / p.sum(-1, keepdim=True)
    balance = torch.zeros((), dtype=p.dtype)
    for start in range(0, b, scope):
        rows = range(start, min(b, start + scope))
        counts = [0] * experts
        for row in rows:
            for t in range(s):
                for expert in chosen[row][t][:k]:
                    counts[expert] += 1
        tokens = len(rows) * s
        for e in range(experts):
            share = experts * counts[e] / (k * tokens)
            if last is not None:
                share = experts * last[e] / sum(last)
            for row in rows:
                weight = told.wire.distance(row, e, experts) / (b * s)
                balance = balance + share * weight * q[row, :, e].sum()
    z = logits.logsumexp(-1).square().mean()
    told.terms.append(moe.aux_loss_coeff * balance + moe.z_loss_coeff * z)
    told.balance.append(balance.item())
    told.z.append(z.item())
    for found, number in ((told.counts, moe.top_k), (told.counted, k)):
        every = [e for row in chosen for token in row for e in token[:number]]
        found.append([every.count(e) for e in range(experts)])


def _beside(
    y: Tensor,
    x: Tensor,
    params: Mapping[str, Tensor],
    name: str,
    model: ModelConfig,
    mlp: Callable[[Tensor, Mapping[str, Tensor], str], Tensor],
) -> Tensor:
    """Add the shared expert, if there is one."""
    moe = model.moe
    if moe.shared_ffn_hidden is None:
        return y
    z = mlp(x, params, f"{name}.shared")
    if moe.shared_gate == "none":
        return y + z
    gate = F.linear(x, params[f"{name}.shared_gate.weight"])
    if moe.shared_gate == "sigmoid":
        return y + gate.sigmoid() * z
    share = gate.softmax(-1)
    return share[..., :1] * y + share[..., 1:] * z
