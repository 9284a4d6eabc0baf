"""Rotary position embedding of queries and keys (Su et al., 2104.09864): torch's, or inductor's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megapipe.ops.compiler import compile_elementwise, needs_inductor
from megapipe.ops.probe import Candidate, agree, in_preference, needs_no_graph, small_data

RotaryKernel = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Function (x [s, b, ..., d], cos and sin [s, 1, ..., d], sign) that rotates x in place by sign *
angle. The two coordinates of a pair are in the two halves of d (rotate_half), not adjacent."""


def torch_rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    y = x * cos  # into new memory first: products of halves that lie apart are slower than the copy
    (x1, x2), (y1, y2), (sin1, sin2) = (t.chunk(2, dim=-1) for t in (x, y, sin))
    y1.addcmul_(x2, sin1, value=-sign)
    y2.addcmul_(x1, sin2, value=sign)
    return x.copy_(y)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int = 1) -> Tensor:
    """Return x rotated, as a new tensor, in operations that a compiler fuses. Coordinates beyond
    the width of the tables are not rotated."""
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((rotated(x[..., :width], cos, sin, sign), x[..., width:]), dim=-1)
    half = width // 2
    is_first = torch.arange(x.shape[-1], device=x.device) < half
    return x * cos + x.roll(half, -1) * torch.where(is_first, -sign * sin, sign * sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    return x.copy_(rotated(x, cos, sin, sign))


def candidates(
    *, device: torch.device, dtype: torch.dtype, compiled: bool = False
) -> list[Candidate[RotaryKernel]]:
    """Return the kernels in order of preference: inductor's, then torch's; on a CPU torch's first.
    Compiled blocks use torch's."""

    def inductor() -> RotaryKernel:
        needs_inductor(device)
        needs_no_graph(compiled)
        return compile_elementwise(_rotate)

    def results(kernel: RotaryKernel, precision: torch.dtype) -> Sequence[Tensor]:
        shapes = [(6, 2, 1, 3, 16), (6, 1, 1, 1, 16), (6, 1, 1, 1, 16)]
        x, cos, sin = (each.detach() for each in small_data(shapes, dtype, precision, device))
        return [kernel(x.clone(), cos, sin, sign) for sign in (1, -1)]

    def check(kernel: RotaryKernel) -> None:
        agree(kernel, torch_rotate, results, dtype)

    found = [
        Candidate[RotaryKernel]("inductor", inductor, check),
        Candidate[RotaryKernel]("torch", lambda: torch_rotate),
    ]
    return in_preference(found, device)
