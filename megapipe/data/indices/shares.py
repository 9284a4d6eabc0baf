"""Samples that a blend of several token files asks of each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megapipe.errors import ConfigError

SURPLUS = 0.005
"""The share of samples that each source has to spare: the order of a blend may take a few more of
one than its weight says."""


def normalised(weights: Sequence[float]) -> list[float]:
    """Weights as shares of their sum. Raises ConfigError unless all are positive and finite."""
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
    """The sizes of a blend, as Megatron-LM's builder of blends finds them.

    Attributes:
        shares: of each source, for :func:`~megapipe.data.indices.blend.blend_index`.
        size: samples of the blend; more than asked for, as each source's part is rounded up.
        requests: samples to ask of each source.
    """

    shares: list[float]
    size: int
    requests: list[int]

    @staticmethod
    def weighted(weights: Sequence[float], samples: int, surplus: float = SURPLUS) -> BlendSizes:
        """A blend of given weights with `samples` samples or a few more. Raises ConfigError for
        weights that are not positive."""
        shares = normalised(weights)
        parts = [math.ceil(samples * share) for share in shares]
        requests = [math.ceil(part * (1 + surplus)) for part in parts]
        # it divides by the sum twice, which can change a share's last bit
        return BlendSizes(normalised(shares), sum(parts), requests)

    @staticmethod
    def by_size(sizes: Sequence[int], samples: int) -> BlendSizes:
        """A blend of sources by their own sizes, an epoch of each at most."""
        return BlendSizes(normalised(sizes), min(samples, sum(sizes)), list(sizes))
