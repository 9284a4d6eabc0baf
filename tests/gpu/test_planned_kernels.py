"""The plan's figures for a GPU's kernels, compared with a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megapipe.ops.attention_choice import AttentionShape, planned_backend, torch_choice
from megapipe.ops.probe import Unavailable
from megapipe.plan.cuda_kernels import WORKSPACES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
aten: Any = torch.ops.aten


@pytest.mark.parametrize("name", ["flash", "efficient", "math"])
def test_torch_takes_a_backend_where_the_plan_says_so(name: str) -> None:
    dtypes = torch.bfloat16, torch.float16, torch.float32, torch.float64
    wrong = []
    for dtype, dim, groups, masked in itertools.product(
        dtypes, (60, 64, 256, 264), (8, 2), (False, True)
    ):
        given = AttentionShape(torch.device("cuda"), dtype, 8, groups, dim, 256, documents=masked)
        found = []
        for choose in (
            lambda given=given: torch_choice(given, name),
            lambda dtype=dtype, dim=dim, groups=groups, masked=masked: planned_backend(
                dtype, dim, [name], masked=masked, grouped=groups < 8
            ),
        ):
            try:
                found.append(choose())
            except Unavailable:
                found.append("")
        if found[0] != found[1]:
            wrong.append((dtype, dim, groups, masked, *found))
    assert not wrong, "(type, head size, key heads, masked, torch, planned)"


@pytest.mark.parametrize(
    ("backend", "operation", "dtype"),
    [
        ("FLASH_ATTENTION", "flash", torch.bfloat16),
        ("EFFICIENT_ATTENTION", "efficient", torch.bfloat16),
        ("EFFICIENT_ATTENTION", "efficient", torch.float32),
    ],
)
def test_a_backward_takes_the_bytes_that_are_planned(
    backend: str, operation: str, dtype: torch.dtype
) -> None:
    """In addition to its results, to within 2%: torch's allocator rounds."""
    shape = (4, 1024, 16, 64)
    q, k, v = (
        torch.randn(shape, dtype=dtype, device="cuda").transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    with sdpa_kernel(getattr(SDPBackend, backend)):
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
    grad = torch.randn_like(y)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad(y, [q, k, v], grad)
    inside = torch.cuda.max_memory_allocated() - before - sum(each.nbytes for each in grads)
    of = WORKSPACES[getattr(aten, f"_scaled_dot_product_{operation}_attention_backward").default]
    more = [y] if operation == "flash" else [None, y]
    assert inside == pytest.approx(of(grad, q, k, v, *more), rel=0.02)
