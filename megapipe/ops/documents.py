"""Documents within sequences: which tokens may attend to which, in the forms that kernels take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapipe.ops.transfer import to_device


class VarlenLengths(NamedTuple):
    """Lengths of documents, sample after sample, as varlen flash kernels take them."""

    cu_seqlens_q: Tensor
    """[n + 1] int32: cumulative number of queries per document, from 0; some may have no query."""
    cu_seqlens_k: Tensor
    """[n + 1] int32: cumulative number of keys per document, from 0."""
    max_seqlen_q: int
    max_seqlen_k: int


def varlen_lengths(lengths: Sequence[tuple[int, int]], device: torch.device) -> VarlenLengths:
    """Build :class:`VarlenLengths` from (number of queries, number of keys) pairs."""
    sides = queries, keys = [list(side) for side in zip(*lengths, strict=True)]
    ends = [list(accumulate(side, initial=0)) for side in sides]
    near = to_device(torch.tensor(ends, dtype=torch.int32), device)
    return VarlenLengths(near[0], near[1], max(queries), max(keys))


def document_ids(tokens: Tensor, end: int) -> Tensor:
    """Return the index of each token's document, [b, t], from 0 in each sample.

    `end`: id of the token that ends a document and belongs to it.
    """
    ends = (tokens == end).long()
    return ends.cumsum(-1) - ends


def _numbered(ids: Tensor) -> Tensor:
    """Return the index of each token's document, [b, t], counted over all samples."""
    begins = torch.ones_like(ids, dtype=torch.int64)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return begins.flatten().cumsum(0).view_as(ids) - 1


def _ends(numbers: Tensor, n: int) -> Tensor:
    """Return cumulative lengths of n documents, [n + 1] int32; `numbers`: each token's document."""
    tokens = torch.ones(numbers.numel(), dtype=torch.int32, device=numbers.device)
    lengths = torch.zeros(n + 1, dtype=torch.int32, device=numbers.device)
    return lengths.scatter_add_(0, numbers.flatten() + 1, tokens).cumsum(0, dtype=torch.int32)


def positions_in(ids: Tensor) -> Tensor:
    """Return each token's position in its document, [b, t], from the document ids [b, t]."""
    at = torch.arange(ids.shape[1], device=ids.device)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return at - torch.where(begins, at, 0).cummax(-1).values


def causal_block_mask(s: int, t: int, device: torch.device, window: int | None = None) -> Any:
    """Make FlexAttention's sparse block mask of the last s of t positions: each position sees
    itself and earlier positions, in total at most `window`."""
    from torch.nn.attention.flex_attention import create_block_mask

    def allowed(_row: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        before = q + (t - s) - k
        return before >= 0 if window is None else (before >= 0) & (before < window)

    return create_block_mask(allowed, None, None, s, t, device=device)


class Documents:
    """Documents of t positions, in the forms that attention kernels take; the last s are queries.

    `ids` [b, t] on the CPU give each position's document, non-decreasing along a sample. Each form
    (mask, cumulative lengths, block mask) is computed when a kernel first asks for it, and cached.
    `near` holds the ids on the device; by default they are copied there.
    """

    def __init__(self, ids: Tensor, device: torch.device, near: Tensor | None = None) -> None:
        self.ids = ids
        self.device = device
        self._near = to_device(ids, device) if near is None else near
        self._forms: dict[Any, Any] = {}

    def mask(self, s: int) -> Tensor:
        """Return [b, 1, s, t] bool: whether a query may see a key: same document, not later."""
        key = ("mask", s)
        if key not in self._forms:
            ids = self._near
            t = ids.shape[1]
            same = ids[:, -s:, None] == ids[:, None, :]
            past = torch.ones(s, t, dtype=torch.bool, device=self.device).tril(t - s)
            self._forms[key] = (same & past).unsqueeze(1)
        return self._forms[key]

    def runs(self, s: int) -> VarlenLengths:
        """Return the lengths of all documents, in queries (the last s positions) and in keys."""
        key = ("runs", s)
        if key not in self._forms:
            here, near = _numbered(self.ids), _numbered(self._near)
            n = int(here[-1, -1]) + 1
            most_q, most_k = (int(x.flatten().bincount().max()) for x in (here[:, -s:], here))
            self._forms[key] = VarlenLengths(_ends(near[:, -s:], n), _ends(near, n), most_q, most_k)
        return self._forms[key]

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the form cached under `key`, made by `make` on first use."""
        if key not in self._forms:
            self._forms[key] = make()
        return self._forms[key]

    def block_mask(self, s: int, window: int | None = None) -> Any:
        """Return :meth:`mask` as FlexAttention's block mask, cut to a sliding `window` if given."""
        from torch.nn.attention.flex_attention import create_block_mask

        key = ("blocks", s, window)
        if key not in self._forms:
            ids = self._near
            b, t = ids.shape

            def allowed(row: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
                q = q + (t - s)
                seen = (q >= k) & (ids[row, q] == ids[row, k])
                return seen if window is None else seen & (q - k < window)

            self._forms[key] = create_block_mask(allowed, b, None, s, t, device=self.device)
        return self._forms[key]
