"""Kernel calls for the scores between one ring member's queries and another member's keys."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.context.documents import within_documents
from megapipe.context.packs import joined, together
from megapipe.context.positions import Positions
from megapipe.context.score_rects import ScoreRect, score_rects
from megapipe.ops.documents import Documents, VarlenLengths, varlen_lengths
from megapipe.ops.packed_tile_kernels import PackedTileKernel
from megapipe.ops.score_tiles import ScoreTile
from megapipe.ops.scores import PLAIN, ScoreModifiers
from megapipe.ops.tile_attention import TileKernel


class AttentionTile(ABC):
    """A kernel call, forward or backward, for scores between one ring member's queries and another
    member's keys. Arguments cover all positions of the two members: q, out and its gradient [s, b,
    heads, d], k and v [t, b, groups, d], lse [b, heads, s].

    Results are yielded per rectangle of scores, for its n queries or keys: [b or 1, heads or
    groups, n, d], and LSE [b or 1, heads, n]. No other temporary memory is held meanwhile.
    """

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor
    ) -> Iterator[tuple[ScoreRect, Tensor, Tensor]]:
        """Yield each rectangle with its output and LSE."""

    @abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Iterator[tuple[ScoreRect, tuple[Tensor, Tensor, Tensor]]]:
        """Yield each rectangle with its gradients of q, k and v."""


@dataclass(frozen=True)
class SingleTile(AttentionTile):
    """A kernel call for one rectangle of scores."""

    entry: ScoreRect
    kernel: TileKernel
    scale: float | None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor
    ) -> Iterator[tuple[ScoreRect, Tensor, Tensor]]:
        entry = self.entry
        block, lse = self.kernel.forward(
            q=rows_of(q, entry.queries, entry),
            k=rows_of(k, entry.keys, entry),
            v=rows_of(v, entry.keys, entry),
            causal=entry.causal,
            scale=self.scale,
        )
        yield entry, block, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Iterator[tuple[ScoreRect, tuple[Tensor, Tensor, Tensor]]]:
        entry = self.entry
        found = self.kernel.backward(
            grad=rows_of(grad, entry.queries, entry),
            q=rows_of(q, entry.queries, entry),
            k=rows_of(k, entry.keys, entry),
            v=rows_of(v, entry.keys, entry),
            out=rows_of(out, entry.queries, entry),
            lse=lse_of(lse, entry),
            causal=entry.causal,
            scale=self.scale,
        )
        yield entry, found


@dataclass(frozen=True)
class Pack:
    """Rectangles of scores that one kernel call computes on concatenated queries and keys."""

    parts: tuple[ScoreRect, ...]
    """Rectangles of one sample each; adjacent ones of a sample are merged into one."""
    runs: VarlenLengths
    """Cumulative lengths (cu_seqlens) of the rectangles before adjacent ones were merged."""

    @classmethod
    def of(cls, rectangles: Sequence[ScoreRect], device: torch.device) -> Pack:
        """Pack rectangles into one kernel call; they must be all causal or all non-causal."""
        return cls(
            joined(rectangles), varlen_lengths([entry.sizes for entry in rectangles], device)
        )


@dataclass(frozen=True)
class PackedTiles(AttentionTile):
    """A kernel call for many rectangles of scores."""

    pack: Pack
    kernel: PackedTileKernel
    scale: float | None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor
    ) -> Iterator[tuple[ScoreRect, Tensor, Tensor]]:
        out, lse = self.kernel.forward(
            q=self._queries(q),
            k=self._keys(k),
            v=self._keys(v),
            runs=self.pack.runs,
            causal=self.pack.parts[0].causal,
            scale=self.scale,
        )
        for entry, rows, _ in self._packed_ranges():
            yield entry, _one_sample(out[rows]), lse[:, rows].unsqueeze(0)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Iterator[tuple[ScoreRect, tuple[Tensor, Tensor, Tensor]]]:
        grad_q, grad_k, grad_v = self.kernel.backward(
            grad=self._queries(grad),
            q=self._queries(q),
            k=self._keys(k),
            v=self._keys(v),
            out=self._queries(out),
            lse=torch.cat([lse_of(lse, entry)[0] for entry in self.pack.parts], dim=1),
            runs=self.pack.runs,
            causal=self.pack.parts[0].causal,
            scale=self.scale,
        )
        for entry, rows, keys in self._packed_ranges():
            found = grad_q[rows], grad_k[keys], grad_v[keys]
            yield entry, (_one_sample(found[0]), _one_sample(found[1]), _one_sample(found[2]))

    def _queries(self, x: Tensor) -> Tensor:
        """Concatenate the rectangles' queries: [s, b, heads, d] -> [queries, heads, d]. Return a
        view if there is only one rectangle."""
        return _behind_each_other([x[entry.queries, entry.row] for entry in self.pack.parts])

    def _keys(self, x: Tensor) -> Tensor:
        """Concatenate the rectangles' keys: [t, b, groups, d] -> [keys, groups, d]."""
        return _behind_each_other([x[entry.keys, entry.row] for entry in self.pack.parts])

    def _packed_ranges(self) -> Iterator[tuple[ScoreRect, slice, slice]]:
        """Yield each rectangle with its range of packed queries and of packed keys."""
        row = key = 0
        for entry in self.pack.parts:
            rows, keys = entry.sizes
            yield entry, slice(row, row + rows), slice(key, key + keys)
            row, key = row + rows, key + keys


