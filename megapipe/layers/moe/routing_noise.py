"""Random numbers of routing: the jitter of the router's input, and which second choices are kept.

A token's random numbers are a function of (run seed, purpose, step, layer, sample of the global
batch, position). So the numbers do not depend on the rank or micro-batch that has the token, or on
how often the token is routed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.moe.token_shards import TokenShards
from megapipe.layers.rng import seed_of, uniform


class TokenNoise:
    """Random numbers for the tokens [s(/n), b] that this rank routes in a layer and micro-batch."""

    def __init__(self, mb: MicroBatch, layer: int, shape: tuple[int, int], shards: TokenShards):
        self._coordinates = mb.step, layer
        self._seed, self._sample = mb.seed, mb.sample
        self._shape, self._shards = shape, shards

    def _numbers(self, device: torch.device) -> Tensor:
        """Return [tokens], int64: a unique number for each token of the global batch."""
        here, rows = self._shape
        samples = self._sample + torch.arange(rows, device=device)
        positions = self._shards.own_positions(here, device)
        length = self._shards.length(here)
        return (samples * length + positions.unsqueeze(1)).flatten()

    def second(self, device: torch.device) -> Tensor:
        """Return a random number between 0 and 1 for each token's second choice, [tokens], fp32."""
        return uniform(seed_of(self._seed, "second", *self._coordinates), self._numbers(device))

    def jitter(self, like: Tensor, most: float) -> Tensor:
        """Return random factors for the tokens' values, [tokens, h], uniform between 1 - `most` and
        1 + `most`, in the type of `like`."""
        width = like.shape[1]
        columns = torch.arange(width, device=like.device)
        numbers = self._numbers(like.device).unsqueeze(1) * width + columns
        drawn = uniform(seed_of(self._seed, "jitter", *self._coordinates), numbers)
        return 1 + most * (2 * drawn.to(like.dtype) - 1)
