"""Attention of transformers classes, computed by megapipe's kernels.

Transformers finds attention and masks by a name. Under the name :data:`NAME` a class gets masks as
patterns (:class:`CausalMask`), and :func:`attention` passes queries, keys and values to the layer
that runs. So attention kernels, documents, context parallelism and KV caches are the built-in
model's.

Only :func:`attention` can use a pattern. A class that does anything else with its mask fails when
it is tried on the meta device, and then keeps transformers' own attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megapipe.layers.kv_cache import KVCache
from megapipe.layers.microbatch import MicroBatch
from megapipe.model.hf.stand_ins import UnfitClassError
from megapipe.ops.attention import Sdpa
from megapipe.ops.kernels import Kernels
from megapipe.ops.scores import ScoreModifiers

NAME = "megapipe"
"""Name by which transformers finds :func:`attention` and :func:`causal_mask`."""
WITHOUT_EFFECT = {
    "position_ids",
    "position_embeddings",
    "sliding_window",  # the mask has it too
    "use_cache",
}
"""Arguments of attention in transformers that do not change what it returns."""
LACKING = {"s_aux": "sinks (a score beside those of the keys)"}
"""Arguments that megapipe's kernels do not know, in words."""


@dataclass(frozen=True)
class CausalMask:
    """Pattern of a mask: a position sees itself and earlier positions."""

    window: int | None = None
    """Number of positions that a position sees, itself included; None: all earlier ones."""


class AttentionCall(NamedTuple):
    """Attention that a layer asks for."""

    q: Tensor
    """[b, heads, s, d]"""
    k: Tensor
    """[b, groups, s, d]"""
    v: Tensor
    """[b, groups, s, dv]"""
    dropout: float
    scores: ScoreModifiers
    mask: Tensor | None
    """Mask that is no :class:`CausalMask`, [b, 1, s, s] bool or added to scores."""

    def explicit(self) -> Tensor:
        """Attend with torch's SDPA and the mask: return [b, heads, s, dv]."""
        copies = self.q.shape[1] // self.k.shape[1]
        k, v = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in (self.k, self.v))
        return scaled_dot_product_attention(
            self.q,
            k,
            v,
            self.mask,
            self.dropout,
            is_causal=self.mask is None,
            scale=self.scores.scale,
        )


class LayerAttention(Protocol):
    """Computes the attention of the layer that runs."""

    def __call__(self, call: AttentionCall) -> Tensor:
        """Return [b, heads, s, dv]."""


_RUNNING: ContextVar[LayerAttention] = ContextVar("attention of the layer that runs")


@contextmanager
def attending(attend: LayerAttention) -> Iterator[None]:
    """Within the context, layers get their attention from `attend`."""
    token = _RUNNING.set(attend)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: CausalMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks for it: q [b, heads, s, d], k and v [b, groups, s, d or dv] ->
    [b, s, heads, dv].

    Raises:
        UnfitClassError: an argument is not known, such as attention sinks.
    """
    unset = {name for name, value in others.items() if value is None or value is False}
    if unknown := sorted(others.keys() - unset - WITHOUT_EFFECT):
        what = LACKING.get(unknown[0], f"the argument {unknown[0]}")
        raise UnfitClassError(f"its attention has {what}, which megapipe's kernels lack")
    mask = attention_mask
    if mask is None and not (getattr(module, "is_causal", True) and is_causal is not False):
        raise UnfitClassError("its attention is not causal")
    pattern = mask if isinstance(mask, CausalMask) else CausalMask()
    scores = ScoreModifiers(scaling, softcap, window=pattern.window)
    explicit = mask if isinstance(mask, Tensor) else None
    if explicit is not None and softcap is not None:
        raise UnfitClassError("its attention has a soft cap and a mask of its own")
    if dropout and not scores.plain:
        raise UnfitClassError("its attention has dropout beside a window or a soft cap")
    attend = _RUNNING.get()
    y = attend(AttentionCall(query, key, value, dropout, scores, explicit))
    return y.transpose(1, 2).contiguous(), None


def causal_mask(
    *,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> CausalMask | Tensor | None:
    """Return a mask as transformers asks for it: a pattern if possible.

    `mask_function`: function (sample, head, query, key) -> whether the query sees the key.
    `local_size`: size of a window or of a chunk.
    """
    if allow_is_causal_skip and not use_vmap and attention_mask is None:
        found = _pattern(mask_function, local_size)
        if found is not None:
            return found
    mask: Tensor | None = sdpa_mask(
        mask_function=mask_function,
        local_size=local_size,
        allow_is_causal_skip=False,
        use_vmap=use_vmap,
        attention_mask=attention_mask,
        **others,
    )
    return mask


def _pattern(mask_function: Callable[..., Any], local_size: int | None) -> CausalMask | None:
    """Return the pattern of a mask, found by some of its rows; None: it is another one."""
    far = 64 if local_size is None else local_size + 2
    keys = torch.arange(far, device="cpu")
    queries = torch.tensor([0, 1, far - 3, far - 2, far - 1], device="cpu").unsqueeze(1)
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    try:
        seen = torch.as_tensor(mask_function(zero, zero, queries, keys))
    except (RuntimeError, IndexError):  # it depends on values that are elsewhere
        return None
    past = keys <= queries
    for window in (None, local_size):
        wanted = past if window is None else past & (queries - keys < window)
        if seen.shape == wanted.shape and seen.device == wanted.device and seen.equal(wanted):
            return CausalMask(window)
    return None


class StageAttention(NamedTuple):
    """Attention of a layer in a stage, with the kernels of its process."""

    layer: int
    kernels: Kernels
    mb: MicroBatch
    cache: KVCache | None = None

    def __call__(self, call: AttentionCall) -> Tensor:
        if call.mask is not None:
            return call.explicit()
        q, k, v, scores = call.q, call.k, call.v, call.scores
        context, kernel = self.kernels.context, self.kernels.attention
        has_widths = isinstance(kernel, Sdpa) and kernel.pinned is None
        if q.shape[-1] != v.shape[-1] and (context is not None or not has_widths):
            width = max(q.shape[-1], v.shape[-1])  # these kernels have one width
            scores = scores._replace(scale=scores.scale or q.shape[-1] ** -0.5)
            q, k, v = (pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        if context is not None:
            q, k, v = (_by_position(x) for x in (q, k, v))
            y = context.attend(q, k, v, self.mb, scores, self.layer, self.cache)
            y = _by_head(y)
        else:
            if self.cache is not None:
                new = _by_position(k), _by_position(v)
                k, v = map(_by_head, self.cache.extend(self.layer, self.mb.start, *new))
            y = kernel(q, k, v, call.dropout, self.mb.documents, scores)
        return y[..., : call.v.shape[-1]]


def _by_position(x: Tensor) -> Tensor:
    """Transpose [b, heads, s, d] -> [s, b, heads, d]."""
    return x.permute(2, 0, 1, 3)


def _by_head(x: Tensor) -> Tensor:
    """Transpose [s, b, heads, d] -> [b, heads, s, d]."""
    return x.permute(1, 2, 0, 3)


def register() -> None:
    """Make :func:`attention` and :func:`causal_mask` known to transformers."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, causal_mask)