@dataclass(frozen=True)
class TileRows:
    """Positions of each ring member's queries and keys, and the score modifiers."""

    queries: tuple[Positions, ...]
    keys: tuple[Positions, ...]
    scores: ScoreModifiers = PLAIN
    documents: Documents | None = None
    """Documents of all positions, if attention ends at document boundaries."""

    def calls(
        self, queries: int, keys: int, kernel: TileKernel, packed: PackedTileKernel | None
    ) -> Iterator[AttentionTile]:
        """Yield the kernel calls for queries of ring member `queries` with keys of member `keys`.

        There is one call per rectangle of scores; with a packed kernel, one per group of rectangles
        that :func:`~megapipe.context.packs.together` makes.
        """
        scale = self.scores.scale
        if packed is None or self.documents is None:
            for entry in self.entries(queries, keys):
                yield SingleTile(entry, self._kernel(kernel, queries, keys, entry), scale)
            return
        assert self.scores.plain
        for one in self._packs(queries, keys, self.documents):
            if isinstance(one, Pack):
                yield PackedTiles(one, packed, scale)
            else:
                yield SingleTile(one, kernel, scale)

    def entries(self, queries: int, keys: int) -> Sequence[ScoreRect]:
        """Return the rectangles of scores for queries of ring member `queries` and keys of ring
        member `keys`."""
        q, k, documents = self.queries[queries], self.keys[keys], self.documents
        found = score_rects(q, k)
        if documents is None:
            return found
        ids = documents.ids.numpy()
        inside: list[ScoreRect] = documents.kept(
            (q, k), lambda: [*within_documents(found, q, k, ids)]
        )
        return inside

    def _packs(self, queries: int, keys: int, documents: Documents) -> Sequence[ScoreRect | Pack]:
        """Return the rectangles of :meth:`entries`, packed if possible; cached for all layers."""

        def make() -> list[ScoreRect | Pack]:
            groups = together(
                self.entries(queries, keys), self.queries[queries].count, len(documents.ids)
            )
            return [
                group[0] if len(group) == 1 else Pack.of(group, documents.device)
                for group in groups
            ]

        key = ("packs", self.queries[queries], self.keys[keys])
        found: list[ScoreRect | Pack] = documents.kept(key, make)
        return found

    def _kernel(self, plain: TileKernel, queries: int, keys: int, entry: ScoreRect) -> TileKernel:
        """Return a rectangle's kernel: `plain`, or a :class:`ScoreTile` for modified scores."""
        if self.scores.plain:
            return plain
        if self.scores.slopes is None:
            return ScoreTile(self.scores)
        q = self.queries[queries].rows(entry.queries.start, entry.queries.stop)
        k = self.keys[keys].rows(entry.keys.start, entry.keys.stop)
        return ScoreTile(self.scores, (q, k))


def heads_of(rows: Tensor) -> Tensor:
    """Transpose [s, b, heads, d] -> [b, heads, s, d]."""
    return rows.permute(1, 2, 0, 3)


def rows_of(x: Tensor, rows: slice, entry: ScoreRect) -> Tensor:
    """Select positions `rows` of `entry`'s samples: [s, b, heads, d] -> [b or 1, heads, n, d]."""
    return heads_of(x[rows] if entry.row is None else x[rows, entry.row : entry.row + 1])


def lse_of(lse: Tensor, entry: ScoreRect) -> Tensor:
    """Select a rectangle's queries and samples from an LSE [b, heads, s]."""
    here = lse[..., entry.queries]
    return here if entry.row is None else here[entry.row : entry.row + 1]


def _behind_each_other(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _one_sample(rows: Tensor) -> Tensor:
    """Transpose [n, heads, d] -> [1, heads, n, d]."""
    return rows.transpose(0, 1).unsqueeze(0)
