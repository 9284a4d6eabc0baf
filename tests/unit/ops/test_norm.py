"""torch's norms, of which RMSNorm on the CPU is made here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megapipe.ops.norm import torch_norm

SHAPE, EPS = (7, 3, 20), 1e-3


def data(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in (SHAPE, SHAPE[-1:], SHAPE)
    )
    x[0, 0] = 0
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), grad.to(dtype)


def results(dtype: torch.dtype, *, composed: bool) -> list[Tensor]:
    """Return the output and both gradients."""
    x, weight, grad = data(dtype)
    if composed:
        y = functional.rms_norm(x, weight.shape, weight, EPS)
    else:
        y = torch_norm(x, weight, None, EPS, False)
    return [y.detach(), *torch.autograd.grad(y, [x, weight], grad)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
)
def test_rms_norm_is_that_of_torch(dtype: torch.dtype, tolerance: float) -> None:
    for own, theirs in zip(
        results(dtype, composed=False), results(dtype, composed=True), strict=True
    ):
        assert own.dtype == dtype
        assert own.shape == theirs.shape
        assert (own - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_keeps_its_input_and_a_number_per_row(dtype: torch.dtype) -> None:
    x, weight, _ = data(dtype)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        torch_norm(x, weight, None, EPS, False)
    del kept[x.data_ptr()], kept[weight.data_ptr()]
    assert list(kept.values()) == [SHAPE[0] * SHAPE[1] * 4]
