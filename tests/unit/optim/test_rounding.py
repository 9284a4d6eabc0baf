"""Stochastic rounding: unbiased, exact where it can be, right at the ends, cut anywhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megapipe.optim.rounding import (
    noise_of_tile,
    round_at_random,
    stochastic_bf16,
    tile_length,
)

CPU = torch.device("cpu")
TILE = tile_length(CPU)
LARGEST = torch.finfo(torch.bfloat16).max


def from_bits(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def rounded(x: Tensor, noise: int) -> Tensor:
    return stochastic_bf16(x.clone(), torch.full(x.shape, noise, dtype=torch.int32))


def every_bf16() -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("noise", [0, 1, 0x7FFF, 0xFFFF])
def test_what_bf16_holds_is_kept_whatever_the_noise(noise: int) -> None:
    """All 65536 of them: zeros of both signs, denormals, infinities, NaNs."""
    given = every_bf16()
    out = rounded(given.float(), noise)
    assert out.isnan().equal(given.isnan())
    number = ~given.isnan()
    assert out[number].view(torch.int16).equal(given[number].view(torch.int16))


def test_between_two_values_the_low_bits_are_the_chance_of_the_farther() -> None:
    """All 65536 noises are tried, in normal and denormal ranges and for both signs."""
    noise = torch.arange(65536, dtype=torch.int32)
    normal, denormal = (0x3F800001, 0x3F80C000, 0xBF81FFFF, 0x7F7E1234), (1, 0x8123, 0x807FFFFF)
    for bits in (*normal, *denormal):
        x = from_bits(bits)
        out = stochastic_bf16(x.expand(65536).clone(), noise.clone())
        far, near = (from_bits((bits & ~0xFFFF) + step)[0] for step in (0x10000, 0))
        assert int((out.float() == far).sum()) == bits & 0xFFFF, hex(bits)
        assert int((out.float() == near).sum()) == 65536 - (bits & 0xFFFF), hex(bits)
        assert out.double().mean().item() == pytest.approx(x.double().item(), rel=1e-12)


def test_no_finite_value_becomes_infinite_and_nan_stays_nan() -> None:
    top = torch.finfo(torch.float32).max
    for noise in (0, 0xFFFF):
        out = rounded(torch.tensor([LARGEST, top, -top, 3.394e38]), noise)
        assert out.tolist() == [LARGEST, LARGEST, -LARGEST, LARGEST]
        ends = rounded(from_bits(0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF, 0xFF80FFFF), noise)
        assert ends[:2].tolist() == [torch.inf, -torch.inf]
        assert ends[2:].isnan().all()


def test_the_noise_is_uniform() -> None:
    noise = noise_of_tile(3, CPU)
    assert noise.shape == (TILE,)
    assert noise.dtype == torch.int32
    counts = torch.bincount(noise, minlength=65536)
    assert len(counts) == 65536
    expected = TILE / 65536
    chi2 = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi2 - 65535) < 5 * (2 * 65535) ** 0.5
    assert not noise.equal(noise_of_tile(4, CPU))
    assert noise.equal(noise_of_tile(3, CPU))


def test_the_mean_is_unbiased_where_rounding_to_nearest_would_not_move() -> None:
    """1 plus an eighth of bf16's spacing: nearest is 1, the mean at random is right."""
    x = torch.full((4 * TILE,), 1 + 2.0**-10)
    assert x.bfloat16().unique().tolist() == [1.0]
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    round_at_random(out, x, ("test",), 0)
    deviation = 2.0**-7 * (0.125 * 0.875 / x.numel()) ** 0.5
    assert abs(out.double().mean().item() - x[0].item()) < 5 * deviation
    assert out.unique().tolist() == [1.0, 1.0 + 2.0**-7]


def test_values_do_not_depend_on_how_the_array_is_cut() -> None:
    n = 2 * TILE + 1000
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    whole = torch.empty(n, dtype=torch.bfloat16)
    round_at_random(whole, x, (1, "a"), 0)
    parts = torch.empty_like(whole)
    cuts = [0, 7, TILE - 3, TILE, 2 * TILE + 1, n]
    for a, b in pairwise(cuts):
        round_at_random(parts[a:b], x[a:b], (1, "a"), a)
    assert parts.equal(whole)


@pytest.mark.parametrize("other", [(2, "a"), (1, "b"), (1, "a", 0)])
def test_other_coordinates_give_other_numbers(other: tuple[int | str, ...]) -> None:
    x = torch.full((4096,), 1 + 2.0**-8)
    mine, theirs = torch.empty(2, 4096, dtype=torch.bfloat16)
    round_at_random(mine, x, (1, "a"), 0)
    round_at_random(theirs, x, other, 0)
    assert 0.4 < (mine == theirs).float().mean().item() < 0.6


def test_the_default_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    round_at_random(torch.empty(8, dtype=torch.bfloat16), torch.ones(8), ("x",), 0)
    assert torch.get_rng_state().equal(before)
