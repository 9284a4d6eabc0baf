"""A plain mixture of experts: a loop over tokens and choices, on full tensors.

For the reader and not for speed, and without the package's code. Sorting is Python's, so of equal
scores the lower expert's goes first.
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
    """Ranks with parts of the same expert, each of which sends its own results."""
    near: tuple[tuple[float, ...], ...] = ()
    """Of each sample the bandwidths from its rank to those that have the experts, in the balance
    term; nothing: all count alike."""

    def distance(self, row: int, expert: int, experts: int) -> float:
        """Of an expert from the rank of a sample, on average over all experts 1."""
        if not self.near:
            return 1.0
        far = [1 / self.near[row][e * len(self.near[row]) // experts] for e in range(experts)]
        return far[expert] * experts / sum(far)

    def pass_on(self, rows: Tensor) -> Tensor:
        """Rows as they arrive; their gradients come back the same way."""
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
    """A row [h] as a codec leaves it."""
    if codec == "bf16":
        return row.to(torch.bfloat16).to(row.dtype)
    step = max(row.abs().max().item() / 127, 2.0**-126)
    step = torch.tensor(step, dtype=torch.float32).item()
    return torch.tensor([round(x / step) * step for x in row.tolist()], dtype=row.dtype)


@dataclass
class Told:
    """What the layers of a model with experts add to the loss, and tell."""

    rows: int
    """Samples of a micro-batch."""
    terms: list[Tensor] = field(default_factory=list)
    """Balance and z terms with their coefficients, of each layer that has experts."""
    balance: list[float] = field(default_factory=list)
    """Without them: 1 where tokens are spread evenly."""
    z: list[float] = field(default_factory=list)
    counts: list[list[int]] = field(default_factory=list)
    """Choices of each expert, dropped ones too."""
    counted: list[list[int]] = field(default_factory=list)
    """Those of them that the balance term counts."""
    dropped: list[set[tuple[int, int, int]]] = field(default_factory=list)
    """(sample, position, number of the choice)."""
    given: Sequence[Tensor] = ()
    """The choices of each layer with experts, [b, s, k], ~expert where one is dropped; by default
    they are made."""
    wire: Wire = Wire()
    ranked: list[Tensor] = field(default_factory=list)
    """[b, s, experts]: what tokens choose by."""
    weights: list[Tensor] = field(default_factory=list)
    """[b, s, k]: those of the choices."""


def has_experts(model: ModelConfig, layer: int) -> bool:
    moe = model.moe
    if moe.experts is None or layer < moe.dense_first or layer in moe.dense_layers:
        return False
    return (layer - moe.dense_first) % moe.every == moe.every - 1


def experts_of(model: ModelConfig, layer: int) -> int:
    """The number of a layer that has some: of a list, the number after those of the layers before
    it that have some."""
    numbers = model.moe.experts
    if isinstance(numbers, list):
        return numbers[[has_experts(model, n) for n in range(layer)].count(True)]
    assert numbers is not None
    return numbers


def counts_of(name: str, model: ModelConfig) -> str | None:
    """The name of what a router keeps of the choices of a step, if the balance term goes by it."""
    if model.moe.balance_scope != "step":
        return None
    return f"{name}.{'first_counts' if model.moe.balance_choices == 'first' else 'counts'}"


def tells_first(model: ModelConfig) -> bool:
    """Whether a run tells first choices beside all: if they are kept."""
    return (model.moe.balance_scope, model.moe.balance_choices) == ("step", "first")


def shapes(model: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Weights and, with biases, those of a layer's experts, their router and what is beside."""
    moe, h = model.moe, model.hidden
    two = (2,) if model.activation in ("swiglu", "geglu_tanh") else ()
    experts = experts_of(model, layer)
    linear: dict[str, tuple[int, ...]] = {
        "up": (experts, *two, moe.ffn, h),
        "down": (experts, h, moe.ffn),
    }
    if moe.shared is not None:
        linear |= {"shared.up": (*two, moe.shared, h), "shared.down": (h, moe.shared)}
    name = f"layers.{layer}.moe"
    out = {f"{name}.router.weight": (experts, h)}
    if moe.bias_rate is not None:
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
    """[b, s, h] -> [b, s, h]; `mlp` is that of (x, parameters, their name). `noise` are the factors
    of the router's input [b, s, h], and the numbers [b, s] by which second choices are kept."""
    moe, (b, s, _) = model.moe, x.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    seen = x.to(wide) if noise is None else x.to(wide) * noise[0].to(wide)
    logits = seen @ params[f"{name}.router.weight"].to(wide).T  # [b, s, E]
    p = logits.softmax(-1) if moe.scores == "softmax" else logits.sigmoid()
    ranked = p + params[f"{name}.router.bias"].to(wide) if moe.bias_rate is not None else p
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
    """Those with which a position computes, where positions have copies of their own
    (:mod:`tests.parity.by_position`)."""
    return values.at(position) if hasattr(values, "at") else values


def _part(own: Mapping[str, Tensor], part: int, parts: int) -> dict[str, Tensor]:
    """The part of an expert with some of its inner values; the first one has the last bias."""
    inner = {"up.weight": -2, "up.bias": -1, "down.weight": -1}
    here = {
        f"expert.{name}": value.chunk(parts, inner[name])[part] if name in inner else value
        for name, value in own.items()
    }
    if part:
        here.pop("expert.down.bias", None)
    return here


