"""The activation of an MLP: GELU, or the gate of SwiGLU or GeGLU (Shazeer, 2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from megapipe.ops.geglu import torch_geglu
from megapipe.ops.swiglu import SwigluKernel, torch_swiglu, torch_swiglu_and_back


@dataclass(frozen=True)
class Activate:
    """Activation between the two matrices: [..., f], or gate and up [..., 2 f], -> [..., f]."""

    kind: str
    """Value of model.activation."""
    swiglu: SwigluKernel = torch_swiglu

    def __call__(self, y: Tensor) -> Tensor:
        if self.kind == "swiglu":
            return self.swiglu(y)
        if self.kind == "geglu_tanh":
            return torch_geglu(y)
        return self.of_parts(y)

    def and_back(self, y: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the activation of y, and a function that maps the activation's gradient to the
        gradient of y. No autograd graph is kept."""
        if self.kind == "swiglu" and self.swiglu is torch_swiglu:
            return torch_swiglu_and_back(y)
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            found = self(y)
        return found.detach(), lambda grad: torch.autograd.grad(found, y, grad)[0]

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """Return gate and up of [..., 2 f], or (y,): the arguments of :meth:`of_parts`."""
        return y.chunk(2, dim=-1) if self.kind in ("swiglu", "geglu_tanh") else (y,)

    def of_parts(self, *parts: Tensor) -> Tensor:
        """Return the activation of gate and up, or of one tensor, each [..., f], unfused."""
        if self.kind == "swiglu":
            return functional.silu(parts[0]) * parts[1]
        approximate = "none" if self.kind == "gelu" else "tanh"
        active = functional.gelu(parts[0], approximate=approximate)
        return active * parts[1] if len(parts) > 1 else active
