"""Parts of a Llama as they are usually written, whose backward is left to autograd.

They save more for the backward than megapipe's parts: silu(gate) in addition to gate and up, and
rotated queries and keys in addition to the output of their projection.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from megapipe.model.gpt.attention import Attention
from megapipe.model.gpt.rotary import Tables


def swiglu(both: Tensor) -> Tensor:
    """Compute silu(gate) up of gate and up, [..., 2 f] -> [..., f]."""
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up


class Rotating(Attention):
    """Rotates queries and keys as new tensors."""

    def project(self, x: Tensor, rotary: Tables | None, skip_output: bool = False) -> Tensor:
        assert rotary is not None
        self.tables = rotary
        return super().project(x, None, skip_output)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._split(qkv)
        q, k = (rotated(each, *self.tables) for each in (q, k))
        return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., d] by cos and sin of as many values; its halves are the two coordinates."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
