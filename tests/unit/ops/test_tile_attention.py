"""Blocks of attention, and how they are joined."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megapipe.ops.tile_attention import (
    CpuFlash,
    MathTile,
    TileKernel,
    merge,
    output_along,
)

KERNELS = [CpuFlash(), MathTile()]
B, HEADS, GROUPS, S, D = 2, 4, 2, 12, 8


def given(dtype: torch.dtype = torch.float64, groups: int = GROUPS) -> list[Tensor]:
    """Draw q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, groups, groups, HEADS)
    return [
        torch.randn(S, B, n, D, generator=generator, dtype=torch.float64)
        .to(dtype)
        .permute(1, 2, 0, 3)
        for n in heads
    ]


def whole(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, scale: float | None) -> tuple[Tensor, ...]:
    """Return output and gradients of causal attention."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True, scale=scale)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad))


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: type(k).__name__)
def test_blocks_make_the_whole(kernel: TileKernel, groups: int, scale: float | None) -> None:
    """They may come in any order, and rows may see nothing at first; gradients add up."""
    q, k, v, grad = given(groups=groups)
    cuts = [0, 4, 8, S]
    blocks = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    out = torch.zeros(B, HEADS, S, D, dtype=q.dtype)
    lse = torch.full((B, HEADS, S), float("-inf"), dtype=q.dtype)
    pairs = [(i, j) for i in blocks for j in blocks if j.start <= i.start]
    for i, j in reversed(pairs):
        block = kernel.forward(q[:, :, i], k[:, :, j], v[:, :, j], i == j, scale)
        merge(out[:, :, i], lse[:, :, i], *block)
    wanted, *grads = whole(q, k, v, grad, scale)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    found = [torch.zeros_like(x) for x in (q, k, v)]
    for i, j in pairs:
        parts = kernel.backward(
            grad[:, :, i],
            q[:, :, i],
            k[:, :, j],
            v[:, :, j],
            out[:, :, i],
            lse[:, :, i],
            i == j,
            scale,
        )
        for total, here, part in zip(found, (i, j, j), parts, strict=True):
            total[:, :, here] += part
    for total, exact in zip(found, grads, strict=True):
        torch.testing.assert_close(total, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: type(k).__name__)
def test_types(kernel: TileKernel, dtype: torch.dtype) -> None:
    q, k, v, grad = given(dtype)
    out, lse = kernel.forward(q, k, v, True, None)
    grads = kernel.backward(grad, q, k, v, out, lse, True, None)
    assert lse.dtype == torch.float32
    assert {x.dtype for x in (out, *grads)} == {dtype}
    wide = [x.double() for x in (q, k, v, grad)]
    rounding = torch.finfo(dtype).eps
    for found, exact in zip((out, *grads), whole(*wide, None), strict=True):
        error = (found.double() - exact).norm() / exact.norm()
        assert error < 4 * rounding


def test_rows_that_see_nothing() -> None:
    """Nothing merged with nothing stays so, and nothing changes what is known."""
    out, lse = torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), float("-inf"))
    nothing = out.clone(), lse.clone()
    merge(out, lse, *nothing)
    assert not out.any()
    assert lse.isneginf().all()
    known = torch.ones(1, 1, 2, 3), torch.full((1, 1, 2), 700.0)
    merge(out, lse, *known)
    assert out.equal(known[0])
    assert lse.equal(known[1])
    merge(out, lse, *nothing)
    assert out.equal(known[0])
    assert lse.equal(known[1])


@pytest.mark.parametrize("size", [1.0, 1e-200])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: type(k).__name__)
def test_dot_products_stand_for_the_output(kernel: TileKernel, size: float) -> None:
    """What is sent in place of the output is as good as it, for rows of any size."""
    q, k, v, grad = given()
    grad = grad * size
    grad[:, 0, 3] = 0.0
    out, lse = kernel.forward(q, k, v, True, None)
    rows = output_along(grad, (grad * out).sum(-1))
    wanted = kernel.backward(grad, q, k, v, out, lse, True, None)
    found = kernel.backward(grad, q, k, v, rows, lse, True, None)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x / size, y / size, rtol=1e-12, atol=1e-12)


def test_dot_products_lose_no_more_than_the_output_in_a_narrow_type() -> None:
    *_, grad = given(torch.bfloat16)
    out = torch.randn(grad.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wide = grad.double()
    exact = (wide * out).sum(-1)
    found = (wide * output_along(grad, exact.float()).double()).sum(-1)
    assert found.dtype == torch.float64
    assert ((found - exact).abs() <= 2**-8 * exact.abs()).all()
