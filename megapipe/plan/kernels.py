"""Chooses kernels for planned stages on torch's meta device: imitations of a CPU's or a GPU's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megapipe.config.config import Config
from megapipe.layout.layout import DeviceKind, Layout
from megapipe.model.modules.fused_attention import cpu_attention
from megapipe.ops.attention import Sdpa
from megapipe.ops.kernels import Kernels
from megapipe.ops.moe import grouped
from megapipe.ops.tile_attention import CpuFlash, MathTile, TileKernel
from megapipe.plan import cuda_kernels


def planned_kernels(config: Config, layout: Layout) -> Kernels:
    """Choose the kernels of a run on its device, except those of :class:`ContextAttention`."""
    if layout.device == "cuda":
        return cuda_kernels.cuda_kernels(config, layout)
    experts = grouped.loop_product
    if config.kernels.only.expert_gemm == "grouped":
        experts = grouped.grouped_product
    kernels = Kernels(
        attention=Sdpa(call=cpu_attention),
        experts=experts,
        loss_chunk=config.loss_tokens(cuda=False),
        overlap=config.kernels.tp_comm_overlap,
    )
    return (
        replace(kernels, attention_tile=_blocks(layout)) if layout.uses_attention_tiles else kernels
    )


def _blocks(layout: Layout) -> TileKernel:
    needs = layout.model.kernel_needs.attention
    plain = needs is None or needs.scores.among(layout.local_length).plain
    return CpuFlash() if plain else MathTile()


def _cpu_layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate like LayerNorm on a CPU, where mean and rstd have the type of the input; on the meta
    device they are fp32, as on CUDA."""
    rows = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))
    return torch.empty_like(x), x.new_empty(rows), x.new_empty(rows)


def _grouped_product(x: Tensor, other: Tensor, offs: Tensor, *_: Any, **__: Any) -> Tensor:
    """Allocate the output of a grouped product, which torch supports on meta only in bf16: [rows,
    m] @ [experts, m, n] -> [rows, n], [m, rows] @ [rows, n] -> [experts, m, n]."""
    rows, columns = x.shape[0], other.shape[-1]
    return x.new_empty((rows, columns) if other.dim() == 3 else (len(offs), rows, columns))


STAND_INS: Mapping[DeviceKind, Mapping[Any, Callable[..., Any]]] = {
    "cpu": {
        torch.ops.aten.native_layer_norm.default: _cpu_layer_norm,
        torch.ops.aten._grouped_mm.default: _grouped_product,
    },
    "cuda": cuda_kernels.STAND_INS,
}
"""Replacements, by device, of operations whose results have another size on the meta device."""

WORKSPACES: Mapping[DeviceKind, Mapping[Any, Callable[..., int]]] = {
    "cpu": {},
    "cuda": cuda_kernels.WORKSPACES,
}
"""Functions from an operation's arguments to the bytes that it allocates internally while it runs,
by device; a CPU's kernels allocate none through torch."""
