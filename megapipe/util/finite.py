"""Whether all values of an array are finite numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def all_finite(values: Tensor) -> bool:
    """Whether no value of a floating-point tensor on the host is infinite or no number.

    A sum is the fastest look at an array; only where it is not finite, which finite values may be
    the cause of, each value is looked at.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    return math.isfinite(values.sum(dtype=wide).item()) or bool(values.isfinite().all())
