"""Causal attention: torch's SDPA backends, FlexAttention, and flash kernels of packed sequences.

The queries are the last s of t positions. SDPA takes documents and sliding windows as a boolean
mask, and ALiBi as an additive mask. The flash kernels take variable lengths (varlen) and
FlexAttention a sparse block mask; both skip masked scores.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megapipe.ops.documents import Documents, causal_block_mask
from megapipe.ops.math_attention import (
    alibi,
    math_attention,
    query_key_positions,
    slopes_on,
    visible,
)
from megapipe.ops.scores import PLAIN, ScoreModifiers


class AttentionKernel(Protocol):
    """Attention: q [b, heads, s, d], k and v [b, groups, t, d] -> [b, heads, s, d].

    Dropout draws from the device's default generator.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout: float,
        documents: Documents | None,
        scores: ScoreModifiers = PLAIN,
    ) -> Tensor: ...


class Sdpa:
    """torch's scaled_dot_product_attention; torch chooses among its backends at each call.

    `pinned` makes a context manager that allows one backend only. Scores that no backend computes
    use :func:`math_attention`. So do sliding windows and ALiBi on the CPU: a backend would save a
    mask per call there. The memory plan replaces torch's function by `call`, and sets `on_gpu` to
    plan for a GPU that is not present.
    """

    def __init__(
        self,
        pinned: Callable[[], AbstractContextManager[Any]] | None = None,
        call: Callable[..., Tensor] | None = None,
        *,
        on_gpu: bool | None = None,
    ) -> None:
        self.pinned = pinned
        self.call = call
        self.on_gpu = on_gpu
        self._masks: dict[Any, Tensor] = {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout: float,
        documents: Documents | None,
        scores: ScoreModifiers = PLAIN,
    ) -> Tensor:
        scores = scores.among(k.shape[2])
        if self.pinned is not None:
            with self.pinned():
                return self._attend(q, k, v, dropout, documents, scores)
        on_gpu = q.is_cuda if self.on_gpu is None else self.on_gpu
        if scores.softcap is not None or not (on_gpu or scores.plain):
            assert not dropout
            return math_attention(q, k, v, documents, scores)
        return self._attend(q, k, v, dropout, documents, scores)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout: float,
        documents: Documents | None,
        scores: ScoreModifiers,
    ) -> Tensor:
        s, t = q.shape[2], k.shape[2]
        mask = None
        if not scores.plain:
            assert scores.softcap is None
            mask = self._mask(q, t, documents, scores)
        elif documents is not None:
            mask = documents.mask(s)
        elif s < t and not self.on_gpu:  # a planned GPU makes no mask either
            mask = lower_right(s, t, q.device)
        return (self.call or scaled_dot_product_attention)(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=q.shape[1] != k.shape[1],
            dropout_p=dropout,
            scale=scores.scale,
        )

    def _mask(
        self, q: Tensor, t: int, documents: Documents | None, scores: ScoreModifiers
    ) -> Tensor:
        """Return the mask of sliding window, ALiBi and documents; cached, in `documents` if any."""
        s, shape = q.shape[2], scores._replace(scale=None)
        key = (s, t, shape, q.dtype, q.device)

        def make() -> Tensor:
            seen = visible(s, t, documents, scores, q.device)
            if scores.slopes is None:
                return seen
            positions = query_key_positions(s, t, torch.float32, q.device)
            bias = alibi(positions, scores.slopes).to(q.dtype)
            return bias[None].masked_fill(~seen, float("-inf"))  # [1 or b, heads, s, t]

        if torch.compiler.is_compiling():
            return make()
        if documents is not None:
            return documents.kept(key, make)
        if key not in self._masks:
            self._masks[key] = make()
        return self._masks[key]


