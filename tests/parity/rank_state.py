"""What ranks hold in memory, with every replica, compared with naively read global tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from megapipe import TrainStep
from megapipe.layers.moe.experts import RoutedExperts
from megapipe.layers.moe.specs import bias_name, counts_name
from megapipe.layers.parameter import LocalParameter, spec_of
from tests.parity.naive_reader import BITS, Array, Global, in_type

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "int64"}
SIGNED = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types, by size in bytes, through which bits leave torch."""


class Held(NamedTuple):
    """Flat values of a global tensor on a rank. They start at position `start` of the rank's part.
    The part has these indices along each dimension, and may reach beyond the tensor."""

    entry: str
    dtype: str
    along: tuple[tuple[int, ...], ...]
    start: int
    bits: Array
    what: str
    """"own" (the rank writes it to checkpoints), "state" (it updates it), "weight" (it computes
    with it)."""


def held(step: TrainStep) -> list[Held]:
    """Return all that this rank holds: what it owns, all masters and states, its stages'
    weights."""
    return [*_own(step), *_states(step), *_weights(step), *_of_routers(step)]


def _own(step: TrainStep) -> Iterator[Held]:
    for own in step.optimizer.own_slices():
        for kind, values in own.values.items():
            yield _held(kind, own.spec, own.start, values, "own")


def _states(step: TrainStep) -> Iterator[Held]:
    """Yield all masters and states, including those that another rank writes to checkpoints."""
    optimizer = step.optimizer
    kinds = {"model": "model", **{name: f"optimizer.{name}" for name in optimizer.rule.states}}
    for shard in optimizer.shards:
        for entry in shard.bucket.entries:
            a, b = max(entry.start, shard.start), min(entry.stop, shard.stop)
            for name, kind in kinds.items() if a < b else ():
                values = shard.store.read(name, a - shard.start, b - shard.start)
                yield _held(kind, entry.spec, a - entry.start, values, "state")


def _weights(step: TrainStep) -> Iterator[Held]:
    for stage, module in step.modules.items():
        step.optimizer.unshard(stage)
        step.optimizer.wait_weights(stage)
        for parameter in module.parameters():
            yield _held("model", spec_of(parameter), 0, parameter.detach(), "weight")
        step.optimizer.reshard(stage)


def _of_routers(step: TrainStep) -> Iterator[Held]:
    """Yield router state, and the choices by which the expert maps were made. The first rank writes
    them."""
    beside = chain(step.routing.tensors(), step.maps.tensors())
    for piece in beside if step.mesh.rank == 0 else ():
        yield _whole(piece.name, piece.tensor, "own")
    layers = [layer for module in step.modules.values() for layer in module.modules()]
    for layer in layers:
        if isinstance(layer, RoutedExperts) and layer.bias is not None:
            yield _whole(bias_name(layer.layer), layer.bias, "weight")
        if isinstance(layer, RoutedExperts) and layer.last is not None:
            yield _whole(counts_name(layer.layer, layer.routing.first_only), layer.last[0], "state")


def _whole(name: str, values: Tensor, what: str) -> Held:
    """Return a tensor that is not split."""
    place = {"offsets": (0,), "sizes": tuple(values.shape), "owners": None}
    spec = SimpleNamespace(name=name.partition("/")[2], **place)
    return _held(name.partition("/")[0], cast(Any, spec), 0, values, what)


def _held(kind: str, spec: LocalParameter, start: int, values: Tensor, what: str) -> Held:
    bits = values.reshape(-1).clone().view(SIGNED[values.dtype.itemsize]).numpy()
    dtype = DTYPES[values.dtype]
    bits = bits.view(BITS[dtype])
    along = [tuple(range(o, o + n)) for o, n in zip(spec.offsets, spec.sizes, strict=True)]
    if spec.owners is not None:
        along[0] = tuple(spec.owners.map.owned(spec.owners.rank))
    return Held(f"{kind}/{spec.name}", dtype, tuple(along), start, bits, what)


def assert_held(ranks: Sequence[Sequence[Held]], tensors: Mapping[str, Global]) -> None:
    """Assert that the ranks hold these tensors, bitwise in the types in which they keep them.

    Each element is owned once; each weight is on some rank; all replicas of a value are equal;
    padding beyond a tensor is zero.
    """
    owned = {name: np.zeros(tensor.bits.size, np.int64) for name, tensor in tensors.items()}
    computed = {name: count.copy() for name, count in owned.items() if name.startswith("model/")}
    for rank, parts in enumerate(ranks):
        for part in parts:
            assert part.entry in tensors, f"{part.entry} is held and was not saved"
            at = _places(tensors[part.entry].bits.shape, part)
            flat = in_type(tensors[part.entry], part.dtype).bits.reshape(-1)
            expected = np.where(at >= 0, flat[at], 0)
            if len(wrong := np.flatnonzero(part.bits != expected)):
                first = wrong[0]
                raise AssertionError(
                    f"{part.what} {part.entry} on rank {rank}: {len(wrong)} of {len(at)} values "
                    f"differ, the first at {at[first]}: {part.bits[first]:#x}, not "
                    f"{expected[first]:#x}"
                )
            counts = {"own": owned, "weight": computed}.get(part.what)
            if counts is not None:
                np.add.at(counts[part.entry], at[at >= 0], 1)
    for name, count in owned.items():
        assert (count == 1).all(), f"{name}: elements are owned {sorted(set(count.tolist()))} times"
    for name, count in computed.items():
        assert (count > 0).all(), f"{name}: no stage has {np.flatnonzero(count == 0)[:9]}"


def _places(shape: tuple[int, ...], part: Held) -> Array:
    """Return, for each held value, its position in the whole flat tensor; -1 for padding."""
    index, inside = np.zeros((), np.int64), np.ones((), bool)
    for numbers, extent in zip(part.along, shape, strict=True):
        along = np.array(numbers, np.int64)
        index = index[..., None] * extent + along
        inside = inside[..., None] & (along < extent)
    return np.where(inside, index, -1).reshape(-1)[part.start : part.start + len(part.bits)]
