"""Number types as configurations name them, such as bf16. This module does not import torch."""

from typing import Literal

Dtype = Literal["fp32", "bf16", "fp16", "fp64"]

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


def main_bytes(dtype: str) -> int:
    """Return the bytes per value of main gradients, master weights and optimizer moments, if the
    model computes in `dtype`. They have the type `dtype`, or fp32 if that is wider."""
    return max(DTYPE_BYTES[dtype], 4)
