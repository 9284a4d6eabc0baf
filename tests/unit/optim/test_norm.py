"""Norms are functions of the values alone."""

from __future__ import annotations

import torch

from megapipe.optim.norm import squared_norm


def test_equal_values_have_equal_norms_wherever_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    for length in range(2050, 2080):
        values = torch.randn(length, dtype=torch.float64, generator=generator)
        norms = set()
        for offset in range(9):
            place = torch.empty(length + offset, dtype=torch.float64)[offset:]
            norms.add(squared_norm(place.copy_(values)).item())
        assert len(norms) == 1, length
