"""Ulysses all-to-all: changes the split dimension of a tensor; its backward changes it back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import start_all_to_all


def ulysses_all_to_all(x: Tensor, split_dim: int, gather_dim: int, axis: Axis) -> Tensor:
    """Change the split of `x` over the n members of `axis` from `gather_dim` to `split_dim`.

    [..., S, ..., G / n, ...] -> [..., S / n, ..., G, ...], with the members' parts in rank order.
    DeepSpeed-Ulysses (2309.14509) does this with positions and heads, DSP (2403.10266) with any two
    dimensions of a sequence. All members must call it, and its backward, in the same order.
    """
    if axis.group is None:
        return x
    assert x.shape[split_dim] % axis.size == 0, f"{list(x.shape)} in {axis.size} along {split_dim}"
    return _Reshard.apply(x, split_dim, gather_dim, axis)


class _Reshard(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split_dim: int, gather_dim: int, axis: Axis) -> Tensor:
        ctx.dims, ctx.axis = (split_dim, gather_dim), axis
        return _exchange(x, split_dim, gather_dim, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        split_dim, gather_dim = ctx.dims
        return _exchange(grad, gather_dim, split_dim, ctx.axis), None, None, None


def _exchange(x: Tensor, split_dim: int, gather_dim: int, axis: Axis) -> Tensor:
    received, wait = start_all_to_all(torch.stack(x.chunk(axis.size, split_dim)), axis)
    wait()
    return torch.cat(received.unbind(0), gather_dim)
