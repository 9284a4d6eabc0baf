"""Positions in the plain reference: rotary embeddings with their scalings, and ALiBi."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megapipe.config.rope import RopeConfig


def slope(head: int, heads: int) -> float:
    """Return ALiBi's slope of a head: a geometric sequence; if `heads` is not a power of two,
    followed by every other one of the sequence for twice the power below."""
    power = 2 ** math.floor(math.log2(heads))
    if head < power:
        return 2 ** (-8 * (head + 1) / power)
    return 2 ** (-8 * (2 * (head - power) + 1) / (2 * power))


def rotate(x: Tensor, rope: RopeConfig) -> Tensor:
    """Apply the rotary embedding (Su et al., 2104.09864) to the first d values of x [b, s,
    head_dim]: pair (j, j + d/2) is turned by position x frequency."""
    d = round(x.shape[-1] * rope.percent)
    x, rest = x[..., :d], x[..., d:]
    frequency = torch.tensor([_frequency(j, d, rope) for j in range(d // 2)], dtype=torch.float64)
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequency  # [s, d/2]
    size = 1.0
    if rope.scaling == "yarn":
        size = rope.attention_factor or 1 + math.log(rope.factor) / 10
    cos, sin = (size * angle.cos()).to(x.dtype), (size * angle.sin()).to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _frequency(j: int, d: int, rope: RopeConfig) -> float:
    """Return the frequency of pair j: base**(-2j/d), all or a share of it divided by the factor."""
    plain, kind = rope.base ** (-2 * j / d), rope.scaling
    low, high = rope.low_freq_factor, rope.high_freq_factor
    positions = rope.original_positions
    if kind == "none":
        return plain
    if kind == "linear":
        divided = 1.0
    elif kind == "llama3":
        turns = positions * plain / (2 * math.pi)
        divided = 1 - min(1, max(0, (turns - low) / (high - low)))
    else:  # yarn: from the pair with `high` turns to that with `low` ones, rounded outwards

        def pair(turns: float) -> float:
            return d * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

        first, last = max(0, math.floor(pair(high))), min(d - 1, math.ceil(pair(low)))
        divided = min(1, max(0, (j - first) / (last - first if last != first else 0.001)))
    return plain * (1 - divided) + plain / rope.factor * divided
