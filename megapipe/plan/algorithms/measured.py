"""The problem of a configuration: costs of the model's parts, measured on the meta device.

A model with three stages (embedding and a layer, the inner layers, a layer and the head) is
planned for each tensor-parallel degree and micro-batch size, with and without recomputation. Times
and bytes of an inner layer are means. The first half of a dense layer, attention, has the part of
the layer's time and activations that its kernels take of the forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import inf, prod

from pydantic import BaseModel

from megapipe.config.config import Config
from megapipe.errors import ConfigError, MegapipeError
from megapipe.layout.devices import device_kind
from megapipe.layout.p2p import link_speed
from megapipe.plan.algorithms.problem import ChainUnit, Links, Problem, UnitCost
from megapipe.plan.cache import key_of
from megapipe.plan.communicators import beside_tensors
from megapipe.plan.kernel_time import KernelTime
from megapipe.plan.memory_fit import process_memory
from megapipe.plan.search.layouts import (
    VARIED,
    LayoutChoice,
    Shape,
    value_of,
    with_keys,
    words_of,
)
from megapipe.plan.search.planner import Planner
from megapipe.plan.search.search import Search
from megapipe.plan.step_time import timed_cost
from megapipe.plan.unit import Kernel
from megapipe.plan.units import Units
from megapipe.schedule.ir import Kind

STAGES, REPLICAS = 3, 2
"""Numbers of stages and of replicas with which a model is measured."""
SIZES = (1, 2, 4)
"""Numbers of samples of a micro-batch that are measured."""

MOST_CUTS = 40
"""Number of layers above which planners cut only after every second layer, every third, and so
on."""


class PartCosts(BaseModel):
    """Costs of a model's parts at one tensor-parallel degree and micro-batch size."""

    embedding: UnitCost
    layer: UnitCost
    head: UnitCost
    attention: float | None
    """Part of a layer's forward before the MLP, from 0 to 1; None if that is not known."""
    attention_weights: float
    """Part of a layer's weights before the MLP."""
    besides: float
    """Bytes of a process besides weights, gradients, states and saved activations."""


