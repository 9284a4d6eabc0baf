"""Rounding of fp32 to bf16, to nearest or stochastically.

A state that changes by less than half of bf16's spacing (2^-9 of its value) never changes if it is
rounded to nearest. Stochastic rounding changes it by the right amount on average (Gupta et al.,
1502.02551). The random numbers depend on positions only: each tile of :func:`tile_length` values
has one stream of them, whichever part of the tile this rank rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megapipe.layers.rng import seed_of

_LARGEST = torch.finfo(torch.bfloat16).max


def tile_length(device: torch.device) -> int:
    """Return the number of values that share a stream of random numbers: as many as fit a CPU's
    cache, or on a GPU enough to outweigh the launch of some twenty kernels."""
    return 1 << 18 if device.type == "cpu" else 1 << 21


def scratch_bytes(device: torch.device) -> int:
    """Return the maximum memory, in bytes, that :func:`round_at_random` needs."""
    return 16 * tile_length(device)


def stochastic_bf16(x: Tensor, noise: Tensor) -> Tensor:
    """Round fp32 `x` to a bf16 neighbour, away from zero if the low 16 bits of x plus `noise`
    carry.

    `noise` is int32, uniform over 0 .. 65535, of the shape of x, and is overwritten. The mean of
    the result over the noise is x, and values that bf16 can represent stay as they are. Finite
    values beyond bf16's largest become the largest; infinity and NaN stay.
    """
    noise.masked_fill_(x.abs() >= _LARGEST, 0)
    noise += x.view(torch.int32)
    out = noise.bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)
    return out.masked_fill_(x.isnan(), torch.nan)


def noise_of_tile(seed: int, device: torch.device) -> Tensor:
    """Make int32 noise for one tile, uniform over 0 .. 65535. It depends only on the seed and on
    the kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    words = torch.empty(tile_length(device) // 4, dtype=torch.int64, device=device)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)


def round_at_random(out: Tensor, x: Tensor, stream: tuple[int | str, ...], position: int) -> None:
    """Round fp32 `x` [n], at `position` of a longer array, stochastically into bf16 `out` [n].

    The result does not depend on how the array is divided. `stream` and position seed the noise.
    """
    start, stop = position, position + x.numel()
    length = tile_length(x.device)
    while start < stop:
        tile = start // length
        end = min(stop, (tile + 1) * length)
        noise = noise_of_tile(seed_of(*stream, tile), x.device)
        noise = noise[start - tile * length : end - tile * length]
        here = slice(start - position, end - position)
        out[here] = stochastic_bf16(x[here], noise)
        start = end
