"""Which kernel computes blocks of attention, and why."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megapipe.ops.attention_choice import AttentionShape, torch_choice
from megapipe.ops.block_attention import CpuFlash, MathTile, TileKernel, accumulation, merge
from megapipe.ops.block_kernels import Cudnn, Efficient, Flash, FlashAttnTile
from megapipe.ops.documents import varlen_lengths
from megapipe.ops.packed_kernels import OneByOne, PackedFlash, PackedFlashAttn, PackedTileKernel
from megapipe.ops.probe import (
    Candidate,
    Unavailable,
    agree,
    load_module,
    needs_cuda,
    needs_half,
    small_data,
)


def block_candidates(given: AttentionShape) -> list[Candidate[TileKernel]]:
    """On a CPU torch's flash, on a GPU torch's first that can be used, then what is written out;
    flash-attn is used when named. Lengths of `given` are those of a block."""
    check = partial(check_blocks, given)
    explicit: Candidate[TileKernel] = Candidate("explicit", MathTile)
    if given.device.type == "cpu":
        first: list[Candidate[TileKernel]] = [Candidate("flash", CpuFlash)]
    else:
        first = [Candidate("flash", partial(_flash, given), check)]
    return [
        *first,
        Candidate("cudnn", partial(_cudnn, given), check),
        Candidate("efficient", partial(_efficient, given), check),
        explicit,
        Candidate("flash_attn", partial(_flash_attn, given), check, "flash-attn"),
    ]


def packed_candidates(
    given: AttentionShape, blocks: TileKernel
) -> list[Candidate[PackedTileKernel | None]]:
    """The kernel of many blocks at once of the same library as that of `blocks`, which the run
    uses; or none."""
    check = partial(check_packs, given)
    found: list[Candidate[PackedTileKernel | None]] = []
    if isinstance(blocks, Flash):
        found.append(Candidate("varlen", PackedFlash, check))
    elif isinstance(blocks, FlashAttnTile):
        of_package = partial(PackedFlashAttn, blocks.interface)
        found.append(Candidate("flash_attn varlen", of_package, check, "flash-attn"))
    return [*found, Candidate("one by one", lambda: None)]


def _flash(given: AttentionShape) -> TileKernel:
    needs_half(given.dtype)
    _needs_eights(given)
    torch_choice(given, "flash")
    return Flash()


def _cudnn(given: AttentionShape) -> TileKernel:
    needs_cuda(given.device)
    torch_choice(given, "cudnn")
    return Cudnn()


def _efficient(given: AttentionShape) -> TileKernel:
    needs_cuda(given.device)
    torch_choice(replace(given, groups=given.heads), "efficient")
    return Efficient()


def _flash_attn(given: AttentionShape) -> TileKernel:
    needs_cuda(given.device)
    needs_half(given.dtype)
    _needs_eights(given)
    interface = load_module("flash_attn.flash_attn_interface", "flash-attn")
    backward = inspect.signature(interface._flash_attn_backward).parameters
    if "window_size_left" not in backward:
        raise Unavailable("has another backward before flash-attn 2.7")
    return FlashAttnTile(interface)


def _needs_eights(given: AttentionShape) -> None:
    if given.head_dim % 8:
        raise Unavailable(f"takes heads of a multiple of 8, not {given.head_dim}")


def check_blocks(given: AttentionShape, kernel: TileKernel) -> None:
    """Compare with plain arithmetic: causal attention that is put together from three blocks."""
    b, half, scale = 2, 100, given.scores.scale
    blocks = slice(0, half), slice(half, 2 * half)

    def results(of: TileKernel, precision: torch.dtype) -> list[Tensor]:
        q_shape, k_shape = ((b, n, 2 * half, given.head_dim) for n in (given.heads, given.groups))
        shapes = [q_shape, k_shape, k_shape, q_shape]
        data = small_data(shapes, given.dtype, precision, given.device)
        q, k, v, grad = (x.detach() for x in data)
        out = torch.zeros_like(q, dtype=accumulation(precision))
        lse = out.new_full(q_shape[:3], float("-inf"))
        pairs = [(blocks[0], blocks[0]), (blocks[1], blocks[0]), (blocks[1], blocks[1])]
        for i, j in pairs:
            block = of.forward(q[:, :, i], k[:, :, j], v[:, :, j], i == j, scale)
            merge(out[:, :, i], lse[:, :, i], *block)
        grads = [torch.zeros_like(x, dtype=out.dtype) for x in (q, k, v)]
        for i, j in pairs:
            parts = of.backward(
                grad[:, :, i],
                q[:, :, i],
                k[:, :, j],
                v[:, :, j],
                out[:, :, i].to(precision),
                lse[:, :, i],
                i == j,
                scale,
            )
            for total, rows, part in zip(grads, (i, j, j), parts, strict=True):
                total[:, :, rows] += part
        return [out, lse, *grads]

    agree(kernel, MathTile(), results, given.dtype)


_LENGTHS = {
    True: [(1, 1), (70, 70), (1, 1), (129, 129)],
    False: [(3, 140), (1, 2), (130, 1), (64, 64)],
}
"""Of queries and keys, by whether they are causal."""


def check_packs(given: AttentionShape, kernel: PackedTileKernel | None) -> None:
    """Compare with plain arithmetic: blocks of several lengths, causal and not, whose rows see
    further keys elsewhere; and where no block has more than one query.

    What a kernel loads it has loaded then: its code depends on no lengths.
    """
    assert kernel is not None
    scale, device = given.scores.scale, given.device
    cases = [*_LENGTHS.items(), (True, [(1, 1)] * 3), (False, [(1, 5), (1, 1)])]

    def results(of: PackedTileKernel, precision: torch.dtype) -> list[Tensor]:
        found: list[Tensor] = []
        for causal, lengths in cases:
            runs = varlen_lengths(lengths, device)
            rows, keys = (sum(side) for side in zip(*lengths, strict=True))
            q_shape, k_shape = (rows, given.heads, d := given.head_dim), (keys, given.groups, d)
            shapes = [q_shape, k_shape, k_shape, q_shape]
            data = small_data(shapes, given.dtype, precision, device)
            q, k, v, grad = (x.detach() for x in data)
            out, lse = of.forward(q, k, v, runs, causal, scale)
            found += [out, lse]
            # as if each row saw further keys, with values of 0
            out, lse = (out * math.exp(-1 / 4)).to(precision), lse + 1 / 4
            found += of.backward(grad, q, k, v, out, lse, runs, causal, scale)
        return found

    agree(kernel, OneByOne(MathTile()), results, given.dtype)
