"""Random numbers of routing: the jitter of the router's input, and which second choices are kept.

A token's are a function of (run seed, purpose, step, layer, sample of the global batch, position),
so whichever ranks and micro-batches have the token, and however often it is routed, they are the
same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.moe.token_shards import TokenShards
from megapipe.layers.rng import seed_of, uniform


class TokenNoise:
    """Of the tokens [s(/n), b] of a micro-batch in a layer, which are a rank's part of `shards`."""

    def __init__(self, mb: MicroBatch, layer: int, shape: tuple[int, int], shards: TokenShards):
        self._coordinates = mb.step, layer
        self._seed, self._sample = mb.seed, mb.sample
        self._shape, self._shards = shape, shards

    def _numbers(self, device: torch.device) -> Tensor:
        """[tokens], int64: each token of the global batch has one of its own."""
        here, rows = self._shape
        samples = self._sample + torch.arange(rows, device=device)
        positions = self._shards.own_positions(here, device)
        length = self._shards.length(here)
        return (samples * length + positions.unsqueeze(1)).flatten()

    def second(self, device: torch.device) -> Tensor:
        """[tokens], uniform between 0 and 1, fp32."""
        return uniform(seed_of(self._seed, "second", *self._coordinates), self._numbers(device))

    def jitter(self, like: Tensor, most: float) -> Tensor:
        """Factors of the values of tokens, [tokens, h], uniform between 1 - `most` and 1 + `most`;
        of the type of `like`."""
        width = like.shape[1]
        columns = torch.arange(width, device=like.device)
        numbers = self._numbers(like.device).unsqueeze(1) * width + columns
        drawn = uniform(seed_of(self._seed, "jitter", *self._coordinates), numbers)
        return 1 + most * (2 * drawn.to(like.dtype) - 1)
