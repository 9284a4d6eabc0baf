"""torch's dropout as a kernel."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

DropoutKernel = Callable[[Tensor, float], Tensor]
"""Function (x [...], probability) -> [...] that draws from the device's default generator."""


def torch_dropout(x: Tensor, p: float) -> Tensor:
    return functional.dropout(x, p, training=True)
