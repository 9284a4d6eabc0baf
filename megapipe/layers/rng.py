"""Random numbers as functions of coordinates, not of history.

Every draw is seeded by its coordinates: (run seed, purpose, step, global micro-batch, layer, and
the tp rank if the tensor is split). No state per rank needs saving, and recomputation and any order
of the schedule give the same numbers. The device's generator is restored afterwards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

TILE_ROWS, TILE_COLUMNS = 64, 512


def seed_of(*coordinates: int | str) -> int:
    """Return a 63-bit seed from coordinates; different coordinates give independent streams."""
    text = "\x1f".join(map(str, coordinates)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the device's default generator inside the context; restore its state afterwards."""
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
    """Return a random fp32 value in [0, 1) for each int64 of `numbers`, from the number and `seed`.

    The value is the first 24 bits of splitmix64 (Steele et al., 2014): a few wrapping operations on
    64-bit integers, on any device.
    """
    mixed = numbers * _signed(0x9E3779B97F4A7C15) + seed
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    return _shifted(mixed ^ _shifted(mixed, 31), 40).float() * 2.0**-24


def _signed(number: int) -> int:
    """Convert an unsigned 64-bit number to the signed number with the same bits."""
    return number - (number >> 63 << 64)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift int64 numbers right by `bits`, filling with zeros."""
    return (numbers >> bits) & ((1 << 64 - bits) - 1)


def draw_normal(
    out: Tensor,
    seed: int,
    name: str,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    std: float,
) -> None:
    """Fill `out` with the region at `offsets` of a global tensor `name` drawn from N(0, std^2)."""
    _draw(out, seed, name, shape, offsets, std, _normal_tile)


def draw_uniform(
    out: Tensor,
    seed: int,
    name: str,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    bound: float,
) -> None:
    """Fill `out` with the region at `offsets` of a global tensor `name` drawn from [-bound,
    bound]."""
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
    """Fill `out` with a region of the tensor `name`, whose values are `scale` times random tiles.

    The global tensor consists of 2-D tiles of TILE_ROWS x TILE_COLUMNS (in each plane, with leading
    dimensions). Each tile has its own random stream and is drawn in fp32 on the CPU. So values do
    not depend on layout, device or dtype. Only tiles that the region touches are drawn. The region
    is zero beyond `shape` (padding).
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
