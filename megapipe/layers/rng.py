"""Random numbers as functions of coordinates, not of history.

Every draw is seeded by what it is for: (run seed, purpose, step, global micro-batch, layer, and
the tp rank where the tensor is split). Nothing per rank needs saving, and recomputation and any
order of the schedule give the same numbers. The device's generator is put back afterwards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

TILE_ROWS, TILE_COLUMNS = 64, 512


def seed_of(*coordinates: int | str) -> int:
    """A 63-bit seed from coordinates; different coordinates give independent streams."""
    text = "\x1f".join(map(str, coordinates)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Run with the device's default generator at `seed`, and restore it."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
    else:
        generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def uniform(seed: int, numbers: Tensor) -> Tensor:
    """A value in [0, 1) for each of `numbers`, int64: a function of it and of the seed alone, fp32.

    The value is made of the first 24 bits of splitmix64 (Steele et al., 2014), which is a few
    operations on whole numbers of 64 bits that wrap, on any device.
    """
    mixed = numbers * _signed(0x9E3779B97F4A7C15) + seed
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    return _shifted(mixed ^ _shifted(mixed, 31), 40).float() * 2.0**-24


def _signed(number: int) -> int:
    """The number of 64 bits as torch has it."""
    return number - (number >> 63 << 64)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """To the right, with zeros coming in."""
    return (numbers >> bits) & ((1 << 64 - bits) - 1)


def draw_normal(
    out: Tensor,
    seed: int,
    name: str,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    std: float,
) -> None:
    """Fill `out` with the region at `offsets` of the tensor `name` drawn from N(0, std^2)."""
    _draw(out, seed, name, shape, offsets, std, _normal_tile)


def draw_uniform(
    out: Tensor,
    seed: int,
    name: str,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    bound: float,
) -> None:
    """The same, of values that are uniform between -bound and bound."""
    _draw(out, seed, name, shape, offsets, bound, _uniform_tile)


def _normal_tile(generator: torch.Generator) -> Tensor:
    return torch.randn(TILE_ROWS, TILE_COLUMNS, generator=generator)


def _uniform_tile(generator: torch.Generator) -> Tensor:
    return torch.rand(TILE_ROWS, TILE_COLUMNS, generator=generator).mul_(2).sub_(1)


def _draw(
    out: Tensor,
    seed: int,
    name: str,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    scale: float,
    draw_tile: Callable[[torch.Generator], Tensor],
) -> None:
    """Fill `out` with a region of the tensor `name`, whose values are `scale` times those of tiles.

    The global tensor consists of 2-D tiles of TILE_ROWS x TILE_COLUMNS with a stream each
    (leading dimensions count planes), drawn in fp32 on the CPU, so its values depend neither on
    the layout nor on the device or dtype; only the tiles that the region touches are drawn. Where
    the region reaches beyond `shape` (padding) it is zero.
    """
    out.zero_()
    if out.dim() > 2:
        for plane in range(out.shape[0]):
            own = f"{name}/{offsets[0] + plane}"
            _draw(out[plane], seed, own, shape[1:], offsets[1:], scale, draw_tile)
        return
    assert out.dim() == 2, f"{name}: initial values are drawn for matrices only"
    generator = torch.Generator()
    (row0, column0), (rows, columns) = offsets, out.shape
    row_end, column_end = min(row0 + rows, shape[0]), min(column0 + columns, shape[1])
    if row_end <= row0 or column_end <= column0:
        return
    for i in range(row0 // TILE_ROWS, -(-row_end // TILE_ROWS)):
        for j in range(column0 // TILE_COLUMNS, -(-column_end // TILE_COLUMNS)):
            generator.manual_seed(seed_of(seed, "init", name, i, j))
            tile = draw_tile(generator)
            top, left = i * TILE_ROWS, j * TILE_COLUMNS
            a, b = max(row0, top), min(row_end, top + TILE_ROWS)
            c, d = max(column0, left), min(column_end, left + TILE_COLUMNS)
            part = tile[a - top : b - top, c - left : d - left] * scale
            out[a - row0 : b - row0, c - column0 : d - column0] = part.to(out.dtype)
