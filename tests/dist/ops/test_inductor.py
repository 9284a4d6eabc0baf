"""Kernels that inductor compiles pass their self-checks."""

from __future__ import annotations

import pytest
import torch

from tests.parity.inductor_kernels import chosen

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_they_pass_them_compiled(dtype: torch.dtype) -> None:
    assert [choice.name for choice in chosen(dtype)] == ["inductor"] * 4
