"""Sizes of a Megatron-LM blend: how many samples it has, and how many it needs from each source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megapipe.errors import ConfigError

SURPLUS = 0.005
"""Fraction of spare samples requested from each source, because a blend can take a few more samples
from a source than its share."""


def normalised(weights: Sequence[float]) -> list[float]:
    """Return weights divided by their sum. Raises ConfigError unless all are positive and the sum
    is finite."""
    given = np.array(weights, np.float64)
    with np.errstate(over="ignore"):
        total = given.sum()
    if not len(given) or not np.all(given > 0) or not np.isfinite(total):
        raise ConfigError(
            f"data.mixture: weights {list(weights)}: expected positive numbers, of a finite sum"
        )
    return (given / total).tolist()


@dataclass(frozen=True)
class BlendSizes:
    """Sizes of a blend, computed like Megatron-LM's blend builder.

    Attributes:
        shares: share of each source, for :func:`~megapipe.data.indices.blend.blend_index`.
        size: samples of the blend, perhaps a few more than requested: each source's part is rounded
            up.
        requests: number of samples to request from each source.
    """

    shares: list[float]
    size: int
    requests: list[int]

    @staticmethod
    def weighted(weights: Sequence[float], samples: int, surplus: float = SURPLUS) -> BlendSizes:
        """Return the sizes of a blend with the given weights and at least `samples` samples. Raises
        ConfigError for weights that are not positive."""
        shares = normalised(weights)
        parts = [math.ceil(samples * share) for share in shares]
        requests = [math.ceil(part * (1 + surplus)) for part in parts]
        # Megatron-LM divides by the sum twice, which can change a share's last bit
        return BlendSizes(normalised(shares), sum(parts), requests)

    @staticmethod
    def by_size(sizes: Sequence[int], samples: int) -> BlendSizes:
        """Return the sizes of a blend with at most one epoch of each source, weighted by size."""
        return BlendSizes(normalised(sizes), min(samples, sum(sizes)), list(sizes))
