"""Random numbers of routing as docs define them: functions of their token's index.

Computed with numpy's integers; only the seeds of coordinates come from the package.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from megapipe.layers.rng import seed_of
from tests.parity.cases import Case, settings
from tests.parity.mixture import has_experts
from tests.parity.reference import Noise

Numbers = np.ndarray[Any, np.dtype[np.uint64]]


def is_random(case: Case) -> bool:
    """Whether routing takes random numbers."""
    moe = settings(case).model.moe
    return moe.jitter > 0 or moe.second_expert == "random"


def routing_noise_of(case: Case, step: int) -> Noise:
    """Return, by purpose and layer, factors "jitter" [b, s, h] and uniform numbers "second" [b,
    s]."""
    config = settings(case)
    model, s, h = config.model, case.sequence, config.model.hidden
    tokens = np.arange(case.batch * case.m * case.dp * s, dtype=np.uint64)
    values = np.arange(len(tokens) * h, dtype=np.uint64)
    noise = {}
    for layer in range(model.layers) if is_random(case) else ():
        if has_experts(model, layer):
            seeds = (seed_of(config.run.seed, p, step, layer) for p in ("second", "jitter"))
            second, jitter = (uniform(*each) for each in zip(seeds, (tokens, values), strict=True))
            noise["second", layer] = torch.from_numpy(second).view(-1, s)
            factors = 1 + model.moe.jitter * (2 * torch.from_numpy(jitter) - 1)
            noise["jitter", layer] = factors.view(-1, s, h)
    return noise


def uniform(seed: int, numbers: Numbers) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the first 24 bits of splitmix64 as numbers in [0, 1)."""
    with np.errstate(over="ignore"):
        z = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(40)).astype(np.float64) / 2.0**24
