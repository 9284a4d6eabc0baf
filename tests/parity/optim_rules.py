"""Update rules on whole tensors, in plain torch, and the shards to compare with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from megapipe.config.config import OptimizerConfig
from megapipe.config.model import ModelConfig
from megapipe.distributed.mesh import Axis
from megapipe.layers.parameter import TORCH_DTYPES, LocalParameter, Sharding
from megapipe.model.gpt.stage import GPTStage
from megapipe.model.partition import StageSpec
from megapipe.optim.buffers import Bucket, owned_parameters
from megapipe.optim.rules import Rule, build_rule
from megapipe.optim.shard import Shard
from megapipe.optim.state_store import StatePolicy
from tests.parity.families import shapes_of
from tests.parity.plain_rules import is_hidden as is_hidden
from tests.parity.plain_rules import is_matrix, step

Tensors = dict[str, Tensor]
RATES = (1e-2, 2e-2, 5e-3)
"""Learning rates of the steps that tests take."""


def model(dtype: str = "fp64", hidden: int = 12) -> ModelConfig:
    """Describe a model with every kind of parameter: two queries to a key, a padded vocabulary,
    positions, gated MLPs, biases, a free head. With 16 `hidden` values no segment is padded."""
    config = ModelConfig(
        layers=2,
        hidden=hidden,
        heads=8,
        kv_heads=4,
        head_dim=3,
        ffn_hidden=20,
        vocab_size=11,
        activation="swiglu",
        positions="learned",
        tied_embeddings=False,
        dtype=dtype,
    )
    return config.resolved(vocab_size=11, sequence_length=6)


def draw(config: ModelConfig, what: str, seed: int, dtype: torch.dtype) -> Tensors:
    """Draw a random tensor for each parameter; scales differ from one to the next."""
    drawn: Tensors = {}
    for i, (name, shape) in enumerate(shapes_of(config).items()):
        generator = torch.Generator().manual_seed(1000 * seed + i + (500 if what == "grad" else 0))
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        drawn[name] = (values * (0.2 + i % 7)).to(dtype)
    return drawn


# Plain rules. Each takes whole tensors through all steps.


def torch_rule(make: Callable[..., torch.optim.Optimizer], **settings: Any) -> Any:
    """Wrap one of torch's optimizers, unfused, with decay for matrices alone. Its products of
    scalars are in fp64, as Python's are."""

    def run(weights: Tensors, config: OptimizerConfig, grads: Sequence[Tensors]) -> Tensors:
        parameters = {name: Parameter(value.clone()) for name, value in weights.items()}
        groups = [
            {
                "params": [p for name, p in parameters.items() if is_matrix(name) == decay],
                "weight_decay": config.weight_decay if decay else 0.0,
            }
            for decay in (True, False)
        ]
        rule = make(groups, lr=1.0, foreach=False, **settings)
        for lr, grad in zip(RATES, grads, strict=True):
            for group in rule.param_groups:
                group["lr"] = lr
            for name, parameter in parameters.items():
                parameter.grad = grad[name].clone()
            usual = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            rule.step()
            torch.set_default_dtype(usual)
        return {name: parameter.detach() for name, parameter in parameters.items()}

    return run


def by_formula(weights: Tensors, config: OptimizerConfig, grads: Sequence[Tensors]) -> Tensors:
    """Take the steps with the formulas of plain_rules."""
    weights = dict(weights)
    states: dict[str, Tensors] = {name: {} for name in weights}
    for count, (lr, grad) in enumerate(zip(RATES, grads, strict=True)):
        for name, weight in weights.items():
            weights[name], states[name] = step(
                config, name, weight, grad[name], states[name], lr, count, model=model()
            )
    return weights


class Plain(NamedTuple):
    """A rule: its options, and its expected effect on whole tensors."""

    rule: str
    options: dict[str, Any]
    run: Callable[[Tensors, OptimizerConfig, Sequence[Tensors]], Tensors]

    @property
    def config(self) -> OptimizerConfig:
        given = {"rule": self.rule, "options": self.options, "weight_decay": 0.3}
        return OptimizerConfig.model_validate(given)


_ADAM = {"betas": [0.8, 0.9], "eps": 1e-6}
_TORCH_ADAM = {"betas": (0.8, 0.9), "eps": 1e-6}

PLAIN: dict[str, Plain] = {
    "adamw": Plain("adamw", _ADAM, torch_rule(torch.optim.AdamW, **_TORCH_ADAM)),
    "adam": Plain("adam", _ADAM, torch_rule(torch.optim.Adam, **_TORCH_ADAM)),
    "sgd": Plain(
        "sgd", {"momentum": 0.7, "nesterov": False}, torch_rule(torch.optim.SGD, momentum=0.7)
    ),
    "sgd nesterov": Plain(
        "sgd", {"momentum": 0.7}, torch_rule(torch.optim.SGD, momentum=0.7, nesterov=True)
    ),
    "sgd plain": Plain("sgd", {"momentum": 0.0}, torch_rule(torch.optim.SGD)),
    "lion": Plain("lion", {"betas": [0.8, 0.95]}, by_formula),
    "rmsprop": Plain(
        "rmsprop",
        {"momentum": 0.7, "alpha": 0.9, "eps": 1e-6},
        torch_rule(torch.optim.RMSprop, momentum=0.7, alpha=0.9, eps=1e-6),
    ),
    "rmsprop plain": Plain(
        "rmsprop",
        {"momentum": 0.0, "alpha": 0.9, "eps": 1e-6},
        torch_rule(torch.optim.RMSprop, alpha=0.9, eps=1e-6),
    ),
    "nadamw": Plain(
        "nadamw",
        {"momentum_decay": 0.3, **_ADAM},
        torch_rule(
            torch.optim.NAdam, momentum_decay=0.3, decoupled_weight_decay=True, **_TORCH_ADAM
        ),
    ),
    "adabelief": Plain("adabelief", _ADAM, by_formula),
    "adam3": Plain("adam3", _ADAM, by_formula),
    "lars": Plain("lars", {"trust_coefficient": 0.3}, by_formula),
    "lamb": Plain("lamb", _ADAM, by_formula),
    "muon": Plain("muon", {"momentum": 0.9, **_ADAM}, by_formula),
    "muon original": Plain(
        "muon",
        {"adjust_lr_fn": "original", "split_qkv": "none", "nesterov": False, **_ADAM},
        by_formula,
    ),
    "muon by head": Plain("muon", {"split_qkv": "heads", **_ADAM}, by_formula),
}


