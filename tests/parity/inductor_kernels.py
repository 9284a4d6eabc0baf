"""Kernels that inductor makes."""

from __future__ import annotations

from typing import Any

import torch

from megapipe.ops import loss, rotary, swiglu
from megapipe.ops.moe import elementwise
from megapipe.ops.probe import KernelChoice, choose_kernel


def chosen(dtype: torch.dtype) -> list[KernelChoice[Any]]:
    """Return inductor's kernels, which have passed their self-checks."""
    purposes = {"loss": loss, "rotary": rotary, "swiglu": swiglu, "moe_elementwise": elementwise}
    given: dict[str, Any] = {"device": torch.device("cpu"), "dtype": dtype}
    return [
        choose_kernel(name, "inductor", module.candidates(**given))
        for name, module in purposes.items()
    ]
