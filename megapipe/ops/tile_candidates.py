"""Selection of the kernel that computes attention tiles, with the reasons."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megapipe.ops.attention_choice import AttentionShape, torch_choice
from megapipe.ops.documents import varlen_lengths
from megapipe.ops.packed_tile_kernels import (
    OneByOne,
    PackedFlash,
    PackedFlashAttn,
    PackedTileKernel,
)
from megapipe.ops.probe import (
    Candidate,
    Unavailable,
    agree,
    load_module,
    needs_cuda,
    needs_half,
    small_data,
)
from megapipe.ops.tile_attention import CpuFlash, MathTile, TileKernel, accumulation, merge
from megapipe.ops.tile_kernels import Cudnn, Efficient, Flash, FlashAttnTile


def block_candidates(attention: AttentionShape) -> list[Candidate[TileKernel]]:
    """Return tile kernels in order of preference: torch's kernels for the device, then plain
    operations; flash-attn is used only if named. `attention` has the lengths of a tile."""
    check = partial(check_blocks, attention)
    explicit: Candidate[TileKernel] = Candidate("explicit", MathTile)
    if attention.device.type == "cpu":
        first: list[Candidate[TileKernel]] = [Candidate("flash", CpuFlash)]
    else:
        first = [Candidate("flash", partial(_flash, attention), check)]
    return [
        *first,
        Candidate("cudnn", partial(_cudnn, attention), check),
        Candidate("efficient", partial(_efficient, attention), check),
        explicit,
        Candidate("flash_attn", partial(_flash_attn, attention), check, "flash-attn"),
    ]


def packed_candidates(
    attention: AttentionShape, blocks: TileKernel
) -> list[Candidate[PackedTileKernel | None]]:
    """Return the kernels that compute many tiles in one call: first the kernel of the library that
    has the tile kernel `blocks`, if there is one, then None. None means one call per tile."""
    check = partial(check_packs, attention)
    found: list[Candidate[PackedTileKernel | None]] = []
    if isinstance(blocks, Flash):
        found.append(Candidate("varlen", PackedFlash, check))
    elif isinstance(blocks, FlashAttnTile):
        of_package = partial(PackedFlashAttn, blocks.interface)
        found.append(Candidate("flash_attn varlen", of_package, check, "flash-attn"))
    return [*found, Candidate("one by one", lambda: None)]


def _flash(attention: AttentionShape) -> TileKernel:
    needs_half(attention.dtype)
    _needs_eights(attention)
    torch_choice(attention, "flash")
    return Flash()


def _cudnn(attention: AttentionShape) -> TileKernel:
    needs_cuda(attention.device)
    torch_choice(attention, "cudnn")
    return Cudnn()


def _efficient(attention: AttentionShape) -> TileKernel:
    needs_cuda(attention.device)
    torch_choice(replace(attention, groups=attention.heads), "efficient")
    return Efficient()


def _flash_attn(attention: AttentionShape) -> TileKernel:
    needs_cuda(attention.device)
    needs_half(attention.dtype)
    _needs_eights(attention)
    interface = load_module("flash_attn.flash_attn_interface", "flash-attn")
    backward = inspect.signature(interface._flash_attn_backward).parameters
    if "window_size_left" not in backward:
        raise Unavailable("needs flash-attn 2.7, whose backward has other arguments than before")
    return FlashAttnTile(interface)


def _needs_eights(attention: AttentionShape) -> None:
    if attention.head_dim % 8:
        raise Unavailable(f"takes head sizes that are multiples of 8, not {attention.head_dim}")


def check_blocks(attention: AttentionShape, kernel: TileKernel) -> None:
    """Compare `kernel` with plain operations, on causal attention merged from three tiles."""
    b, half, scale = 2, 100, attention.scores.scale
    blocks = slice(0, half), slice(half, 2 * half)

    def results(of: TileKernel, precision: torch.dtype) -> list[Tensor]:
        q_shape, k_shape = (
            (b, n, 2 * half, attention.head_dim) for n in (attention.heads, attention.groups)
        )
        shapes = [q_shape, k_shape, k_shape, q_shape]
        data = small_data(shapes, attention.dtype, precision, attention.device)
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

    agree(kernel, MathTile(), results, attention.dtype)


_LENGTHS = {
    True: [(1, 1), (70, 70), (1, 1), (129, 129)],
    False: [(3, 140), (1, 2), (130, 1), (64, 64)],
}
"""(query length, key length) pairs of the self-check, for causal and non-causal tiles."""


def check_packs(attention: AttentionShape, kernel: PackedTileKernel | None) -> None:
    """Compare `kernel` with plain operations, on causal and non-causal tiles of several lengths
    and on tiles with one query each. In the backward, queries have more keys, in other tiles.

    The check also loads all code of the kernel, since the code does not depend on the lengths.
    """
    assert kernel is not None
    scale, device = attention.scores.scale, attention.device
    cases = [*_LENGTHS.items(), (True, [(1, 1)] * 3), (False, [(1, 5), (1, 1)])]

    def results(of: PackedTileKernel, precision: torch.dtype) -> list[Tensor]:
        found: list[Tensor] = []
        for causal, lengths in cases:
            runs = varlen_lengths(lengths, device)
            rows, keys = (sum(side) for side in zip(*lengths, strict=True))
            q_shape, k_shape = (
                (rows, attention.heads, d := attention.head_dim),
                (keys, attention.groups, d),
            )
            shapes = [q_shape, k_shape, k_shape, q_shape]
            data = small_data(shapes, attention.dtype, precision, device)
            q, k, v, grad = (x.detach() for x in data)
            out, lse = of.forward(q, k, v, runs, causal, scale)
            found += [out, lse]
            # as if each row saw further keys, with values of 0
            out, lse = (out * math.exp(-1 / 4)).to(precision), lse + 1 / 4
            found += of.backward(grad, q, k, v, out, lse, runs, causal, scale)
        return found

    agree(kernel, OneByOne(MathTile()), results, attention.dtype)
