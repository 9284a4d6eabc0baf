"""Norms of gradients, which are added up in fp64, and whether values are finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from megapipe.util.finite import all_finite


def squared_norm(values: Tensor) -> Tensor:
    """Sum of the squares of flat `values` [n], in fp64.

    They pass through an fp64 copy of a block: on the CPU one that stays in the cache, on a GPU one
    of 128 MiB at most. Its address is aligned, so that equal values have equal sums wherever they
    are: BLAS adds up an array that is not aligned in another order.
    """
    length = 1 << 16 if values.device.type == "cpu" else 1 << 24
    if len(values) <= length:
        wide = values.to(torch.float64, copy=True)
        return torch.dot(wide, wide)
    wide = values.new_empty(min(length, len(values)), dtype=torch.float64)
    total = wide.new_zeros(())
    for block in values.split(length):
        copy = wide[: len(block)].copy_(block)
        total += torch.dot(copy, copy)
    return total


def zero_if_finite(values: Sequence[Tensor]) -> Tensor | float:
    """0 where all values are finite, else NaN: added to a sum, it makes this NaN. fp64 [].

    The host does not wait for a GPU.
    """
    if values[0].device.type != "cpu":
        return get_total_norm(values, norm_type=math.inf).double() * 0.0
    return 0.0 if all(map(all_finite, values)) else math.nan
