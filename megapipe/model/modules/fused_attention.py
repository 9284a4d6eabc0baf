"""Attention on the meta device as fused kernels run it: no scores are kept.

On the meta device ``scaled_dot_product_attention`` takes torch's plain formulas, which keep scores
[b, h, s, s]; on a CPU or a GPU it has kernels that keep inputs, output and one sum per row.
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
"""The kernel that stands in for all fused ones; without dropout it draws no random numbers."""


def _flops(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Of two products: q [b, h, s, d] k [b, h, t, d] -> [b, h, s, t], and that with v."""
    return 2 * prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


SDPA_FLOPS: dict[Any, Callable[..., int]] = {FUSED: _flops}
"""For :class:`torch.utils.flop_counter.FlopCounterMode`."""


_PLAIN: Callable[..., Tensor] = functional.scaled_dot_product_attention


class _Calls(TorchFunctionMode):
    """Catches the calls that do not come from within a function of torch's."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _PLAIN:
            return cpu_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def fused_attention() -> Iterator[None]:
    """Take the shapes of a CPU's fused kernel where that would be chosen: without dropout."""
    within_torch = mock.patch.object(functional, "scaled_dot_product_attention", cpu_attention)
    with within_torch, _Calls():  # the former for nn.MultiheadAttention
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
    """Attend as SDPA does with tensors of a CPU, by the kernel that it takes there."""
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
