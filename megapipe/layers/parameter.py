"""Parameters of a rank: its regions of global tensors.

A rank has one region of a tensor, or some indices of its first dimension (experts) that need not be
adjacent and may change (:class:`OwnedIndices`). Code that saves, loads or compares values uses
:meth:`LocalParameter.global_regions`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from megapipe.checkpoint.regions import Region, intersect, whole
from megapipe.distributed.mesh import Axis
from megapipe.layers.rng import draw_normal, draw_uniform
from megapipe.layers.specs import ParameterSpec
from megapipe.layers.weight_grad import WeightGradQueue
from megapipe.ops.kernels import Kernels

TORCH_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


@dataclass(frozen=True)
class Sharding:
    """Split of one stage's layers over tp, their weight-gradient queue, and their kernels."""

    tp: Axis
    sequence_parallel: bool
    dtype: torch.dtype
    queue: WeightGradQueue = field(default_factory=WeightGradQueue)
    kernels: Kernels = field(default_factory=Kernels)

    sequence: Axis = field(default_factory=Axis.alone)
    """Group of the tp and cp ranks that hold parts of the same sequences."""
    tp_replica: int = 0
    """Index of this rank among the tp ranks on which a layer is replicated (:meth:`unsplit`); `tp`
    is then a group of one rank. 0 for split layers."""

    def unsplit(self) -> Sharding:
        """Return the sharding of a layer that is replicated on all tensor-parallel ranks."""
        return replace(self, tp=Axis.alone(), sequence_parallel=False, tp_replica=self.tp.index)

    @cached_property
    def sequence_split(self) -> bool:
        """Whether activations between tensor-parallel layers have only s / tp positions."""
        return self.sequence_parallel and self.tp.size > 1


class OwnedIndices(Protocol):
    """Indices of a tensor's first dimension (experts) that a rank owns; they may change."""

    def ranges(self) -> Iterator[range]:
        """Yield the indices in ascending order; consecutive indices form one range."""


@dataclass(frozen=True, kw_only=True)
class LocalParameter(ParameterSpec):
    """A parameter, and the region of it that this rank holds.

    The region may extend beyond `shape` if the vocabulary is padded. `sequence_partial` is false
    without sequence parallelism, `heads_partial` without tensor parallelism.
    """

    offsets: tuple[int, ...]
    """Start of the region in each dimension; 0 in the first dimension if `owners` is given."""
    sizes: tuple[int, ...]
    owners: OwnedIndices | None = field(default=None, compare=False, repr=False)
    """Owned indices of the first dimension, for a parameter of experts that is split over ep."""
    is_primary: bool = True
    """Whether this rank counts the values in norms and writes them to checkpoints. Among tp or etp
    ranks with equal values, only the first is primary."""

    @cached_property
    def grad_is_partial(self) -> bool:
        """Whether this rank's gradient is a partial sum, still to be summed over tp."""
        return self.sequence_partial or self.heads_partial

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def global_regions(
        self, local: Region | None = None
    ) -> Iterator[tuple[tuple[slice, ...], Region]]:
        """Map a local region, by default the whole parameter, to the global tensor. Yield pairs of
        an index into the local region and a global region. Padding is left out."""
        local = local or whole(self.sizes)
        for local_region, global_region in self._parts():
            common = intersect(local_region, local)
            if common is None:
                continue
            moved = Region(
                _added(common.offsets, global_region.offsets, local_region.offsets), common.sizes
            )
            region = intersect(moved, whole(self.shape))
            if region is not None:
                back = _added(region.offsets, common.offsets, moved.offsets)
                yield Region(back, region.sizes).inside(local), region

    def _parts(self) -> Iterator[tuple[Region, Region]]:
        """Yield each local region with its global region, which may exceed the global tensor."""
        if self.owners is None:
            yield whole(self.sizes), Region(self.offsets, self.sizes)
            return
        inner, start = self.offsets[1:], 0
        for run in self.owners.ranges():
            sizes = (len(run), *self.sizes[1:])
            yield Region((start, *(0 for _ in inner)), sizes), Region((run.start, *inner), sizes)
            start += len(run)

    def initialise(self, out: Tensor, seed: int) -> None:
        """Fill `out`, of shape `sizes`, with this rank's part of the global initial tensor."""
        for local_region, global_region in self._parts():
            self._initialise(out[local_region.inside(whole(self.sizes))], global_region, seed)

    def _initialise(self, out: Tensor, region: Region, seed: int) -> None:
        if self.initial is not None:
            out.copy_(self.initial.tensor[region.inside(whole(self.shape))])
        elif self.bound is not None:
            draw_uniform(out, seed, self.name, self.shape, region.offsets, self.bound)
        elif self.std is None:
            out.fill_(self.fill)
        else:
            draw_normal(out, seed, self.name, self.shape, region.offsets, self.std)


def _added(to: tuple[int, ...], more: tuple[int, ...], less: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b - c for a, b, c in zip(to, more, less, strict=True))


def local_parameter(
    sharding: Sharding,
    spec: ParameterSpec,
    region: tuple[tuple[int, ...], tuple[int, ...]],
    counted: bool,
    owners: OwnedIndices | None = None,
) -> LocalParameter:
    """Return `spec` with this rank's `region`, as (offsets, sizes). `counted` says whether the rank
    is primary: whether it counts the values in norms and writes them to checkpoints."""
    values = {field.name: getattr(spec, field.name) for field in fields(ParameterSpec)}
    values["sequence_partial"] = spec.sequence_partial and sharding.sequence_split
    values["heads_partial"] = spec.heads_partial and sharding.tp.size > 1
    offsets, sizes = region
    return LocalParameter(**values, offsets=offsets, sizes=sizes, owners=owners, is_primary=counted)


def make_parameter(local: LocalParameter, dtype: torch.dtype) -> Parameter:
    """Make a parameter without storage; :mod:`megapipe.optim.buffers` assigns the storage."""
    parameter = Parameter(torch.empty(local.sizes, dtype=dtype, device="meta"))
    cast(Any, parameter).spec = local
    return parameter


def new_parameter(sharding: Sharding, spec: ParameterSpec) -> Parameter:
    """Make a parameter that is split over tp or whole on all tp ranks, without storage yet."""
    tp, sizes = sharding.tp, spec.local_shape(sharding.tp.size)
    offsets = [0] * len(sizes)
    if spec.split_dim is not None:
        offsets[spec.split_dim] = sizes[spec.split_dim] * tp.index
    counted = spec.split or tp.index == sharding.tp_replica == 0
    region = tuple(offsets), sizes
    return make_parameter(local_parameter(sharding, spec, region, counted), sharding.dtype)


def spec_of(parameter: Parameter) -> LocalParameter:
    return cast(Any, parameter).spec


def release_initial(parameters: Iterable[Parameter]) -> None:
    """Free the :class:`InitialValues` of `parameters`, once they are copied into the buffers."""
    for parameter in parameters:
        initial = spec_of(parameter).initial
        if initial is not None:
            initial.release()
