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
"""(main [out, in] in fp32 (fp64), left [n, out], right [n, in]): main += left^T @ right."""


def torch_accumulate(main: Tensor, left: Tensor, right: Tensor) -> None:
    """One GEMM where the types are equal, else a product and a sum.

    The product has main's type on CUDA, and the factors' type elsewhere: only CUDA has GEMMs whose
    result is wider than their factors.
    """
    if left.dtype == main.dtype:
        main.addmm_(left.t(), right)
    elif left.is_cuda:
        wide_accumulate(main, left, right)
    else:
        main.add_(left.t() @ right)


def wide_accumulate(main: Tensor, left: Tensor, right: Tensor) -> None:
    """CUDA's GEMM of bf16 or fp16 factors with an fp32 result, and a sum."""
    main.add_(torch.mm(left.t(), right, out_dtype=main.dtype))


def fused_accumulate(main: Tensor, left: Tensor, right: Tensor) -> None:
    """torch's GEMM of bf16 or fp16 factors that adds into an fp32 matrix."""
    torch.addmm(main, left.t(), right, out_dtype=main.dtype, out=main)


def apex_accumulate(extension: Any) -> AccumulateKernel:
    """apex's GEMM, `extension` being fused_weight_gradient_mlp_cuda."""

    def accumulate(main: Tensor, left: Tensor, right: Tensor) -> None:
        extension.wgrad_gemm_accum_fp32(right, left, main)

    return accumulate


def candidates(*, device: torch.device, dtype: torch.dtype) -> list[Candidate[AccumulateKernel]]:
    """Those that add within the GEMM first: apex's, then torch's."""

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
