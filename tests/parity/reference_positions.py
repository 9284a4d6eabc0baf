"""Positions in the plain reference: rotary embeddings with their scalings, and ALiBi."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megapipe.config.model import ModelConfig


def slope(head: int, heads: int) -> float:
    """ALiBi's of a head: a geometric sequence, and where `heads` is no power of two then every
    other one of the sequence for twice the power below."""
    power = 2 ** math.floor(math.log2(heads))
    if head < power:
        return 2 ** (-8 * (head + 1) / power)
    return 2 ** (-8 * (2 * (head - power) + 1) / (2 * power))


def rotate(x: Tensor, model: ModelConfig) -> Tensor:
    """Rotary embedding (Su et al., 2104.09864) of the first d values of x [b, s, head_dim]: pair
    (j, j + d/2) is turned by position x frequency."""
    d = round(model.head_dim * model.rotary_share)
    x, rest = x[..., :d], x[..., d:]
    frequency = torch.tensor([_frequency(j, d, model) for j in range(d // 2)], dtype=torch.float64)
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequency  # [s, d/2]
    size = 1.0
    if model.rotary_scaling == "yarn":
        size = model.rotary_attention_factor or 1 + math.log(model.rotary_factor) / 10
    cos, sin = (size * angle.cos()).to(x.dtype), (size * angle.sin()).to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _frequency(j: int, d: int, model: ModelConfig) -> float:
    """Of pair j: base**(-2j/d), all or a share of it divided by the factor."""
    plain, kind = model.rotary_base ** (-2 * j / d), model.rotary_scaling
    low, high, positions = (
        model.rotary_turns_low,
        model.rotary_turns_high,
        model.rotary_original_positions,
    )
    if kind == "none":
        return plain
    if kind == "linear":
        divided = 1.0
    elif kind == "llama3":
        turns = positions * plain / (2 * math.pi)
        divided = 1 - min(1, max(0, (turns - low) / (high - low)))
    else:  # yarn: from the pair with `high` turns to that with `low` ones, rounded outwards

        def pair(turns: float) -> float:
            return (
                d * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(model.rotary_base))
            )

        first, last = max(0, math.floor(pair(high))), min(d - 1, math.ceil(pair(low)))
        divided = min(1, max(0, (j - first) / (last - first if last != first else 0.001)))
    return plain * (1 - divided) + plain / model.rotary_factor * divided
