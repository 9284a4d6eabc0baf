"""Calls of kernels where attention ends at documents: one rectangle each, and many at once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megapipe.context.packs import most_together
from megapipe.context.split import Order, PositionSplit
from megapipe.layers.attention_tiles import TileRows, lse_of, rows_of
from megapipe.ops.documents import Documents
from megapipe.ops.packed_tile_kernels import OneByOne, PackedTileKernel
from megapipe.ops.tile_attention import CpuFlash, merge

HEADS, GROUPS, D = 4, 2, 8
LENGTH = 24
Tensors = tuple[Tensor, ...]


def ids_of(*rows: list[int]) -> Tensor:
    """Return ids of documents of these lengths in each row; the last one goes on to its end."""
    found = torch.zeros(len(rows), LENGTH, dtype=torch.long)
    for row, lengths in enumerate(rows):
        for end in itertools.accumulate(lengths):
            found[row, end:] += 1
    return found


PATTERNS = {
    "of one token": ids_of([1] * LENGTH, [1] * LENGTH, [1] * LENGTH),
    "one row": ids_of([3, 1, 2, 2, 5, 1, 1]),
    "a long one and short ones": ids_of([15] + [1] * 9, [2] * 12),
    "one a row": ids_of([LENGTH], [LENGTH], [LENGTH]),
    "unequal rows": ids_of([1, 22], [3] * 8, [LENGTH], [6] * 4, [2, 3, 14, 1, 1]),
}
LAYOUTS: list[tuple[int, Order, int]] = [
    (1, "zigzag", 1),
    (2, "zigzag", 1),
    (2, "zigzag", 3),
    (3, "contiguous", 2),
]
"""Ranks of a ring, which positions they hold, and slices of a sequence."""


class Counted:
    """A kernel for one block, or for many, that notes its calls."""

    def __init__(self, kernel: Any, calls: Counter[str]) -> None:
        self.kernel, self.calls = kernel, calls

    def forward(self, *args: Any, **given: Any) -> Any:
        self.calls["forward"] += 1
        return self.kernel.forward(*args, **given)

    def backward(self, *args: Any, **given: Any) -> Any:
        self.calls["backward"] += 1
        return self.kernel.backward(*args, **given)


def tensors(samples: int) -> list[Tensor]:
    """Draw q, k, v and the gradient of the output of all positions, [s, b, heads, d]."""
    generator = torch.Generator().manual_seed(samples)
    counts = HEADS, GROUPS, GROUPS, HEADS
    return [
        torch.randn(LENGTH, samples, n, D, generator=generator, dtype=torch.float64) for n in counts
    ]


def pairs(
    ids: Tensor, ring: int, order: Order, slices: int
) -> Iterator[tuple[TileRows, int, int, list[int], list[int]]]:
    """Yield the tiles of each slice: of each member's queries and each member's keys, with their
    positions."""
    split = PositionSplit(ring, 1, order)
    lengths = [LENGTH // slices] * slices
    blocks = split.local(lengths, 0).blocks
    for n in range(slices):
        start, stop = (i * lengths[0] // ring for i in (n, n + 1))
        queries = tuple(block.rows(start, stop) for block in blocks)
        keys = tuple(block.rows(0, stop) for block in blocks)
        seen = Documents(ids[:, : (n + 1) * lengths[0]], torch.device("cpu"))
        rows = TileRows(queries, keys, documents=seen)
        for i, j in itertools.product(range(ring), repeat=2):
            yield rows, i, j, list(queries[i]), list(keys[j])


def by_blocks(
    ids: Tensor,
    given: list[Tensor],
    packed: PackedTileKernel | None,
    ring: int,
    order: Order,
    slices: int,
) -> tuple[Tensors, list[Counter[str]]]:
    """Return output, LSE and gradients of q, k and v, by tiles; and the calls of each tile."""
    q, k, v, grad = given
    counted = [Counter[str]() for _ in pairs(ids, ring, order, slices)]
    out = torch.zeros_like(q)
    lse = q.new_full((q.shape[1], HEADS, LENGTH), float("-inf"))
    for calls, (rows, i, j, at, of) in zip(counted, pairs(ids, ring, order, slices), strict=True):
        one = Counted(CpuFlash(), calls)
        many = None if packed is None else Counted(packed, calls)
        here, its_lse = out[at], lse[..., at]
        for call in rows.calls(i, j, one, many):
            for entry, block, block_lse in call.forward(q[at], k[of], v[of]):
                merge(rows_of(here, entry.queries, entry), lse_of(its_lse, entry), block, block_lse)
        out[at], lse[..., at] = here, its_lse
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for calls, (rows, i, j, at, of) in zip(counted, pairs(ids, ring, order, slices), strict=True):
        one = Counted(CpuFlash(), calls)
        many = None if packed is None else Counted(packed, calls)
        own = [torch.zeros_like(x[where]) for x, where in ((q, at), (k, of), (v, of))]
        inputs = grad[at], q[at], k[of], v[of], out[at], lse[..., at]
        for call in rows.calls(i, j, one, many):
            for entry, found in call.backward(*inputs):
                places = entry.queries, entry.keys, entry.keys
                for total, place, part in zip(own, places, found, strict=True):
                    rows_of(total, place, entry).add_(part)
        for total, where, part in zip(grads, (at, of, of), own, strict=True):
            total[where] += part
    return (out, lse, *grads), counted


def plain(ids: Tensor, given: list[Tensor]) -> Tensors:
    """Return output and gradients, by a mask."""
    *leaves, grad = (x.permute(1, 2, 0, 3) for x in given)
    leaves = [x.clone().requires_grad_() for x in leaves]
    mask = Documents(ids, torch.device("cpu")).mask(LENGTH)
    out = scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    found = (out.detach(), *torch.autograd.grad(out, leaves, grad))
    return tuple(x.permute(2, 0, 1, 3) for x in found)


@pytest.mark.parametrize(("ring", "order", "slices"), LAYOUTS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_many_at_once(pattern: str, ring: int, order: Order, slices: int) -> None:
    """What one call for each rectangle gives, and what a mask gives; in two calls for a block and
    pass, besides one for each rectangle as long as most of a row."""
    ids = PATTERNS[pattern]
    given = tensors(len(ids))
    alone, _ = by_blocks(ids, given, None, ring, order, slices)
    found, calls = by_blocks(ids, given, OneByOne(CpuFlash()), ring, order, slices)
    for x, y in zip(found, alone, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    out, _, *grads = found
    for x, y in zip((out, *grads), plain(ids, given), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    for some, (rows, i, j, at, _) in zip(calls, pairs(ids, ring, order, slices), strict=True):
        entries = rows.entries(i, j)
        short = Counter(e.causal for e in entries if 2 * max(e.sizes) <= len(at))
        packs = sum(-(-n // most_together(len(at), len(ids))) for n in short.values())
        assert packs <= (2 if pattern != "of one token" else 3)
        number = len(entries) - short.total() + packs
        assert some == Counter(forward=number, backward=number)
