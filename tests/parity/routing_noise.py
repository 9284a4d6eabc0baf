"""Random numbers of routing as the contract has them: functions of what token they are for.

Written with whole numbers of numpy; nothing of the package is asked but what seed coordinates have.
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
    return moe.jitter > 0 or moe.second == "random"


def routing_noise_of(case: Case, step: int) -> Noise:
    """By purpose and layer: "jitter", factors [b, s, h], and "second", uniform [b, s]."""
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
    """The first 24 bits of splitmix64 as a share of 1."""
    with np.errstate(over="ignore"):
        z = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(40)).astype(np.float64) / 2.0**24
