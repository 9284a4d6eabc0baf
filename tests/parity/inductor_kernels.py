"""Kernels that inductor makes."""

from __future__ import annotations

from typing import Any

import torch

from megapipe.ops import loss, rotary, swiglu
from megapipe.ops.moe import rows
from megapipe.ops.probe import Choice, choose


def chosen(dtype: torch.dtype) -> list[Choice[Any]]:
    """inductor's kernels, which have passed their self-checks."""
    purposes = {"loss": loss, "rotary": rotary, "swiglu": swiglu, "rows": rows}
    given: dict[str, Any] = {"device": torch.device("cpu"), "dtype": dtype}
    return [
        choose(name, "inductor", module.candidates(**given)) for name, module in purposes.items()
    ]
