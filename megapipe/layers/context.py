"""Attention over positions that are split over context-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megapipe.context.positions import Positions
from megapipe.context.tensors import split_groups
from megapipe.distributed.axis import Axis
from megapipe.layers.block_calls import TileRows
from megapipe.layers.kv_cache import KVCache
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.reshard import ulysses_all_to_all
from megapipe.layers.ring_attention import Ring, ring_attention
from megapipe.layers.scratch import ScratchKey
from megapipe.ops.scores import ScoreModifiers

ATTENTION = ScratchKey[tuple[Tensor, Tensor]]("results of attention")
"""Output and LSE of a first forward, which its recomputation takes out."""


@dataclass(frozen=True)
class ContextAttention:
    """The context-parallel group of a process: ranks that split heads while they attend, and rings
    of them over which positions stay split (USP, 2405.07719)."""

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
        """q [s, b, heads, d], k and v [s, b, groups, d] of this rank's positions -> [s, b, heads,
        d]. `cache` holds keys and values of slices, with heads split over `ulysses`."""
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
        """Keys or values with a head for each rank that splits them: copies, if there are fewer."""
        copies = split_groups(x.shape[2], self.ulysses.size) // x.shape[2]
        return x.repeat_interleave(copies, dim=2) if copies > 1 else x