def measured_problem(search: Search) -> Problem:
    """Measure the problem of a configuration on the devices of a search. Keys that the search
    varies may only be fixed for the tensor-parallel degree and the micro-batch size.

    Raises:
        ConfigError: another key is fixed, or no degree can be measured.
    """
    own = ("parallel.tp", "train.microbatch")
    for key in VARIED:
        if key not in search.free and key not in own:
            word = words_of({key: value_of(search.config, key)})[0]
            raise ConfigError(
                f"{word}: a published planner chooses this key: expected at most "
                + " and ".join(own)
            )
    refusals: list[str] = []
    parts = dict(_measured(search, refusals))
    if not parts:
        why = f"; for example: {refusals[0]}" if refusals else ""
        raise ConfigError(f"no tensor-parallel degree can be planned on {search.gpus} devices{why}")
    room = search.speeds.plannable_bytes
    batch = search.config.train.global_batch
    chain, cuts = _chain(parts, search.config.model.layers)
    microbatch = min(size for _, size in parts)
    return Problem(
        units=chain,
        devices=search.gpus,
        microbatches=batch // microbatch,
        samples=microbatch,
        memory=inf if room is None else room - max(each.besides for each in parts.values()),
        links=_links(search),
        cuts=cuts,
        tried=cuts[:: -(-search.config.model.layers // MOST_CUTS)],
        whole_samples=True,
    )


def _measured(search: Search, refusals: list[str]) -> Iterator[tuple[tuple[int, int], PartCosts]]:
    """Yield the costs of each tensor-parallel degree and micro-batch size that can be measured;
    list in `refusals` why others cannot."""
    for tp, size in _shapes(search):
        key = key_of(
            parts=search.config.model_dump(mode="json", exclude={"run"}),
            at=[tp, size],
            device=[repr(search.speeds), device_kind(search.config)],
        )
        try:
            measure = partial(_parts, search, tp, size)
            yield (tp, size), search.planner.cache.get(key, PartCosts, measure)
        except MegapipeError as error:
            refusals.append(str(error))


def _shapes(search: Search) -> Iterator[tuple[int, int]]:
    """Yield tensor-parallel degrees and micro-batch sizes to measure."""
    config, free = search.config, search.free
    heads = config.model.kv_heads or config.model.heads
    most = min(config.parallel.ranks_per_node, search.gpus)
    degrees = [n for n in range(1, most + 1) if most % n == heads % n == search.gpus % n == 0]
    for tp in degrees if "parallel.tp" in free else [config.parallel.tp]:
        for size in SIZES if "train.microbatch" in free else [config.train.microbatch]:
            if config.train.global_batch % size == 0:
                yield tp, size


def _parts(search: Search, tp: int, size: int) -> PartCosts:
    """Measure the parts of a model."""
    kept, full = (
        _units(search, Shape(tp, 1, 1, size, policy, tp > 1)) for policy in ("keep", "full")
    )
    layout, inner = kept.layout, kept.layout.model.layers - 2
    memory = process_memory(kept)
    again = _backward(full, search)
    costs: list[UnitCost] = []
    besides = 0.0
    times = timed_cost(kept, search.speeds)
    table = times.table(STAGES)
    for stage, backward in enumerate(_backward(kept, search)):
        model, activations = memory[stage]
        held = sum(unit.held for unit in kept.of(stage))
        I, W = float(table[Kind.I][stage]), float(table[Kind.W][stage])  # noqa: E741
        costs.append(
            UnitCost(
                forward=float(table[Kind.F][stage]),
                input_grad=backward * I / (I + W),
                weight_grad=backward * W / (I + W),
                recompute=max(0.0, again[stage] - backward),
                weights=model.parameters + model.gradients,
                states=REPLICAS * model.optimizer,
                # an all-reduce: the main gradients are reduced, and the weights gathered
                gradients=(model.gradients + model.parameters) / 2,
                saved=held,
                saved_recompute=min(held, sum(unit.held for unit in full.of(stage))),
                message=float(times.message),
                reduced=model.gradients,
            )
        )
        alive = activations.device - (STAGES - stage) * held
        beside = beside_tensors(kept.config, layout, stage) if layout.device == "cuda" else 0
        transient = max(0.0, model.transient - model.gradients / REPLICAS)
        besides = max(besides, transient + alive + beside)
    first, middle, last = costs
    layer = middle.scaled(1 / inner)._replace(
        weights=middle.weights / inner,
        states=middle.states / inner,
        gradients=middle.gradients / inner,
        reduced=middle.reduced / inner,
        message=middle.message,
    )
    embedding, head = (_without(each, layer) for each in (first, last))
    attention, weights = _attention(kept, search, inner)
    return PartCosts(
        embedding=embedding._replace(message=middle.message),
        layer=layer,
        head=head._replace(message=0.0),
        attention=attention,
        attention_weights=weights,
        besides=besides,
    )


def _units(search: Search, shape: Shape) -> Units:
    """Resolve the model in three stages."""
    keys = {
        "pipeline.stage_layout": [1, search.config.model.layers - 2, 1],
        "train.global_batch": STAGES * REPLICAS * shape.microbatch,
    }
    world = STAGES * REPLICAS * shape.tp
    planner = Planner(with_keys(search.config, keys), world, search.planner.cache)
    return planner.units(LayoutChoice(shape, REPLICAS, STAGES, "1f1b", None, 1))


def _backward(units: Units, search: Search) -> list[float]:
    """Return the seconds of the whole backward of each stage."""
    return [float(each) for each in timed_cost(units, search.speeds).table(STAGES)[Kind.B]]


def _without(both: UnitCost, layer: UnitCost) -> UnitCost:
    """Return the costs of the part that a stage has besides a layer; no part recomputes for it."""
    rest = UnitCost(*(max(0.0, a - b) for a, b in zip(both, layer, strict=True)))
    return rest._replace(recompute=0.0, saved_recompute=rest.saved)


def _attention(units: Units, search: Search, inner: int) -> tuple[float | None, float]:
    """Return the parts of a layer's forward and of its weights that come before the MLP. A layer's
    second norm begins the MLP; a layer without exactly two norms is not divided."""
    found = units.of(1)
    kernels = [each for each in found[0].operations["F"] if isinstance(each, Kernel)]
    own = kernels[: len(kernels) // inner]
    norms = [index for index, each in enumerate(own) if "norm" in each.name]
    if len(found) != 1 or len(kernels) % inner or len(norms) != 2 or units.layout.model.experts():
        return None, 0.0
    time, model = KernelTime(search.speeds), units.layout.model
    first, whole = time.of(own[: norms[1]]).device, time.of(own).device
    every = list(model.parameters(units.layout.stage_layers[1]))
    mlp = sum(prod(each.shape) for each in every if ".mlp" in each.name)
    return first / whole, 1 - mlp / sum(prod(each.shape) for each in every)


def _chain(
    parts: Mapping[tuple[int, int], PartCosts], layers: int
) -> tuple[tuple[ChainUnit, ...], tuple[int, ...]]:
    """Return the units of the whole model, and the positions at which the trainer can cut it."""
    embedding = ChainUnit("embedding", {at: each.embedding for at, each in parts.items()})
    head = ChainUnit("head", {at: each.head for at, each in parts.items()})
    names = ("attention", "mlp") if all(each.attention for each in parts.values()) else ("layer",)
    shares = {at: _shares(each) for at, each in parts.items()}
    blocks = [
        ChainUnit(
            f"{name} {layer}",
            {at: _part(each.layer, *shares[at][number]) for at, each in parts.items()},
        )
        for layer in range(layers)
        for number, name in enumerate(names)
    ]
    cuts = tuple(range(1, 2 + len(blocks), len(names)))
    return (embedding, *blocks, head), cuts


def _shares(parts: PartCosts) -> Sequence[tuple[float, float]]:
    """Return the shares of time and of weights of a layer's units."""
    if parts.attention is None:
        return [(1.0, 1.0)]
    time, weights = parts.attention, parts.attention_weights
    return [(time, weights), (1 - time, 1 - weights)]


def _part(layer: UnitCost, time: float, weights: float) -> UnitCost:
    """Return the costs of a part of a layer. A part that recomputes saves its input, as a layer
    does."""
    found = layer.scaled(time)
    return found._replace(
        weights=weights * layer.weights,
        states=weights * layer.states,
        gradients=weights * layer.gradients,
        reduced=weights * layer.reduced,
        message=layer.message,
    )


def _links(search: Search) -> Links:
    config = _resolved(search)
    return Links(
        inside=1e9 * link_speed(config, within=True),
        between=1e9 * link_speed(config, within=False),
        per_node=config.parallel.ranks_per_node,
        latency=config.plan.link_latency_us / 1e6,
    )


def _resolved(search: Search) -> Config:
    """Return the configuration with the bandwidths of its device."""
    return _units(search, Shape(1, 1, 1, 1, "keep", False)).config
