"""The weight-gradient GEMM, accumulated into the main gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megapipe.ops.probe import (
    Candidate,
    Unavailable,
    agree,
    load_module,
    needs_cuda,
    needs_half,
    small_data,
)

AccumulateKernel = Callable[[Tensor, Tensor, Tensor], None]
"""Function (main [out, in], fp32 or fp64; left [n, out]; right [n, in]): main += left^T @ right."""


def torch_accumulate(main: Tensor, left: Tensor, right: Tensor) -> None:
    """Accumulate with one GEMM if the types are equal, else with a product and a sum.

    On CUDA the product has the type of `main`. Elsewhere it has the factors' type: only CUDA has
    GEMMs whose result is wider than their factors.
    """
    if left.dtype == main.dtype:
        main.addmm_(left.t(), right)
    elif left.is_cuda:
        wide_accumulate(main, left, right)
    else:
        main.add_(left.t() @ right)


def wide_accumulate(main: Tensor, left: Tensor, right: Tensor) -> None:
    """Accumulate with a GEMM from bf16 or fp16 to fp32 (CUDA only), and an addition."""
    main.add_(torch.mm(left.t(), right, out_dtype=main.dtype))


def fused_accumulate(main: Tensor, left: Tensor, right: Tensor) -> None:
    """Accumulate with one GEMM, which adds the product of bf16 or fp16 matrices to fp32 `main`."""
    torch.addmm(main, left.t(), right, out_dtype=main.dtype, out=main)


def apex_accumulate(extension: Any) -> AccumulateKernel:
    """Return apex's GEMM; `extension` is fused_weight_gradient_mlp_cuda."""

    def accumulate(main: Tensor, left: Tensor, right: Tensor) -> None:
        extension.wgrad_gemm_accum_fp32(right, left, main)

    return accumulate


def candidates(*, device: torch.device, dtype: torch.dtype) -> list[Candidate[AccumulateKernel]]:
    """Return apex's and torch's kernels that add within the GEMM, then torch's plain kernel."""

    def usable() -> None:
        needs_cuda(device)
        needs_half(dtype)

    def apex() -> AccumulateKernel:
        usable()
        return apex_accumulate(load_module("fused_weight_gradient_mlp_cuda", "NVIDIA apex"))

    def fused() -> AccumulateKernel:
        usable()
        if not hasattr(torch.ops.aten.addmm, "dtype_out"):
            raise Unavailable(f"torch {torch.__version__} has no addmm with a wider result")
        return fused_accumulate

    def results(kernel: AccumulateKernel, precision: torch.dtype) -> Sequence[Tensor]:
        left, right, main = small_data([(64, 48), (64, 32), (48, 32)], dtype, precision, device)
        total = main.detach().to(torch.promote_types(precision, torch.float32))
        with torch.no_grad():
            kernel(total, left, right)
        return [total]

    def check(kernel: AccumulateKernel) -> None:
        agree(kernel, torch_accumulate, results, dtype)

    return [
        Candidate("apex", apex, check, "apex"),
        Candidate("fused", fused, check),
        Candidate("torch", lambda: torch_accumulate),
    ]
