"""Attention over positions that are split over context-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megapipe.context.positions import Positions
from megapipe.context.tensors import split_groups
from megapipe.distributed.axis import Axis
from megapipe.layers.attention_tiles import TileRows
from megapipe.layers.kv_cache import KVCache
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.ring_attention import Ring, ring_attention
from megapipe.layers.scratch import ScratchKey
from megapipe.layers.ulysses_all_to_all import ulysses_all_to_all
from megapipe.ops.scores import ScoreModifiers

ATTENTION = ScratchKey[tuple[Tensor, Tensor]]("results of attention")
"""Key of attention's output and LSE: a first forward stores them, a recomputation removes them."""


@dataclass(frozen=True)
class ContextAttention:
    """Context-parallel attention of a process (USP, 2405.07719): the ranks of `ulysses` split heads
    during attention, and positions stay split over the ranks of `ring`."""

    ring: Ring
    ulysses: Axis

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mb: MicroBatch,
        scores: ScoreModifiers,
        layer: int,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Compute this rank's attention: q [s, b, heads, d], k and v [s, b, groups, d] -> [s, b,
        heads, d]. `cache` holds K and V of earlier slices, with heads split over `ulysses`."""
        n = self.ulysses.size
        k, v = (self._enough(x) for x in (k, v))
        q, k, v = (ulysses_all_to_all(x, 2, 0, self.ulysses) for x in (q, k, v))
        start, stop = mb.start * n, mb.start * n + len(q)
        if cache is not None:
            k, v = cache.extend(layer, start, k, v, gathered=n)
        blocks = (
            (Positions.whole(stop),) if mb.local_positions is None else mb.local_positions.blocks
        )
        queries = tuple(block.rows(start, stop) for block in blocks)
        keys = tuple(block.rows(0, stop) for block in blocks)
        rows = TileRows(queries, keys, scores.of_heads(self.ulysses.index, n), mb.documents)
        stored = None if mb.recompute_scratch is None else mb.recompute_scratch.by_layer(ATTENTION)
        known = None if stored is None else stored.pop(layer, None)
        y, results = ring_attention(q, k, v, self.ring, rows, known)
        if stored is not None and known is None:
            stored[layer] = results
        return ulysses_all_to_all(y, 0, 2, self.ulysses)

    def _enough(self, x: Tensor) -> Tensor:
        """Repeat the KV heads of `x` if there are fewer than Ulysses ranks."""
        copies = split_groups(x.shape[2], self.ulysses.size) // x.shape[2]
        return x.repeat_interleave(copies, dim=2) if copies > 1 else x
