"""The activation of an MLP, and its gradient without a graph."""

from __future__ import annotations

import pytest
import torch

from megapipe.ops.activation import Activate
from megapipe.ops.swiglu import torch_swiglu


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "swiglu", "geglu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_its_gradient_is_autograds(kind: str, dtype: torch.dtype) -> None:
    """It is equal to the bit, also where the result is overwritten before, and by a kernel that
    brings its own backward."""
    generator = torch.Generator().manual_seed(0)
    y, grad = (torch.randn(5, 38, dtype=dtype, generator=generator) for _ in range(2))
    plain = Activate(kind)
    grad = grad[:, : plain.split(y)[0].shape[1]]
    leaf = y.clone().requires_grad_()
    wanted = plain.of_parts(*plain.split(leaf))
    (of_y,) = torch.autograd.grad(wanted, leaf, grad)
    for activation in (plain, Activate(kind, swiglu=lambda both: torch_swiglu(both))):
        found, back = activation.and_back(y)
        assert torch.equal(found, wanted)
        found.zero_()
        assert torch.equal(back(grad), of_y)
