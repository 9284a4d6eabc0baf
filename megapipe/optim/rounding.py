"""fp32 to bf16, to the nearest value or at random in proportion to the distance.

A state that changes by less than half of bf16's spacing (2^-9 of its value) stays where it is when
it is rounded to the nearest value; rounded at random it moves by the right amount on average
(Gupta et al., 1502.02551). The random numbers are functions of coordinates: a position's are those
of its tile (:func:`tile_length` values), whatever part of it is rounded here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megapipe.layers.rng import seed_of

_LARGEST = torch.finfo(torch.bfloat16).max


def tile_length(device: torch.device) -> int:
    """Values that share a stream of random numbers: what a CPU's cache holds, and on a GPU enough
    to outweigh the start of some twenty kernels."""
    return 1 << 18 if device.type == "cpu" else 1 << 21


def scratch_bytes(device: torch.device) -> int:
    """Most memory that :func:`round_at_random` needs at a time."""
    return 16 * tile_length(device)


def stochastic_bf16(x: Tensor, noise: Tensor) -> Tensor:
    """bf16 neighbours of fp32 `x`: the farther from zero where the low 16 bits of x plus `noise`
    carry.

    `noise` is int32, uniform over 0 .. 65535, of the shape of x, and is overwritten. The mean over
    the noise is x, and what bf16 can represent stays as it is. Beyond bf16's largest finite value
    x becomes that value, unless it is infinite; NaN stays NaN.
    """
    noise.masked_fill_(x.abs() >= _LARGEST, 0)
    noise += x.view(torch.int32)
    out = noise.bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)
    return out.masked_fill_(x.isnan(), torch.nan)


def noise_of_tile(seed: int, device: torch.device) -> Tensor:
    """int32 of a tile's length, uniform over 0 .. 65535, a function of the seed (and of the kind of
    device)."""
    generator = torch.Generator(device).manual_seed(seed)
    words = torch.empty(tile_length(device) // 4, dtype=torch.int64, device=device)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)


def round_at_random(out: Tensor, x: Tensor, stream: tuple[int | str, ...], position: int) -> None:
    """Write fp32 `x` [n], which stands at `position` of a longer array, into bf16 `out` [n].

    Any cut of the array into ranges gives the same values; `stream` are the other coordinates.
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