def expected(name: str, dtype: torch.dtype = torch.float64) -> Tensors:
    """Return the weights after steps of the plain rule with the learning rates RATES."""
    config = model()
    grads = [draw(config, "grad", step, dtype) for step in range(len(RATES))]
    return PLAIN[name].run(draw(config, "weight", 0, dtype), PLAIN[name].config, grads)


# Shards of the real thing.


def take_region(whole: Tensor, spec: LocalParameter) -> Tensor:
    """Return this rank's region of a global tensor, with zeros beyond the tensor's end."""
    region = whole.new_zeros(spec.sizes)
    cut = whole[tuple(slice(o, o + n) for o, n in zip(spec.offsets, spec.sizes, strict=True))]
    region[tuple(slice(n) for n in cut.shape)] = cut
    return region


def make_shard(
    rule: Rule,
    axis: Axis,
    tp: Axis,
    dtype: str = "fp64",
    policy: StatePolicy | None = None,
    device: str = "cpu",
    *,
    velocity: bool = False,
    hidden: int = 12,
) -> Shard:
    """Make this rank's shard of the one bucket of a whole model."""
    config = model(dtype, hidden)
    stage = StageSpec(embedding=True, layers=range(config.layers), head=True)
    module = GPTStage(config, stage, Sharding(tp, False, TORCH_DTYPES[dtype]))
    bucket = Bucket(0, list(owned_parameters(module)), axis, torch.device(device))
    shard = Shard(bucket, tp, rule.states, policy, velocity=velocity)
    weights = draw(config, "weight", 0, torch.float64)
    for entry in bucket.entries:
        shard.set_weights(entry, take_region(weights[entry.spec.name], entry.spec))
    return shard


def set_grad(shard: Shard, grads: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    flat = torch.zeros(shard.bucket.numel, dtype=dtype)
    for entry in shard.bucket.entries:
        region = take_region(grads[entry.spec.name], entry.spec)
        flat[entry.start : entry.stop] = region.reshape(-1).to(dtype)
    shard.grad = flat[shard.start : shard.stop].to(shard.weights.device, copy=True)


class Part(NamedTuple):
    """A rank's state after the steps: its flat slice, and the entries of its bucket."""

    start: int
    master: np.ndarray[Any, Any]
    entries: list[tuple[LocalParameter, int, int]]


def run_rule(
    name: str,
    axis: Axis,
    tp: Axis,
    *,
    dtype: str = "fp64",
    policy: StatePolicy | None = None,
    device: str = "cpu",
    spoil: Callable[[Rule], None] = lambda rule: None,
) -> Part:
    """Take the steps on this rank's shard."""
    rule = build_rule(PLAIN[name].config)
    shard = make_shard(rule, axis, tp, dtype, policy, device)
    spoil(rule)
    main = torch.float64 if dtype == "fp64" else torch.float32
    for count, lr in enumerate(RATES):
        set_grad(shard, draw(model(), "grad", count, torch.float64), main)
        rule.step([shard], lr, count)
    master = shard.store.read("model", 0, shard.stop - shard.start).cpu().clone().numpy()
    entries = [tuple(entry) for entry in shard.bucket.entries]
    return Part(shard.start, master, entries)


def assemble(parts: Sequence[Part]) -> Tensors:
    """Build whole tensors from the slices of all ranks; NaN where no rank has a value."""
    shapes = shapes_of(model())
    whole = {n: torch.full(s, float("nan"), dtype=torch.float64) for n, s in shapes.items()}
    by_region: dict[tuple[str, tuple[int, ...]], tuple[LocalParameter, Tensor]] = {}
    for part in parts:
        for spec, start, stop in part.entries:
            key = (spec.name, spec.offsets)
            empty = torch.full((spec.numel,), float("nan"), dtype=torch.float64)
            _, region = by_region.setdefault(key, (spec, empty))
            a, b = max(start, part.start), min(stop, part.start + len(part.master))
            if a < b:
                values = part.master[a - part.start : b - part.start]
                region[a - start : b - start] = torch.from_numpy(values)
    for (name, offsets), (spec, region) in by_region.items():
        target = whole[name][
            tuple(slice(o, o + n) for o, n in zip(offsets, spec.sizes, strict=True))
        ]
        target.copy_(region.view(spec.sizes)[tuple(slice(n) for n in target.shape)])
    return whole


def error(found: Tensors, wanted: Tensors) -> float:
    """Return the largest difference of any tensor, in units of that tensor's largest value."""
    assert found.keys() == wanted.keys()
    errors = [
        ((found[n].double() - wanted[n].double()).abs().max() / wanted[n].abs().max()).item()
        for n in wanted
    ]
    assert not any(e != e for e in errors), "some element is nobody's"
    return max(errors)
