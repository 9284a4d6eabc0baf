"""Checksums notice whatever changes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from megapipe.optim.checksum import Checksum

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
CPU = torch.device("cpu")
LENGTH = 3 * (1 << 15) + 100
"""More than three blocks."""


def drawn(dtype: torch.dtype, length: int = LENGTH) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(3)).to(dtype)


def words(values: Tensor) -> Tensor:
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_a_sum_of_words_by_odd_numbers_modulo_2_to_the_64(dtype: torch.dtype) -> None:
    values = drawn(dtype)
    golden = 0x9E3779B97F4A7C15
    terms = (word * (2 * place + 1) * golden for place, word in enumerate(words(values).tolist()))
    assert Checksum(CPU)(values).item() % 2**64 == sum(terms) % 2**64


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_flipped_bit_is_noticed_wherever_it_is(dtype: torch.dtype) -> None:
    values, draw, checksum = drawn(dtype), random.Random(5), Checksum(CPU)
    bits, before = 8 * values.element_size(), checksum(values)
    places = [0, (1 << 15) - 1, 1 << 15, LENGTH - 1, *draw.sample(range(LENGTH), 8)]
    for place in places:
        for bit in range(bits):
            flip = torch.tensor(1 << bit if bit < bits - 1 else -(1 << bit))
            words(values)[place] ^= flip.to(words(values).dtype)
            assert checksum(values) != before
            words(values)[place] ^= flip.to(words(values).dtype)
    assert checksum(values) == before


def test_the_order_counts_and_so_does_the_sign_of_zero() -> None:
    checksum, values = Checksum(CPU), drawn(torch.float32)
    moved = values.clone()
    moved[7], moved[1 << 15] = values[1 << 15], values[7]
    assert checksum(moved) != checksum(values)
    assert checksum(values.roll(1)) != checksum(values)
    assert checksum(torch.zeros(3)) != checksum(-torch.zeros(3))
    assert checksum(torch.zeros(0)) == 0
