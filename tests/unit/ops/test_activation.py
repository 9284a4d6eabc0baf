"""The activation of an MLP, and its gradient without a graph."""

from __future__ import annotations

import pytest
import torch

from megapipe.ops.activation import Activate
from megapipe.ops.swiglu import torch_swiglu


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "swiglu", "geglu_tanh"])
def test_its_gradient_is_autograds(kind: str) -> None:
    """Also where the result is overwritten before, and by a kernel that brings its own backward."""
    generator = torch.Generator().manual_seed(0)
    y, grad = (torch.randn(5, n, dtype=torch.float64, generator=generator) for n in (12, 12))
    plain = Activate(kind)
    grad = grad[:, : plain.split(y)[0].shape[1]]
    leaf = y.clone().requires_grad_()
    wanted = plain.of_parts(*plain.split(leaf))
    (of_y,) = torch.autograd.grad(wanted, leaf, grad)
    for activation in (plain, Activate(kind, swiglu=lambda both: torch_swiglu(both))):
        found, back = activation.and_back(y)
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-14, atol=0)
        found.zero_()
        torch.testing.assert_close(back(grad), of_y, rtol=1e-13, atol=1e-15)
