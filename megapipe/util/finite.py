"""A fast check of host tensors for inf and NaN."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def all_finite(values: Tensor) -> bool:
    """Whether all values of a floating-point host tensor are finite (no inf, no NaN).

    The sum is checked first, which is fastest. A sum of finite values can overflow, so each value
    is checked if the sum is not finite.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    return math.isfinite(values.sum(dtype=wide).item()) or bool(values.isfinite().all())
