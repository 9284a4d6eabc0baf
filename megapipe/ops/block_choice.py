"""Which kernel computes blocks of attention, and why."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megapipe.ops.attention_choice import Attended, torch_choice
from megapipe.ops.block_attention import BlockKernel, CpuFlash, Explicit, accumulation, merge
from megapipe.ops.block_kernels import Cudnn, Efficient, Flash, FlashAttnBlocks
from megapipe.ops.probe import (
    Candidate,
    Unavailable,
    agree,
    load_module,
    needs_cuda,
    needs_half,
    small_data,
)


def block_candidates(given: Attended) -> list[Candidate[BlockKernel]]:
    """On a CPU torch's flash, on a GPU torch's first that can be used, then what is written out;
    flash-attn is used when named. Lengths of `given` are those of a block."""
    check = partial(check_blocks, given)
    explicit: Candidate[BlockKernel] = Candidate("explicit", Explicit)
    if given.device.type == "cpu":
        first: list[Candidate[BlockKernel]] = [Candidate("flash", CpuFlash)]
    else:
        first = [Candidate("flash", partial(_flash, given), check)]
    return [
        *first,
        Candidate("cudnn", partial(_cudnn, given), check),
        Candidate("efficient", partial(_efficient, given), check),
        explicit,
        Candidate("flash_attn", partial(_flash_attn, given), check, "flash-attn"),
    ]


def _flash(given: Attended) -> BlockKernel:
    needs_half(given.dtype)
    _needs_eights(given)
    torch_choice(given, "flash")
    return Flash()


def _cudnn(given: Attended) -> BlockKernel:
    needs_cuda(given.device)
    torch_choice(given, "cudnn")
    return Cudnn()


def _efficient(given: Attended) -> BlockKernel:
    needs_cuda(given.device)
    torch_choice(replace(given, groups=given.heads), "efficient")
    return Efficient()


def _flash_attn(given: Attended) -> BlockKernel:
    needs_cuda(given.device)
    needs_half(given.dtype)
    _needs_eights(given)
    interface = load_module("flash_attn.flash_attn_interface", "flash-attn")
    backward = inspect.signature(interface._flash_attn_backward).parameters
    if "window_size_left" not in backward:
        raise Unavailable("has another backward before flash-attn 2.7")
    return FlashAttnBlocks(interface)


def _needs_eights(given: Attended) -> None:
    if given.head_dim % 8:
        raise Unavailable(f"takes heads of a multiple of 8, not {given.head_dim}")


def check_blocks(given: Attended, kernel: BlockKernel) -> None:
    """Compare with plain arithmetic: causal attention that is put together from three blocks."""
    b, half, scale = 2, 100, given.scores.scale
    blocks = slice(0, half), slice(half, 2 * half)

    def results(of: BlockKernel, precision: torch.dtype) -> list[Tensor]:
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

    agree(kernel, Explicit(), results, given.dtype)
