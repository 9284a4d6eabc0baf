"""A checksum that changes if any bit of a tensor flips."""

from __future__ import annotations

import torch
from torch import Tensor

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = 0x9E3779B97F4A7C15 - 2**64
"""Odd multiplier, 2^64 / the golden ratio as int64: factors of adjacent values differ much."""
_BLOCK = {"cpu": 1 << 15, "cuda": 1 << 22}
"""Number of values summed at a time, by device type; on the CPU a block fits the cache."""


class Checksum:
    """Sums bit patterns of values modulo 2^64, each times an odd factor for the value's position.

    A flipped bit changes the sum by an odd number times a power of two below 2^64, which is not 0
    modulo 2^64. So every single flipped bit changes the sum. If more bits flip, or values are
    swapped, equal sums are practically impossible.
    """

    def __init__(self, device: torch.device) -> None:
        indices = torch.arange(_BLOCK.get(device.type, 1 << 15), device=device)
        self._factors = (2 * indices + 1) * _MIX
        self._next = 2 * indices[-1:].add(1) * _MIX
        """Increment of every factor from one block to the next, [1]."""

    def __call__(self, values: Tensor) -> Tensor:
        """Return the checksum of flat contiguous `values` [n] of any type: int64 [1], no sync."""
        factors, following = (each.to(values.device) for each in (self._factors, self._next))
        total, more = torch.zeros_like(following), torch.zeros_like(following)
        for block in values.view(_WORDS[values.element_size()]).split(len(factors)):
            wide = block.long()
            total += (wide * factors[: len(wide)]).sum() + wide.sum() * more
            more += following
        return total
