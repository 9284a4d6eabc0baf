"""Keys and values that the slices of a sequence hand on to each other.

A slice attends to itself and to all slices before it (TeraPipe, 2102.07988). Its keys and values
are written into a buffer for the whole sequence, and its attention reads the buffer's rows up to
its own end. Backwards the slices come in descending order: each adds the gradient of the earlier
rows to a buffer of gradients, and takes out of it what the later slices have left on its own rows.

A text that is generated is a sequence whose slices are its tokens: the buffer is what others call
the key/value cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class KVCache:
    """Keys and values of one micro-batch at one stage, by layer, and their gradients.

    To be kept from the forward of the first slice to its backward.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        """Positions of the whole sequence that are here."""
        self._rows: dict[int, tuple[_Rows, _Rows]] = {}

    def extend(
        self, layer: int, start: int, k: Tensor, v: Tensor, *, gathered: int = 1
    ) -> tuple[Tensor, Tensor]:
        """k and v [slice, b, groups, d] of a slice -> those of positions 0 .. its end.

        Slices come in ascending order of `start`, their first position, and their backwards in
        descending order. `gathered`: positions are those of so many ranks that split heads.
        """
        if layer not in self._rows:
            length = self.length * gathered
            self._rows[layer] = _Rows(length, k), _Rows(length, v)
        keys, values = self._rows[layer]
        return _Extend.apply(k, keys, start), _Extend.apply(v, values, start)

    def nbytes(self) -> int:
        """Bytes of keys and values and, between the backwards of slices, of their gradients."""
        rows = [each for pair in self._rows.values() for each in pair]
        tensors = [each.values for each in rows] + [
            each.grad for each in rows if each.grad is not None
        ]
        storages = (tensor.untyped_storage() for tensor in tensors)  # keys and values may share one
        return sum({each._cdata: each.nbytes() for each in storages}.values())

    def keep(self, rows: Tensor) -> None:
        """Keep those of the b sequences whose numbers are `rows` [n]; for use without gradients."""
        for pair in self._rows.values():
            for each in pair:
                each.values = each.values[:, rows]


class _Rows:
    """Rows of one tensor [s, b, groups, d], and the gradient that later slices leave on them.

    The gradient is summed in fp32 (fp64 for fp64), as inside one attention kernel.
    """

    def __init__(self, length: int, like: Tensor) -> None:
        self.values = like.new_empty((length, *like.shape[1:]))
        self.grad: Tensor | None = None

    def collect(self, start: int, grad: Tensor) -> Tensor:
        """Take the gradient [stop, b, groups, d] of a slice; returns the sum on its own rows."""
        if self.grad is None:
            total = grad.to(torch.promote_types(grad.dtype, torch.float32))
        else:
            total = self.grad + grad
        self.grad = total[:start]
        return total[start:].to(grad.dtype)


class _Extend(Function):
    @staticmethod
    def forward(ctx: Any, new: Tensor, rows: _Rows, start: int) -> Tensor:
        ctx.rows, ctx.start = rows, start
        stop = start + new.shape[0]
        rows.values[start:stop] = new
        # .data has a version of its own: later slices write behind these rows, never into them
        return rows.values.data[:stop]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.rows.collect(ctx.start, grad), None, None