class FlashAttn:
    """Tri Dao's flash-attn 2 (2307.08691); `package` is the module flash_attn."""

    def __init__(self, package: Any) -> None:
        self.package = package

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout: float,
        documents: Documents | None,
        scores: ScoreModifiers = PLAIN,
    ) -> Tensor:
        deterministic = torch.are_deterministic_algorithms_enabled()
        options = {"dropout_p": dropout, "causal": True, "deterministic": deterministic}
        if scores != PLAIN:
            options |= self._options(scores, q.device)
        if documents is None:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return self.package.flash_attn_func(q, k, v, **options).transpose(1, 2)
        runs = documents.runs(q.shape[2])
        packed = map(_packed, (q, k, v))
        return _unpacked(self.package.flash_attn_varlen_func(*packed, *runs, **options), q)

    def _options(self, scores: ScoreModifiers, device: torch.device) -> dict[str, Any]:
        slopes = scores.slopes
        return {
            "softmax_scale": scores.scale,
            "window_size": (-1, -1) if scores.window is None else (scores.window - 1, 0),
            "softcap": scores.softcap or 0.0,
            "alibi_slopes": None if slopes is None else slopes_on(slopes, torch.float32, device),
        }


class Varlen:
    """torch's varlen flash kernel for documents; without documents SDPA is used.

    `varlen_attn` is the function in torch.nn.attention.varlen. The kernel has no dropout.
    """

    def __init__(self, varlen_attn: Callable[..., Tensor]) -> None:
        self.varlen_attn = varlen_attn
        self.whole = Sdpa()

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout: float,
        documents: Documents | None,
        scores: ScoreModifiers = PLAIN,
    ) -> Tensor:
        assert not dropout
        if documents is None:
            return self.whole(q, k, v, dropout, None, scores)
        assert scores.softcap is None
        assert scores.slopes is None
        runs = documents.runs(q.shape[2])
        gqa = q.shape[1] != k.shape[1]
        packed = map(_packed, (q, k, v))
        options = {} if scores.scale is None else {"scale": scores.scale}
        back = -1 if scores.window is None else scores.window - 1
        y = self.varlen_attn(*packed, *runs, window_size=(back, 0), enable_gqa=gqa, **options)
        return _unpacked(y, q)


class Flex:
    """FlexAttention (2412.05496): torch's compiled `flex_attention`, without dropout."""

    def __init__(self, flex_attention: Callable[..., Tensor]) -> None:
        self.flex_attention = flex_attention
        self._causal: dict[tuple[int, int, int | None], Any] = {}
        self._score_mods: dict[tuple[ScoreModifiers, int], Any] = {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout: float,
        documents: Documents | None,
        scores: ScoreModifiers = PLAIN,
    ) -> Tensor:
        assert not dropout
        s, t, window = q.shape[2], k.shape[2], scores.among(k.shape[2]).window
        if documents is not None:
            blocks = documents.block_mask(s, window)
        else:
            if (s, t, window) not in self._causal:
                self._causal[s, t, window] = causal_block_mask(s, t, q.device, window)
            blocks = self._causal[s, t, window]
        options: dict[str, Any] = {"block_mask": blocks, "enable_gqa": q.shape[1] != k.shape[1]}
        if scores.scale is not None:
            options["scale"] = scores.scale
        if scores.softcap is not None or scores.slopes is not None:
            if (scores, t - s) not in self._score_mods:
                self._score_mods[scores, t - s] = _score_mod(scores, t - s, q.device)
            options["score_mod"] = self._score_mods[scores, t - s]
        return self.flex_attention(q, k, v, **options)


def _score_mod(scores: ScoreModifiers, earlier: int, device: torch.device) -> Callable[..., Tensor]:
    """Return FlexAttention's score_mod; `earlier`: number of positions before the first query."""
    cap = scores.softcap
    slopes = None if scores.slopes is None else torch.tensor(scores.slopes, device=device)

    def modified(score: Tensor, _row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if slopes is not None:
            score = score - slopes[head] * (q + earlier - k)
        return score

    return modified


def lower_right(s: int, t: int, device: torch.device) -> Tensor:
    """Return the causal mask of the last s of t positions; a GPU may need no memory for it."""
    if device.type != "cuda":
        return torch.ones(s, t, dtype=torch.bool, device=device).tril(t - s)
    from torch.nn.attention.bias import causal_lower_right  # imports torch.compile's machinery

    return causal_lower_right(s, t)


def _packed(x: Tensor) -> Tensor:
    """Reshape [b, heads, s, d] -> [b * s, heads, d]."""
    return x.transpose(1, 2).flatten(0, 1)


def _unpacked(y: Tensor, like: Tensor) -> Tensor:
    """Reshape [b * s, heads, d] -> the shape of `like`, [b, heads, s, d]."""
    return y.view(like.shape[0], like.shape[2], *y.shape[1:]).transpose(1, 2)
