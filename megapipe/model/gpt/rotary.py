"""The angles of the rotary embedding (Su et al., 2104.09864), stretched or not."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.context.positions import Positions
from megapipe.model.gpt.parameters import known

Tables = tuple[Tensor, Tensor]
"""cos and sin, [s, 1, 1, 1, d] of the first d values of a head, the halves of which are the two
coordinates."""


class Rotaries(NamedTuple):
    """The tables of a stage's layers."""

    whole: Tables | None
    local: Tables | None = None
    """Of layers with a window, where these have their own."""

    def tensors(self) -> list[Tensor]:
        return [table for tables in self if tables is not None for table in tables]


def rotaries(
    config: ModelConfig, here: Positions, device: torch.device, dtype: torch.dtype
) -> Rotaries:
    """The tables of a resolved model with rotary positions, of the positions `here`."""
    whole = rotary_tables(config, here, device, dtype)
    if config.rotary_local_base is None:
        return Rotaries(whole)
    local = {"rotary_base": config.rotary_local_base, "rotary_scaling": "none"}
    own = config.model_copy(update=local)
    return Rotaries(whole, rotary_tables(own, here, device, dtype))


def rotary_tables(
    config: ModelConfig, here: Positions, device: torch.device, dtype: torch.dtype
) -> Tables:
    """The tables of a resolved model, of the positions `here`.

    Computed in fp32 (fp64 for fp64), then cast.
    """
    high = torch.promote_types(dtype, torch.float32)
    width = config.rotary_width
    exponent = torch.arange(0, width, 2, dtype=high, device=device) / width
    frequency, size = _stretched(config, config.rotary_base**-exponent)
    runs = [
        torch.arange(run.first, run.last + 1, run.step, dtype=high, device=device)
        for run in here.runs
    ]
    angle = torch.outer(torch.cat(runs), frequency)
    angle = torch.cat((angle, angle), dim=-1).view(here.count, 1, 1, 1, width)
    return (angle.cos() * size).to(dtype), (angle.sin() * size).to(dtype)


def _stretched(config: ModelConfig, frequency: Tensor) -> tuple[Tensor, float]:
    """The frequencies [d / 2] that ``rotary_scaling`` makes of these, and what rotated queries and
    keys are multiplied by."""
    factor, low, high = config.rotary_factor, config.rotary_turns_low, config.rotary_turns_high
    if config.rotary_scaling == "none":
        return frequency, 1.0
    if config.rotary_scaling == "linear":
        return frequency / factor, 1.0
    original = known(config.rotary_original_positions)
    if config.rotary_scaling == "llama3":
        turns = original * frequency / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequency * (kept + (1 - kept) / factor), 1.0
    # yarn blends by number of the frequency, from that with `high` turns to that with `low` ones
    pairs = len(frequency)
    first, last = (
        pairs * math.log(original / (2 * math.pi * turns)) / math.log(config.rotary_base)
        for turns in (high, low)
    )
    first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * pairs - 1)
    number = torch.arange(pairs, dtype=frequency.dtype, device=frequency.device)
    kept = 1 - ((number - first) / ((last - first) or 0.001)).clamp(0, 1)
    size = config.rotary_attention_factor or 0.1 * math.log(factor) + 1
    return frequency * (kept + (1 - kept) / factor), size
