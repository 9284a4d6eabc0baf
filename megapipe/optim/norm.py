"""Norms of gradients, summed in fp64, and checks for finite values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from megapipe.util.finite import all_finite


def squared_norm(values: Tensor) -> Tensor:
    """Return the sum of the squares of flat `values` [n], in fp64.

    Blocks of values are copied to an fp64 buffer: on the CPU one that fits the cache, on a GPU one
    of at most 128 MiB. The buffer is aligned, so that equal values have equal sums whatever their
    address: BLAS sums an unaligned array in another order.
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
    """Return a summand of a total, float or fp64 []: 0 if all values are finite, else NaN.

    The host does not wait for a GPU.
    """
    if values[0].device.type != "cpu":
        return get_total_norm(values, norm_type=math.inf).double() * 0.0
    return 0.0 if all(map(all_finite, values)) else math.nan
