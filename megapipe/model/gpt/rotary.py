"""Tables of the rotary embedding (Su et al., 2104.09864), with or without scaled frequencies."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.config.rope import RopeConfig
from megapipe.context.positions import Positions
from megapipe.model.gpt.parameters import known

Tables = tuple[Tensor, Tensor]
"""Tables cos and sin, [s, 1, 1, 1, d], for the first d values of a head. A rotated pair has one
value in the first half of these d, and one in the second."""


class Rotaries(NamedTuple):
    """Rotary tables for the layers of a stage."""

    whole: Tables | None
    local: Tables | None = None
    """Tables for sliding-window layers; None if all layers share `whole`."""

    def tensors(self) -> list[Tensor]:
        return [table for tables in self if tables is not None for table in tables]


def rotaries(
    config: ModelConfig, here: Positions, device: torch.device, dtype: torch.dtype
) -> Rotaries:
    """Make the rotary tables of a resolved model with rotary positions.

    `here`: the positions of this rank.
    """
    whole = rotary_tables(config, here, device, dtype)
    if config.rope.local_base is None:
        return Rotaries(whole)
    local = config.rope.model_copy(update={"base": config.rope.local_base, "scaling": "none"})
    of_windows = config.model_copy(update={"rope": local})
    return Rotaries(whole, rotary_tables(of_windows, here, device, dtype))


def rotary_tables(
    config: ModelConfig, here: Positions, device: torch.device, dtype: torch.dtype
) -> Tables:
    """Compute cos and sin of a resolved model's angles. `here`: the positions of this rank.

    The angles are computed in fp32 (fp64 for fp64 models), and the tables cast to `dtype`.
    """
    high = torch.promote_types(dtype, torch.float32)
    width = config.rotary_width
    exponent = torch.arange(0, width, 2, dtype=high, device=device) / width
    frequency, size = _stretched(config.rope, config.rope.base**-exponent)
    runs = [
        torch.arange(run.first, run.last + 1, run.step, dtype=high, device=device)
        for run in here.runs
    ]
    angle = torch.outer(torch.cat(runs), frequency)
    angle = torch.cat((angle, angle), dim=-1).view(here.count, 1, 1, 1, width)
    return (angle.cos() * size).to(dtype), (angle.sin() * size).to(dtype)


def _stretched(rope: RopeConfig, frequency: Tensor) -> tuple[Tensor, float]:
    """Scale the frequencies [d / 2] as ``model.rope.scaling`` says; also return the factor by which
    queries and keys are multiplied."""
    factor, low, high = rope.factor, rope.low_freq_factor, rope.high_freq_factor
    if rope.scaling == "none":
        return frequency, 1.0
    if rope.scaling == "linear":
        return frequency / factor, 1.0
    original = known(rope.original_positions)
    if rope.scaling == "llama3":
        turns = original * frequency / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequency * (kept + (1 - kept) / factor), 1.0
    # yarn blends by index of the frequency, from the one with `high` turns to that with `low` turns
    pairs = len(frequency)
    first, last = (
        pairs * math.log(original / (2 * math.pi * turns)) / math.log(rope.base)
        for turns in (high, low)
    )
    first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * pairs - 1)
    number = torch.arange(pairs, dtype=frequency.dtype, device=frequency.device)
    kept = 1 - ((number - first) / ((last - first) or 0.001)).clamp(0, 1)
    size = rope.attention_factor or 0.1 * math.log(factor) + 1
    return frequency * (kept + (1 - kept) / factor), size