def choose(p: list[float], model: ModelConfig) -> list[int]:
    moe, size = model.moe, len(p) // model.moe.groups
    groups = [range(g * size, (g + 1) * size) for g in range(moe.groups)]
    two = [sum(sorted((p[e] for e in group), reverse=True)[:2]) for group in groups]
    best = sorted(range(moe.groups), key=lambda g: (-two[g], g))[: moe.group_top_k]
    allowed = [e for g in best for e in groups[g]]
    return sorted(allowed, key=lambda e: (-p[e], e))[: moe.top_k]


def kept(name: str) -> bool:
    """Whether it is of a router, and moved by choices and by no gradient."""
    return name.endswith((".router.bias", "counts"))


def of_experts(name: str) -> bool:
    """Whether a parameter is of experts, and not of their router or of an MLP beside them."""
    return ".moe.up." in name or ".moe.down." in name


def moved(
    params: Mapping[str, Tensor],
    model: ModelConfig,
    counts: Sequence[Sequence[int]],
    counted: Sequence[Sequence[int]],
) -> dict[str, Tensor]:
    """What routers keep after a step with so many choices of each expert of each layer, of which
    the balance term counts some."""
    out: dict[str, Tensor] = {}
    layers = [layer for layer in range(model.layers) if has_experts(model, layer)]
    for layer, of_layer, kept_of_layer in zip(layers, counts, counted, strict=True):
        name, mean = f"layers.{layer}.moe.router", Fraction(sum(of_layer), len(of_layer))
        if model.moe.bias_rate is not None:
            bias = params[f"{name}.bias"]
            signs = torch.tensor([(count < mean) - (count > mean) for count in of_layer])
            out[f"{name}.bias"] = bias + model.moe.bias_rate * signs.to(bias.dtype)
        if (last := counts_of(name, model)) is not None:
            out[last] = torch.tensor(kept_of_layer, dtype=params[last].dtype)
    return out


def _weights(p: Tensor, chosen: list[int], model: ModelConfig) -> Tensor:
    weight = torch.stack([p[e] for e in chosen])
    if model.moe.normalise:
        weight = weight / weight.sum()
    return weight * model.moe.scale


def dropped_of(
    chosen: list[list[list[int]]],
    weights: Tensor,
    drawn: Tensor | None,
    model: ModelConfig,
    experts: int,
) -> set[tuple[int, int, int]]:
    """(sample, position, number of the choice) of choices [b][s][k] of so many `experts` that are
    not made, by their weights [b, s, k]; second ones by numbers of 0 to 1, [b, s]."""
    dropped = set()
    for row, choices in enumerate(chosen):
        numbers = None if drawn is None else drawn[row].tolist()
        left_out = _left_out(weights[row].tolist(), numbers, model)
        full = _full(choices, weights[row].tolist(), left_out, model, experts)
        dropped |= {(row, *each) for each in left_out | full}
    return dropped


def _left_out(
    weights: list[list[float]], drawn: list[float] | None, model: ModelConfig
) -> set[tuple[int, int]]:
    """(position, 1) of a sequence's second choices that are not made, by numbers of 0 to 1."""
    if model.moe.second == "always" or drawn is None:
        return set()
    shares = [weight[1] / model.moe.scale for weight in weights]
    return {(t, 1) for t, share in enumerate(shares) if 2 * share <= drawn[t]}


def _full(
    chosen: list[list[int]],
    weights: list[list[float]],
    left_out: set[tuple[int, int]],
    model: ModelConfig,
    experts: int,
) -> set[tuple[int, int]]:
    """(position, number of the choice) of a sequence's choices whose expert, of so many, is full;
    those that are left out ask for no place."""
    moe, s = model.moe, len(chosen)
    if moe.capacity is None:
        return set()
    places = math.ceil(Fraction(repr(moe.capacity)) * moe.top_k * s / experts)
    choices = [(t, j) for t in range(s) for j in range(moe.top_k)]
    first = {
        "choice": lambda c: (c[1], c[0]),
        "position": lambda c: c,
        "score": lambda c: (-weights[c[0]][c[1]], c),
    }[moe.drop]
    taken = [0] * experts
    out = set()
    for t, j in sorted(set(choices) - left_out, key=first):
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
    """The terms of a layer, of all positions of the global batch; `last` are the choices of the
    step before, if they count."""
    moe, (b, s, experts) = model.moe, p.shape
    scope = {"sequence": 1, "microbatch": told.rows, "step": b}[moe.balance_scope]
    k = 1 if moe.balance_choices == "first" else moe.top_k
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
    told.terms.append(moe.balance * balance + moe.z * z)
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
    """With the MLP that takes every token, if there is one."""
    moe = model.moe
    if moe.shared is None:
        return y
    z = mlp(x, params, f"{name}.shared")
    if moe.shared_gate == "none":
        return y + z
    gate = F.linear(x, params[f"{name}.shared_gate.weight"])
    if moe.shared_gate == "sigmoid":
        return y + gate.sigmoid() * z
    share = gate.softmax(-1)
    return share[..., :1] * y + share[..., 1:] * z
