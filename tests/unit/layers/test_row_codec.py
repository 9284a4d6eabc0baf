"""Codecs of rows: how far values are from what they were, and what stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megapipe.layers.moe.row_codec import CODECS
from megapipe.layers.moe.specs import wire_bytes

ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11,
            torch.bfloat16: 2.0**-8}  # fmt: skip
"""Largest relative error of a rounding to the nearest value."""
LEAST = {torch.float64: 0.0, torch.float32: 2.0**-150, torch.float16: 2.0**-25,
         torch.bfloat16: 2.0**-134}  # fmt: skip
"""Largest error of a rounding to a subnormal value."""
WIDTH = 96


def rows_of(dtype: torch.dtype) -> Tensor:
    """Make rows of all sizes that type and codecs have, with outliers, and alike but for sign."""
    generator = torch.Generator().manual_seed(5)

    def draw(count: int) -> Tensor:
        return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)

    largest, least = (2.0**14, 2.0**-20) if dtype == torch.float16 else (2.0**120, 2.0**-140)
    sizes = torch.linspace(0, 1, 400, dtype=torch.float64).unsqueeze(1)
    of_all_sizes = draw(400) * least * (largest / least) ** sizes / 6
    outliers = draw(50)
    outliers[:, 7] *= 1e3
    return torch.cat((of_all_sizes, outliers, draw(50).sign(), draw(3) * 0)).to(dtype)


def through(rows: Tensor, codec: str) -> Tensor:
    own = CODECS[codec]  # type: ignore[index]
    return own.decode(own.encode(rows), rows.dtype)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_int8_is_half_a_step_away_at_most(dtype: torch.dtype) -> None:
    """|x - decode(code(x))| <= bound holds for each row."""
    rows = rows_of(dtype)
    found = through(rows, "int8")
    assert found.dtype == dtype
    x, largest = rows.double(), rows.double().abs().amax(1, keepdim=True)
    half = (largest / 254).clamp(min=2.0**-127) * (1 + 2.0**-13)
    bound = half + ROUNDING[dtype] * largest * (1 + 2.0**-13) + LEAST[dtype]
    error = (found.double() - x).abs()
    assert (error <= bound).all()
    if ROUNDING[dtype] < 1e-6:
        regular = largest.squeeze(1) > 1e-30
        assert (error / bound)[regular].max() > 0.95, "the bound is that of an error that there is"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_bf16_is_a_rounding(dtype: torch.dtype) -> None:
    rows = rows_of(dtype)
    found, x = through(rows, "bf16"), rows.double()
    assert found.dtype == dtype
    bound = ROUNDING[torch.bfloat16] * x.abs() + LEAST[torch.bfloat16]
    assert ((found.double() - x).abs() <= bound).all()
    assert (found.bfloat16().to(dtype) == found).all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_what_a_codec_can_hold_is_not_rounded(codec: str, dtype: torch.dtype) -> None:
    """Whole numbers up to 127, one of which is that; times powers of two."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randint(-127, 128, (20, WIDTH), generator=generator).double()
    whole[:, 3] = 127
    whole *= (
        2.0 ** torch.arange(-10, 10, dtype=torch.float64).div(3, rounding_mode="floor")[:, None]
    )
    rows = whole.to(dtype)
    assert through(rows, codec).equal(rows)
    nothing = torch.zeros(2, WIDTH, dtype=dtype)
    assert through(nothing, codec).equal(nothing)
    assert through(rows[:0], codec).shape == (0, WIDTH)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_not_lost(codec: str, value: float) -> None:
    """Other rows are as without it."""
    rows = rows_of(torch.float32)[200:203]
    wrong = rows.clone()
    wrong[1, 5] = value
    found = through(wrong, codec)
    assert not found[1, 5].isfinite()
    if codec == "int8":
        assert not found[1].isfinite().any()
    assert found[::2].equal(through(rows, codec)[::2])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_that_plans_count(codec: str, dtype: torch.dtype) -> None:
    coded = CODECS[codec].encode(torch.zeros(5, WIDTH, dtype=dtype))  # type: ignore[index]
    assert coded.nbytes == 5 * wire_bytes(codec, WIDTH, dtype.itemsize)
