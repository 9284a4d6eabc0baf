"""What a parameter is: its global tensor, and which part of it a rank holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from megapipe.distributed.mesh import Axis
from megapipe.layers.rng import draw_normal
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
    """How the layers of one stage are split, where their weight gradients wait, what computes."""

    tp: Axis
    sequence_parallel: bool
    dtype: torch.dtype
    queue: WeightGradQueue = field(default_factory=WeightGradQueue)
    kernels: Kernels = field(default_factory=Kernels)

    @cached_property
    def sequence_split(self) -> bool:
        """Whether activations between tensor-parallel regions hold s / tp positions."""
        return self.sequence_parallel and self.tp.size > 1


@dataclass(frozen=True)
class ParameterSpec:
    """A global tensor by name, and the region of it that this rank holds.

    `shape` is the true global shape; a rank's region may reach beyond it where the vocabulary is
    padded. `split_dim` is the dimension split over tp, None where every tp rank holds it all.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    split_dim: int | None
    decay: bool
    std: float | None
    """Standard deviation of the initial values; None: constant `fill`."""
    fill: float = 0.0
    sequence_partial: bool = False
    """The gradient covers this rank's share of the sequence only: it is summed over tp."""
    by_autograd: bool = False
    """Autograd itself computes the gradient, within ``I``; the others' are queued for ``W``."""
    use: int = 0
    """Which use of a shared tensor this is: 0 the input embedding, 1 the head."""

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def initialise(self, out: Tensor, seed: int) -> None:
        """Fill `out`, of shape `sizes`, with this region of the global initial tensor."""
        if self.std is None:
            out.fill_(self.fill)
        else:
            draw_normal(out, seed, self.name, self.shape, self.offsets, self.std)


def new_parameter(
    sharding: Sharding,
    name: str,
    shape: tuple[int, ...],
    *,
    split_dim: int | None = None,
    decay: bool = False,
    std: float | None = None,
    fill: float = 0.0,
    sequence_partial: bool = False,
    by_autograd: bool = False,
    padded: int | None = None,
    use: int = 0,
) -> Parameter:
    """A parameter without storage yet: :mod:`megapipe.optim.buffers` gives it its place.

    `padded` is the padded global length of `split_dim` (the vocabulary).
    """
    sizes, offsets = list(shape), [0] * len(shape)
    if split_dim is not None:
        length = padded or shape[split_dim]
        assert length % sharding.tp.size == 0, f"{name}: {length} over tp {sharding.tp.size}"
        sizes[split_dim] = length // sharding.tp.size
        offsets[split_dim] = sizes[split_dim] * sharding.tp.index
    spec = ParameterSpec(
        name=name,
        shape=shape,
        offsets=tuple(offsets),
        sizes=tuple(sizes),
        split_dim=split_dim,
        decay=decay,
        std=std,
        fill=fill,
        sequence_partial=sequence_partial and sharding.sequence_split,
        by_autograd=by_autograd,
        use=use,
    )
    parameter = Parameter(torch.empty(spec.sizes, dtype=sharding.dtype, device="meta"))
    cast(Any, parameter).spec = spec
    return parameter


def spec_of(parameter: Parameter) -> ParameterSpec:
    return cast(Any, parameter).spec
