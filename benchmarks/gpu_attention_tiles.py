"""Attention of one of 8 context-parallel ranks: ``python benchmarks/gpu_attention_tiles.py``.

With 131,072 positions over 8 ranks in zigzag order a rank computes a tile of scores against the
keys of each of them, and merges the results. One GPU computes what such a rank does, forward and
backward, in bf16, without the messages. Its rate of operations is compared with that of one causal
call over as many positions as a rank holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from common import Result, compare, parser, report, seconds
from torch import Tensor

from megapipe.context.score_rects import ScoreRect, score_rects
from megapipe.context.split import PositionSplit
from megapipe.ops.attention_choice import AttentionShape
from megapipe.ops.probe import choose_kernel
from megapipe.ops.tile_attention import TileKernel, accumulation, merge
from megapipe.ops.tile_candidates import block_candidates

CP = 8


class Size(NamedTuple):
    length: int
    heads: int
    groups: int
    head_dim: int
    dtype: torch.dtype


SIZE = Size(131_072, 32, 8, 128, torch.bfloat16)
QUICK_SIZE = Size(256, 4, 2, 8, torch.float32)


def rounds_of(length: int) -> list[tuple[ScoreRect, ...]]:
    """Return the tiles that a rank in the middle computes in each round of a ring."""
    split = PositionSplit(ring=CP)
    blocks = [split.block(0, length, rank) for rank in range(CP)]
    own = CP // 2
    return [score_rects(blocks[own], blocks[(own - step) % CP]) for step in range(CP)]


class Attention:
    """Forward and backward of tiles, on data of this size."""

    def __init__(self, size: Size, kernel: TileKernel, device: torch.device) -> None:
        self.kernel = kernel
        length = size.length // CP
        self.q, self.k, self.v, self.grad = (
            torch.randn(1, heads, length, size.head_dim, dtype=size.dtype, device=device)
            for heads in (size.heads, size.groups, size.groups, size.heads)
        )

    def run(self, rounds: Sequence[Sequence[ScoreRect]]) -> list[Tensor]:
        """Return the output, and gradients of q and of the keys and values of the last round."""
        wide = accumulation(self.q.dtype)
        out = torch.zeros_like(self.q, dtype=wide)
        lse = out.new_full(out.shape[:3], float("-inf"))
        for blocks in rounds:
            for of in blocks:
                part = self.kernel.forward(*self._inputs(of), of.causal, None)
                merge(out[:, :, of.queries], lse[:, :, of.queries], *part)
        whole = out.to(self.q.dtype)
        grads = [torch.zeros_like(x, dtype=wide) for x in (self.q, self.k, self.v)]
        for blocks in rounds:
            for own in grads[1:]:
                own.zero_()
            for of in blocks:
                rows = of.queries, of.keys, of.keys
                grad, y, total = (x[:, :, of.queries] for x in (self.grad, whole, lse))
                found = self.kernel.backward(grad, *self._inputs(of), y, total, of.causal, None)
                for own, part_of, row in zip(grads, found, rows, strict=True):
                    own[:, :, row].add_(part_of)
        return [whole, *grads]

    def _inputs(self, of: ScoreRect) -> tuple[Tensor, Tensor, Tensor]:
        return self.q[:, :, of.queries], self.k[:, :, of.keys], self.v[:, :, of.keys]


def whole_call(attention: Attention) -> None:
    """Run one causal call, as a process without context parallelism makes it."""
    given = attention.q, attention.k, attention.v
    out, lse = attention.kernel.forward(*given, True, None)
    attention.kernel.backward(attention.grad, *given, out, lse, True, None)


def measure(size: Size, device: torch.device, rounds: int) -> list[Result]:
    attended = AttentionShape(
        device=device,
        dtype=size.dtype,
        heads=size.heads,
        groups=size.groups,
        head_dim=size.head_dim,
        length=size.length // CP,
    )
    choice = choose_kernel("attention", "auto", block_candidates(attended))
    print(f"kernel: {choice.name} by tiles; {size}")
    attention = Attention(size, choice.kernel, device)
    ring = rounds_of(size.length)
    work = sum(entry.scores for blocks in ring for entry in blocks)
    local = ScoreRect(slice(0, size.length // CP), slice(0, size.length // CP), causal=True).scores

    def timed(run: Callable[[], object]) -> Callable[[], float]:
        return partial(seconds, run, device)

    both = compare(
        timed(partial(attention.run, ring)), timed(partial(whole_call, attention)), rounds=rounds
    )
    claim = f"rate of the blocks of a rank of cp {CP}, {size.length:,} positions"
    rate = work / local / both.ratio
    return [Result(claim, rate, 0.9, "x", "one causal call", at_least=True)]


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=7, help="timed turns of each side (7)")
    given = options.parse_args(argv)
    if given.rounds < 1:
        options.error("--rounds must be at least 1")
    if not torch.cuda.is_available() and not given.quick:
        options.error("needs a CUDA device; --quick shows on the CPU that it runs")
    device = torch.device("cpu" if given.quick else "cuda")
    size, rounds = (QUICK_SIZE, 2) if given.quick else (SIZE, given.rounds)
    report("Context parallelism on one GPU", measure(size, device, rounds), given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
