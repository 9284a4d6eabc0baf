"""The parameters of a rank: its regions of global tensors.

A rank has one region of a tensor, or some indices of its first dimension that need not be
neighbours and may change (:class:`OwnedIndices`). Whoever saves, loads or compares values asks
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
    """How the layers of one stage are split over tp, their weight-gradient queue, their kernels."""

    tp: Axis
    sequence_parallel: bool
    dtype: torch.dtype
    queue: WeightGradQueue = field(default_factory=WeightGradQueue)
    kernels: Kernels = field(default_factory=Kernels)

    sequence: Axis = field(default_factory=Axis.alone)
    """The ranks with parts of the same sequences, which are of tp and of cp."""
    tp_replica: int = 0
    """Which of the tensor-parallel ranks that compute the same this is, where `tp` is one alone."""

    def unsplit(self) -> Sharding:
        """For a layer that every tensor-parallel rank computes alike."""
        return replace(self, tp=Axis.alone(), sequence_parallel=False, tp_replica=self.tp.index)

    @cached_property
    def sequence_split(self) -> bool:
        """Whether activations between tensor-parallel regions hold s / tp positions."""
        return self.sequence_parallel and self.tp.size > 1


class OwnedIndices(Protocol):
    """Indices of the first dimension of a tensor that a rank owns, which may change."""

    def ranges(self) -> Iterator[range]:
        """Yield the indices in order, neighbouring ones together."""


@dataclass(frozen=True, kw_only=True)
class LocalParameter(ParameterSpec):
    """A parameter, and the region of it that this rank holds.

    The region may reach beyond `shape` where the vocabulary is padded. `sequence_partial` is false
    where this run does not split activations by sequence, `heads_partial` where it splits no heads.
    """

    offsets: tuple[int, ...]
    """Where the region begins; 0 in the first dimension where `owners` has the indices."""
    sizes: tuple[int, ...]
    owners: OwnedIndices | None = field(default=None, compare=False, repr=False)
    """Indices of the first dimension that the rank has, of a parameter that is split over ep."""
    is_primary: bool = True
    """This rank counts what it owns of it in norms and writes it to checkpoints: of the ranks of
    tp or etp that hold the same values only the first does."""

    @cached_property
    def grad_is_partial(self) -> bool:
        """Whether this rank's gradient is one of the parts that are summed over tp."""
        return self.sequence_partial or self.heads_partial

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def global_regions(
        self, local: Region | None = None
    ) -> Iterator[tuple[tuple[slice, ...], Region]]:
        """Where the global tensor has a region of this rank's, by default all of it: an index into
        that, and the region there, one after the other. Padding is nowhere."""
        local = local or whole(self.sizes)
        for here, there in self._parts():
            common = intersect(here, local)
            if common is None:
                continue
            moved = Region(_added(common.offsets, there.offsets, here.offsets), common.sizes)
            region = intersect(moved, whole(self.shape))
            if region is not None:
                back = _added(region.offsets, common.offsets, moved.offsets)
                yield Region(back, region.sizes).inside(local), region

    def _parts(self) -> Iterator[tuple[Region, Region]]:
        """Regions of this rank's tensor with what they are in the global one, or beyond it."""
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
        for here, there in self._parts():
            self._initialise(out[here.inside(whole(self.sizes))], there, seed)

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
    """Describe a parameter of which this rank holds the `region` of these offsets and sizes."""
    given = {field.name: getattr(spec, field.name) for field in fields(ParameterSpec)}
    given["sequence_partial"] = spec.sequence_partial and sharding.sequence_split
    given["heads_partial"] = spec.heads_partial and sharding.tp.size > 1
    offsets, sizes = region
    return LocalParameter(**given, offsets=offsets, sizes=sizes, owners=owners, is_primary=counted)


def make_parameter(local: LocalParameter, dtype: torch.dtype) -> Parameter:
    """Make a parameter without storage yet: :mod:`megapipe.optim.buffers` gives it its place."""
    parameter = Parameter(torch.empty(local.sizes, dtype=dtype, device="meta"))
    cast(Any, parameter).spec = local
    return parameter


def new_parameter(sharding: Sharding, spec: ParameterSpec) -> Parameter:
    """Make a parameter that is split over tp, or held by each of its ranks, without storage yet."""
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
