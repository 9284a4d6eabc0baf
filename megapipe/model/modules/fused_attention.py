"""Attention on the meta device that saves the tensors of fused kernels, without scores.

On the meta device ``scaled_dot_product_attention`` uses torch's plain operations, which save scores
[b, h, s, s]. On a CPU or a GPU it calls kernels that save inputs, output and LSE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Kernel that stands for all fused kernels; without dropout it draws no random numbers."""


def _flops(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Return FLOPs of scores q [b, h, s, d] x k [b, h, t, d] and of their product with v."""
    return 2 * prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _backward_flops(_: Any, *sizes: tuple[int, ...], **__: Any) -> int:
    """Return FLOPs of the gradients of q, k and v, without those of computing scores again."""
    return 2 * _flops(*sizes)


SDPA_FLOPS: dict[Any, Callable[..., int]] = {
    FUSED: _flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_flops,
}
"""FLOP formulas to pass to :class:`torch.utils.flop_counter.FlopCounterMode`."""


_PLAIN: Callable[..., Tensor] = functional.scaled_dot_product_attention


class _Calls(TorchFunctionMode):
    """Mode that replaces calls of SDPA, except those from within a torch function."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _PLAIN:
            return cpu_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def fused_attention() -> Iterator[None]:
    """Within the context, run SDPA on meta tensors with the fused kernel that a CPU would use."""
    within_torch = mock.patch.object(functional, "scaled_dot_product_attention", cpu_attention)
    with within_torch, _Calls():  # within_torch is for nn.MultiheadAttention
        yield


def cpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend on the meta device with the kernel that SDPA would choose for CPU tensors."""
    alike = query.dim() == 4 and query.shape[0] == key.shape[0] and key.shape == value.shape
    alike &= enable_gqa or query.shape[1] == key.shape[1]
    masked = attn_mask is not None and attn_mask.requires_grad
    if dropout_p == 0 and not masked and alike and query.shape[-1] == key.shape[-1]:
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype)
        y: Tensor = FUSED(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
        return y
    return _PLAIN(
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
