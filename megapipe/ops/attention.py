"""Causal attention: torch's SDPA backends, FlexAttention, and flash kernels of packed rows.

The queries are the last s of t positions. SDPA takes documents as a mask; the flash kernels take
runs of rows (varlen) and FlexAttention a sparse block mask, and both skip what is masked.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megapipe.ops.documents import Documents, causal_block_mask

AttentionKernel = Callable[[Tensor, Tensor, Tensor, float, "Documents | None"], Tensor]
"""(q [b, heads, s, d], k and v [b, groups, t, d], dropout, documents) -> [b, heads, s, d].

Dropout draws from the device's default generator."""


class Sdpa:
    """torch's scaled_dot_product_attention; torch chooses among its backends at each call.

    `pinned` makes a context manager that allows one backend only.
    """

    def __init__(self, pinned: Callable[[], AbstractContextManager[Any]] | None = None) -> None:
        self.pinned = pinned

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, documents: Documents | None
    ) -> Tensor:
        if self.pinned is None:
            return self._attend(q, k, v, dropout, documents)
        with self.pinned():
            return self._attend(q, k, v, dropout, documents)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, documents: Documents | None
    ) -> Tensor:
        s, t = q.shape[2], k.shape[2]
        mask = None
        if documents is not None:
            mask = documents.mask(s)
        elif s < t:
            mask = lower_right(s, t, q.device)
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=q.shape[1] != k.shape[1],
            dropout_p=dropout,
        )


class FlashAttn:
    """Tri Dao's flash-attn 2 (2307.08691), `package` being the module flash_attn."""

    def __init__(self, package: Any) -> None:
        self.package = package

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, documents: Documents | None
    ) -> Tensor:
        deterministic = torch.are_deterministic_algorithms_enabled()
        options = {"dropout_p": dropout, "causal": True, "deterministic": deterministic}
        if documents is None:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return self.package.flash_attn_func(q, k, v, **options).transpose(1, 2)
        runs = documents.runs(q.shape[2])
        packed = map(_packed, (q, k, v))
        return _unpacked(self.package.flash_attn_varlen_func(*packed, *runs, **options), q)


class Varlen:
    """torch's flash kernel for documents of any length; whole rows go through SDPA.

    `varlen_attn` is torch.nn.attention.varlen's. It has no dropout.
    """

    def __init__(self, varlen_attn: Callable[..., Tensor]) -> None:
        self.varlen_attn = varlen_attn
        self.whole = Sdpa()

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, documents: Documents | None
    ) -> Tensor:
        assert not dropout
        if documents is None:
            return self.whole(q, k, v, dropout, None)
        runs = documents.runs(q.shape[2])
        gqa = q.shape[1] != k.shape[1]
        packed = map(_packed, (q, k, v))
        return _unpacked(self.varlen_attn(*packed, *runs, window_size=(-1, 0), enable_gqa=gqa), q)


class Flex:
    """FlexAttention (2412.05496), `flex_attention` being torch's, compiled. It has no dropout."""

    def __init__(self, flex_attention: Callable[..., Tensor]) -> None:
        self.flex_attention = flex_attention
        self._causal: dict[tuple[int, int], Any] = {}

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, documents: Documents | None
    ) -> Tensor:
        assert not dropout
        s, t = q.shape[2], k.shape[2]
        if documents is not None:
            blocks = documents.block_mask(s)
        else:
            if (s, t) not in self._causal:
                self._causal[s, t] = causal_block_mask(s, t, q.device)
            blocks = self._causal[s, t]
        gqa = q.shape[1] != k.shape[1]
        return self.flex_attention(q, k, v, block_mask=blocks, enable_gqa=gqa)


def lower_right(s: int, t: int, device: torch.device) -> Tensor:
    """The causal mask of the last s of t positions; on a GPU torch may do without making it."""
    if device.type == "cpu":
        return torch.ones(s, t, dtype=torch.bool).tril(t - s)
    from torch.nn.attention.bias import causal_lower_right  # loads torch.compile's machinery

    return causal_lower_right(s, t)


def _packed(x: Tensor) -> Tensor:
    """[b, heads, s, d] -> [b * s, heads, d]."""
    return x.transpose(1, 2).flatten(0, 1)


def _unpacked(y: Tensor, like: Tensor) -> Tensor:
    """[b * s, heads, d] -> the shape of `like`, [b, heads, s, d]."""
    return y.view(like.shape[0], like.shape[2], *y.shape[1:]).transpose(1, 2)
