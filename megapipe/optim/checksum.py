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

    def __call__(self, values: Tensor) -> Tensor:
        """The sum of contiguous flat `values` [n] of any type, int64 []; the host does not wait."""
        factors = self._factors.to(values.device)
        total = torch.zeros((), dtype=torch.int64, device=values.device)
        words = values.view(_WORDS[values.element_size()])
        for number, block in enumerate(words.split(len(factors))):
            wide = block.long()
            further = 2 * number * len(factors) * _MIX % 2**64
            total += (wide * factors[: len(wide)]).sum() + wide.sum() * _signed(further)
        return total


def _signed(word: int) -> int:
    """A word of 64 bits as the signed number that has these bits."""
    return word - 2**64 if word >= 2**63 else word
