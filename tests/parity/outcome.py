"""What the ranks of a case saw, and whole tensors built from their parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megapipe import TrainStep
from megapipe.checkpoint.regions import Region, flat_regions, whole
from megapipe.layers.moe.experts import RoutedExperts
from megapipe.layers.moe.specs import bias_name, counts_name
from megapipe.layers.parameter import LocalParameter, spec_of
from megapipe.optim.optimizer import Optimizer
from tests.parity.routing_margins import Found

Parts = list[tuple[str, Region, Any]]
"""(parameter, region of the whole tensor, numpy array of the values in it)."""
GROWS = {"adabelief": "optimizer.exp_avg_var", "adam3": "optimizer.exp_avg_sq"}
"""States to which each step adds eps, even in padding, by rule."""


@dataclass
class Outcome:
    """What one rank saw: its own part of gradients, weights and states, and the weights that it
    computes with.

    One entry per step; `values`, master weights ("model") and states, have one more, for the start.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    grads: list[Parts] = field(default_factory=list)
    values: list[dict[str, Parts]] = field(default_factory=list)
    copies: list[Parts] = field(default_factory=list)
    routing: list[tuple[float, ...]] = field(default_factory=list)
    chosen: list[Found] = field(default_factory=lambda: [[]])
    """Choices of experts, in validation and then in each step."""
    validation: float = 0.0


def take_region(full: Tensor, spec: LocalParameter, out: Tensor) -> None:
    """Copy this rank's region of a full tensor, leaving padding alone."""
    for inside, region in spec.global_regions():
        out[inside] = full[region.inside(whole(spec.shape))].to(out.dtype)


def _global(
    spec: LocalParameter, local: Region, values: Tensor, *, padded: bool = False
) -> Iterator[tuple[str, Region, np.ndarray[Any, Any]]]:
    padding = values.clone()
    for inside, region in spec.global_regions(local):
        yield spec.name, region, values[inside].double().cpu().clone().numpy()
        padding[inside] = 0
    assert padded or not padding.any(), f"{spec.name}: the padding is not zero"


def own_grads(optimizer: Optimizer) -> Iterator[tuple[str, Region, np.ndarray[Any, Any]]]:
    """Yield the reduced gradients of this rank's shards, before clipping."""
    for shard in optimizer.shards:
        for entry in shard.bucket.entries:
            a, b = max(entry.start, shard.own_start), min(entry.stop, shard.own_stop)
            mesh, whole_here = optimizer.mesh, not entry.spec.split
            index = mesh.rank % mesh.grid.etp if entry.spec.over_ep else mesh.tp.index
            if a >= b or (whole_here and index > 0):
                continue
            flat = shard.grad[shard.local(a, b)]
            for position, local in flat_regions(entry.spec.sizes, a - entry.start, b - entry.start):
                values = flat[position : position + local.numel].view(local.sizes)
                yield from _global(entry.spec, local, values)


def own_values(optimizer: Optimizer) -> dict[str, Parts]:
    """Return master weights ("model") and states of the slices for which this rank is primary."""
    parts: dict[str, Parts] = {}
    grows = GROWS.get(optimizer.config.rule)
    for own in optimizer.own_slices():
        for kind, flat in own.values.items():
            for position, local in flat_regions(own.spec.sizes, own.start, own.stop):
                values = flat[position : position + local.numel].view(local.sizes)
                found = _global(own.spec, local, values, padded=kind == grows)
                parts.setdefault(kind, []).extend(found)
    return parts


def kept_by_routers(step: TrainStep) -> Parts:
    """Return router state on the first rank, which is its primary; nothing on others."""
    pieces = step.routing.tensors() if step.mesh.rank == 0 else ()
    return [
        (piece.name.partition("/")[2], piece.region, piece.tensor.double().numpy().copy())
        for piece in pieces
    ]


def local_copies(step: TrainStep) -> Iterator[tuple[str, Region, np.ndarray[Any, Any]]]:
    """Yield every weight that this rank computes with, and its router state."""
    for stage, module in step.modules.items():
        step.optimizer.unshard(stage)
        step.optimizer.wait_weights(stage)
        for parameter in module.parameters():
            spec = spec_of(parameter)
            yield from _global(spec, whole(spec.sizes), parameter.detach())
        for layer in module.modules():
            if isinstance(layer, RoutedExperts):
                if layer.replicas is not None:
                    layer.replicas.wait_broadcast()
                counts = counts_name(layer.layer, layer.routing.first_only)
                for name, buffer in ((bias_name(layer.layer), layer.bias), (counts, layer.last)):
                    if buffer is not None:
                        values = buffer.flatten().double().cpu().clone().numpy()
                        yield name.partition("/")[2], whole(values.shape), values
        step.optimizer.reshard(stage)


def assemble(
    parts: Sequence[Sequence[tuple[str, Region, Any]]], like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Build full tensors from every rank's own parts, which have each element exactly once."""
    full = {
        name: torch.full(t.shape, float("nan"), dtype=torch.float64) for name, t in like.items()
    }
    for name, region, values in itertools.chain.from_iterable(parts):
        here = region.inside(whole(tuple(full[name].shape)))
        assert full[name][here].isnan().all(), f"{name} {region}: two ranks own it"
        full[name][here] = torch.from_numpy(values)
    return full
