"""A number that any flipped bit of a tensor changes."""

from __future__ import annotations

import torch
from torch import Tensor

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = 0x9E3779B97F4A7C15 - 2**64
"""Odd: 2^64 by the golden ratio, as a signed number, so that factors of near places differ much."""
_BLOCK = {"cpu": 1 << 15, "cuda": 1 << 22}
"""Values that are looked at together: on the CPU they stay in the cache."""


class Checksum:
    """Adds up the bit patterns of values, each times an odd number of its place, modulo 2^64.

    A flipped bit changes one term by a power of two below 2^64 times an odd number, which is not 0
    modulo 2^64. So no flip of one bit goes unnoticed, and that two sums are equal by chance after
    more damage is as good as impossible, as it is where values are in another order.
    """

    def __init__(self, device: torch.device) -> None:
        places = torch.arange(_BLOCK.get(device.type, 1 << 15), device=device)
        self._factors = (2 * places + 1) * _MIX
        self._next = 2 * places[-1:].add(1) * _MIX
        """The difference between the factors of a block and of the next, [1]."""

    def __call__(self, values: Tensor) -> Tensor:
        """The sum of contiguous flat `values` [n] of any type, int64 [1], not waited for."""
        factors, following = (each.to(values.device) for each in (self._factors, self._next))
        total, more = torch.zeros_like(following), torch.zeros_like(following)
        for block in values.view(_WORDS[values.element_size()]).split(len(factors)):
            wide = block.long()
            total += (wide * factors[: len(wide)]).sum() + wide.sum() * more
            more += following
        return total
