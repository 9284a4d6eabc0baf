"""Number types by their names in a configuration; their torch types are elsewhere."""

from typing import Literal

Dtype = Literal["fp32", "bf16", "fp16", "fp64"]

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


def main_bytes(dtype: str) -> int:
    """Size of a main gradient, master weight or moment of a model in `dtype`."""
    return max(DTYPE_BYTES[dtype], 4)
