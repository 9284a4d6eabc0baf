"""Norms of gradients, which are added up in fp64."""

from __future__ import annotations

import torch
from torch import Tensor


def squared_norm(values: Tensor) -> Tensor:
    """Sum of the squares of flat `values` [n], in fp64.

    They pass through an fp64 copy of a block: on the CPU one that stays in the cache, on a GPU one
    of 128 MiB at most.
    """
    length = 1 << 16 if values.device.type == "cpu" else 1 << 24
    if len(values) <= length:
        wide = values.double()
        return torch.dot(wide, wide)
    wide = values.new_empty(min(length, len(values)), dtype=torch.float64)
    total = wide.new_zeros(())
    for block in values.split(length):
        copy = wide[: len(block)].copy_(block)
        total += torch.dot(copy, copy)
    return total
