"""A tensor-parallel rank's part of full tensors, and layers with given values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megapipe.distributed.mesh import Axis
from megapipe.layers.parameter import Sharding, spec_of
from megapipe.optim.buffers import Bucket, owned_parameters
from tests.parity.ranks import take_region


def give_values(module: nn.Module, full: dict[str, Tensor]) -> None:
    """Allocate the parameters, and fill them with this rank's regions of the full tensors."""
    Bucket(0, list(owned_parameters(module)), Axis.alone(), torch.device("cpu"))
    for parameter in module.parameters():
        take_region(full[spec_of(parameter).name], spec_of(parameter), parameter.data)


def part(full: Tensor, axis: Axis, dim: int) -> Tensor:
    return full.chunk(axis.size, dim)[axis.index]


def by_sequence(full: Tensor, sharding: Sharding) -> Tensor:
    """Return the rank's part of activations between the tensor-parallel regions."""
    return part(full, sharding.tp, 0) if sharding.sequence_split else full
