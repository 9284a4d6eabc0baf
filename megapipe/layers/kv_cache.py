"""KV cache of sequence slices: later slices read the keys and values of earlier slices.

A slice attends to itself and to all slices before it (TeraPipe, 2102.07988). Its keys and values
are written into a buffer for the whole sequence, and its attention reads the buffer up to its own
end. In the backward the slices come in descending order: each slice adds its gradient of earlier
positions to a gradient buffer, and takes from it the sum that later slices have added for its own
positions.

In generation every token is a slice, and the buffer is the usual key/value cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class KVCache:
    """Keys and values of one micro-batch at one stage, by layer, and their gradients.

    The cache must exist from the forward of the first slice to the backward of the first slice.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        """Number of local positions of the whole sequence."""
        self._rows: dict[int, tuple[_Rows, _Rows]] = {}

    def extend(
        self, layer: int, start: int, k: Tensor, v: Tensor, *, gathered: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Store a slice's k and v [slice, b, groups, d]. Return the keys and values of all
        positions up to the slice's end.

        Slices come in ascending order of `start`, their first position, and their backwards in
        descending order. `gathered` is the number of Ulysses ranks. They split heads, so the cache
        holds the positions of all of them.
        """
        if layer not in self._rows:
            length = self.length * gathered
            self._rows[layer] = _Rows(length, k), _Rows(length, v)
        keys, values = self._rows[layer]
        return _Extend.apply(k, keys, start), _Extend.apply(v, values, start)

    def nbytes(self) -> int:
        """Return the bytes of keys and values, and of gradients that earlier slices will take."""
        rows = [each for pair in self._rows.values() for each in pair]
        tensors = [each.values for each in rows] + [
            each.grad for each in rows if each.grad is not None
        ]
        storages = (tensor.untyped_storage() for tensor in tensors)  # keys and values may share one
        return sum({each._cdata: each.nbytes() for each in storages}.values())

    def keep(self, rows: Tensor) -> None:
        """Keep only the sequences with batch indices `rows` [n]; only for inference."""
        for pair in self._rows.values():
            for each in pair:
                each.values = each.values[:, rows]


class _Rows:
    """Cached keys or values of a layer [s, b, groups, d], and their gradient from later slices.

    The gradient is summed in fp32 (fp64 for fp64), as inside one attention kernel.
    """

    def __init__(self, length: int, like: Tensor) -> None:
        self.values = like.new_empty((length, *like.shape[1:]))
        self.grad: Tensor | None = None

    def collect(self, start: int, grad: Tensor) -> Tensor:
        """Add a slice's gradient of all positions up to its end, [stop, b, groups, d]. Return the
        complete gradient of the slice's own positions, from `start` on."""
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
        # .data has its own version counter: later slices write after these rows, never into them
        return rows.values.data[:stop]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.rows.collect(ctx.start, grad), None, None
