"""Calls of kernels for the scores between the queries of one member of a ring and the keys of
another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.context.documents import within_documents
from megapipe.context.entries import ScoreRect, score_rects
from megapipe.context.packs import joined, together
from megapipe.context.positions import Positions
from megapipe.ops.block_attention import TileKernel
from megapipe.ops.documents import Documents, VarlenLengths, varlen_lengths
from megapipe.ops.packed_kernels import PackedTileKernel
from megapipe.ops.score_blocks import ScoreTile
from megapipe.ops.scores import PLAIN, ScoreModifiers


class AttentionTile(ABC):
    """A call, forward or backward, of tensors of all rows: q, out and their gradients [s, b, heads,
    d], k, v and theirs [t, b, groups, d], lse [b, heads, s].

    Results are those of rectangles: rows [b or 1, heads, n, d] and LSE [b or 1, heads, n]. Their
    memory is the only one that is held when they are given.
    """

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor
    ) -> Iterator[tuple[ScoreRect, Tensor, Tensor]]:
        """Output and LSE."""

    @abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Iterator[tuple[ScoreRect, tuple[Tensor, Tensor, Tensor]]]:
        """Gradients of q, k and v."""


@dataclass(frozen=True)
class SingleTile(AttentionTile):
    """A rectangle."""

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
    """Rectangles that one call computes, behind each other."""

    parts: tuple[ScoreRect, ...]
    """Their rows, of one sample each; those that follow each other in it are one part."""
    runs: VarlenLengths
    """Where each of them ends."""

    @classmethod
    def of(cls, rectangles: Sequence[ScoreRect], device: torch.device) -> Pack:
        """Of rectangles that are all causal or none."""
        return cls(
            joined(rectangles), varlen_lengths([entry.sizes for entry in rectangles], device)
        )


@dataclass(frozen=True)
class PackedTiles(AttentionTile):
    """Many rectangles."""

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
        for entry, rows, _ in self._places():
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
        for entry, rows, keys in self._places():
            found = grad_q[rows], grad_k[keys], grad_v[keys]
            yield entry, (_one_sample(found[0]), _one_sample(found[1]), _one_sample(found[2]))

    def _queries(self, x: Tensor) -> Tensor:
        """[s, b, heads, d] -> [rows, heads, d]; of one part as it is, else a copy."""
        return _behind_each_other([x[entry.queries, entry.row] for entry in self.pack.parts])

    def _keys(self, x: Tensor) -> Tensor:
        """[t, b, groups, d] -> [keys, groups, d]."""
        return _behind_each_other([x[entry.keys, entry.row] for entry in self.pack.parts])

    def _places(self) -> Iterator[tuple[ScoreRect, slice, slice]]:
        """Each part, and which rows and keys are its."""
        row = key = 0
        for entry in self.pack.parts:
            rows, keys = entry.sizes
            yield entry, slice(row, row + rows), slice(key, key + keys)
            row, key = row + rows, key + keys


@dataclass(frozen=True)
class TileRows:
    """The positions of the rows of each member, and how scores are made of them."""

    queries: tuple[Positions, ...]
    keys: tuple[Positions, ...]
    scores: ScoreModifiers = PLAIN
    documents: Documents | None = None
    """Those at which attention ends, of all positions."""

    def calls(
        self, queries: int, keys: int, kernel: TileKernel, packed: PackedTileKernel | None
    ) -> Iterator[AttentionTile]:
        """Calls for the scores between the queries of a member and the keys of another.

        One for each rectangle; but with a kernel that takes many, one for all that
        :func:`~megapipe.context.packs.together` puts together.
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
        """These scores, as rectangles."""
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
        """These scores, as rectangles alone and packs of them; kept for all layers."""

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
        """The kernel of an entry: `plain`, if that computes such scores."""
        if self.scores.plain:
            return plain
        if self.scores.slopes is None:
            return ScoreTile(self.scores)
        q = self.queries[queries].rows(entry.queries.start, entry.queries.stop)
        k = self.keys[keys].rows(entry.keys.start, entry.keys.stop)
        return ScoreTile(self.scores, (q, k))


def heads_of(rows: Tensor) -> Tensor:
    """[s, b, heads, d] -> [b, heads, s, d]."""
    return rows.permute(1, 2, 0, 3)


def rows_of(x: Tensor, rows: slice, entry: ScoreRect) -> Tensor:
    """Positions of [s, b, heads, d], of the entry's samples: [b or 1, heads, n, d]."""
    return heads_of(x[rows] if entry.row is None else x[rows, entry.row : entry.row + 1])


def lse_of(lse: Tensor, entry: ScoreRect) -> Tensor:
    """LSE [b, heads, s] of an entry's queries and samples."""
    here = lse[..., entry.queries]
    return here if entry.row is None else here[entry.row : entry.row + 1]


def _behind_each_other(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _one_sample(rows: Tensor) -> Tensor:
    """[n, heads, d] -> [1, heads, n, d]."""
    return rows.transpose(0, 1).unsqueeze(0)
