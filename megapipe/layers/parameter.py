"""The parameters of a rank: its regions of global tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from megapipe.distributed.mesh import Axis
from megapipe.layers.dispatch import Form
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
    ep: Axis = field(default_factory=Axis.alone)
    """The ranks over which experts are split, ep x etp."""
    etp: int = 1
    """Neighbours among them that have parts of the same experts."""
    form: Form = field(default_factory=Form)
    """How tokens get to their experts."""
    bandwidths: Sequence[float] | None = None
    """From this rank to each of `ep`, for the balance term; None: all count alike there."""
    copy: int = 0
    """Which of the tensor-parallel ranks that compute the same this is, where `tp` is one alone."""

    def unsplit(self) -> Sharding:
        """For a layer that every tensor-parallel rank computes alike."""
        return replace(self, tp=Axis.alone(), sequence_parallel=False, copy=self.tp.index)

    @cached_property
    def sequence_split(self) -> bool:
        """Whether activations between tensor-parallel regions hold s / tp positions."""
        return self.sequence_parallel and self.tp.size > 1


@dataclass(frozen=True, kw_only=True)
class LocalParameter(ParameterSpec):
    """A parameter, and the region of it that this rank holds.

    The region may reach beyond `shape` where the vocabulary is padded. `sequence_partial` is false
    where this run does not split activations by sequence, `heads_partial` where it splits no heads.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    counted: bool = True
    """This rank counts what it owns of it in norms and writes it to checkpoints: among the tp ranks
    that hold the same values only the first does, and of experts among those of etp."""

    @property
    def partial(self) -> bool:
        """Whether this rank's gradient is one of the parts that are summed over tp."""
        return self.sequence_partial or self.heads_partial

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def initialise(self, out: Tensor, seed: int) -> None:
        """Fill `out`, of shape `sizes`, with this region of the global initial tensor."""
        if self.initial is not None:
            ends = zip(self.offsets, self.sizes, strict=True)
            out.copy_(self.initial.tensor[tuple(slice(start, start + n) for start, n in ends)])
        elif self.bound is not None:
            draw_uniform(out, seed, self.name, self.shape, self.offsets, self.bound)
        elif self.std is None:
            out.fill_(self.fill)
        else:
            draw_normal(out, seed, self.name, self.shape, self.offsets, self.std)


def local_parameter(sharding: Sharding, spec: ParameterSpec) -> LocalParameter:
    """A parameter with the region of it that this rank holds."""
    tp, ep, etp = sharding.tp, sharding.ep, sharding.etp
    sizes = spec.local_shape(tp.size, ep.size // etp, etp)
    offsets = [0] * len(spec.shape)
    part, inner = divmod(ep.index, etp)
    if spec.experts:
        offsets[0] = sizes[0] * part
    if spec.inner_dim is not None:
        offsets[spec.inner_dim] = sizes[spec.inner_dim] * inner
    if spec.split_dim is not None:
        offsets[spec.split_dim] = sizes[spec.split_dim] * tp.index
    given = {field.name: getattr(spec, field.name) for field in fields(ParameterSpec)}
    given["sequence_partial"] = spec.sequence_partial and sharding.sequence_split
    given["heads_partial"] = spec.heads_partial and tp.size > 1
    first = inner == 0 if spec.experts else tp.index == sharding.copy == 0
    counted = spec.split or first
    return LocalParameter(**given, offsets=tuple(offsets), sizes=sizes, counted=counted)


def new_parameter(sharding: Sharding, spec: ParameterSpec) -> Parameter:
    """A parameter without storage yet: :mod:`megapipe.optim.buffers` gives it its place."""
    local = local_parameter(sharding, spec)
    parameter = Parameter(torch.empty(local.sizes, dtype=sharding.dtype, device="meta"))
    cast(Any, parameter).spec = local
    return parameter


def spec_of(parameter: Parameter) -> LocalParameter:
    return cast(Any, parameter).spec


def release_initial(parameters: Iterable[Parameter]) -> None:
    """Free the :class:`InitialValues` of `parameters`, once they are copied into the buffers."""
    for parameter in parameters:
        initial = spec_of(parameter).initial
        if initial is not None:
            initial.release()
