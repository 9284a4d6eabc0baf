"""Grouped GEMMs: rows in the order of experts, each group times its expert's matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from megapipe.ops.probe import Candidate, Unavailable, agree, is_planned, needs_fp32, small_data
from megapipe.ops.transfer import to_device

GroupedKernel = Callable[[Tensor, Tensor, Sequence[int]], Tensor]
"""Function (x [rows, in], matrices [experts, in, out], ends of experts' rows) -> [rows, out]."""

ROW_BYTES = 16
"""Alignment in bytes of the rows of torch's grouped GEMM."""
CHECKED = (0, 5, 5, 24)
"""End of each expert's rows in the self-check; some experts have no rows."""


def each_expert(ends: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, with the range of its rows."""
    start = 0
    for expert, end in enumerate(ends):
        if end > start:
            yield expert, slice(start, end)
        start = end


def loop_product(x: Tensor, weight: Tensor, ends: Sequence[int]) -> Tensor:
    """Compute one GEMM for each expert that has rows."""
    out = x.new_empty(len(x), weight.shape[-1])
    for expert, rows in each_expert(ends):
        torch.mm(x[rows], weight[expert], out=out[rows])
    return out


def grouped_product(x: Tensor, weight: Tensor, ends: Sequence[int]) -> Tensor:
    """Compute torch's grouped GEMM: one kernel for all experts, however many rows each has."""
    if not len(x):
        return x.new_empty(0, weight.shape[-1])
    stops = to_device(torch.tensor(ends, dtype=torch.int32), x.device)
    return functional.grouped_mm(x, weight, offs=stops)


def candidates(
    *, device: torch.device, dtype: torch.dtype, widths: Sequence[int]
) -> list[Candidate[GroupedKernel]]:
    """Return the kernels for rows of these `widths`. On a GPU the grouped kernel comes first. On a
    CPU it is no faster, and is used only if named."""

    def grouped() -> GroupedKernel:
        needs_fp32(dtype)
        if not hasattr(functional, "grouped_mm"):
            raise Unavailable(f"torch {torch.__version__} has no grouped_mm")
        if device.type == "cuda":
            if dtype != torch.bfloat16:  # other types: torch loops over experts, and the host waits
                raise Unavailable(f"takes bf16, not {str(dtype).removeprefix('torch.')}")
            if not is_planned() and torch.cuda.get_device_capability(device) < (8, 0):
                raise Unavailable("needs a GPU of compute capability 8.0 or more")
        for width in widths:
            if width * dtype.itemsize % ROW_BYTES:
                raise Unavailable(
                    f"needs rows of multiples of {ROW_BYTES} bytes, not {width * dtype.itemsize}"
                )
        return grouped_product

    def results(kernel: GroupedKernel, precision: torch.dtype) -> Sequence[Tensor]:
        shapes = [(CHECKED[-1], 32), (len(CHECKED), 32, 48), (len(CHECKED), 48, 32)]
        x, weight, turned = small_data(shapes, dtype, precision, device)
        with torch.no_grad():
            return [kernel(x, w, CHECKED) for w in (weight, turned.transpose(1, 2))]

    def check(kernel: GroupedKernel) -> None:
        agree(kernel, loop_product, results, dtype)

    found: list[Candidate[GroupedKernel]] = [
        Candidate("grouped", grouped, check),
        Candidate("loop", lambda: loop_product),
    ]
    return found if device.type == "cuda" else found[::-1]
