"""Elementwise kernels around the experts' matrix products.

They compute the activation times each row's weight, the gradients of both, and the sum of a token's
rows. Each takes torch several passes over all rows; inductor compiles each to one or two GPU
kernels, for any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megapipe.ops.activation import Activate
from megapipe.ops.compiler import FEWEST_ROWS, compile_rows, needs_inductor
from megapipe.ops.probe import Candidate, agree, in_preference, small_data


class MoEElementwiseKernel(Protocol):
    def activate_and_weight(self, wide: Tensor, weight: Tensor, activation: Activate) -> Tensor:
        """Return activation(wide) * weight: [rows, (2) f] and [rows] -> [rows, f]."""

    def gradients(
        self, wide: Tensor, weight: Tensor, product: Callable[[], Tensor], activation: Activate
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result of :meth:`activate_and_weight`, and the gradients of `wide` and
        `weight`. `product()` computes the result's gradient [rows, f], when it is needed."""

    def unpermute(self, rows: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum of each token's rows, [tokens, h], in `dtype`. `slots` [tokens, k] has the
        indices of a token's rows in `rows` [rows, h], in the order of summation."""


class TorchRows:
    def activate_and_weight(self, wide: Tensor, weight: Tensor, activation: Activate) -> Tensor:
        return activation(wide).mul_(weight.unsqueeze(1))

    def gradients(
        self, wide: Tensor, weight: Tensor, product: Callable[[], Tensor], activation: Activate
    ) -> tuple[Tensor, Tensor, Tensor]:
        plain, back = activation.and_back(wide)  # [rows, f]
        grad, weight = product(), weight.unsqueeze(1)
        of_weight = (grad * plain).sum(-1, dtype=weight.dtype)
        return plain.mul_(weight), back(grad.mul_(weight)), of_weight

    def unpermute(self, rows: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        total = rows[slots[:, 0]].to(dtype)
        for choice in range(1, slots.shape[1]):
            total += rows[slots[:, choice]]
        return total


class InductorRows:
    def __init__(self) -> None:
        self._few = TorchRows()
        self._weighted = compile_rows(_weighted)
        self._gradients = compile_rows(_gradients)
        self._add_up = compile_rows(_add_up)

    def activate_and_weight(self, wide: Tensor, weight: Tensor, activation: Activate) -> Tensor:
        if len(wide) < FEWEST_ROWS:
            return self._few.activate_and_weight(wide, weight, activation)
        return self._weighted(weight, activation, *activation.split(wide))

    def gradients(
        self, wide: Tensor, weight: Tensor, product: Callable[[], Tensor], activation: Activate
    ) -> tuple[Tensor, Tensor, Tensor]:
        if len(wide) < FEWEST_ROWS:
            return self._few.gradients(wide, weight, product, activation)
        grad_wide = torch.empty_like(wide)
        parts = *activation.split(wide), *activation.split(grad_wide)
        inner, of_weight = self._gradients(weight, product(), activation, *parts)
        return inner, grad_wide, of_weight

    def unpermute(self, rows: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        if min(len(rows), len(slots)) < FEWEST_ROWS:
            return self._few.unpermute(rows, slots, dtype)
        return self._add_up(rows, slots, dtype)


def _weighted(weight: Tensor, activation: Activate, *parts: Tensor) -> Tensor:
    return (activation.of_parts(*parts) * weight.unsqueeze(1)).to(parts[0].dtype)


def _gradients(
    weight: Tensor, grad: Tensor, activation: Activate, *tensors: Tensor
) -> tuple[Tensor, Tensor]:
    """Write the gradients of the parts into the second half of `tensors`: separate parts are
    written in one pass over the rows, but concatenated in more."""
    parts, grads = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
    plain, back = torch.func.vjp(activation.of_parts, *parts)[:2]
    inner = (plain * weight.unsqueeze(1)).to(grad.dtype)
    of_weight = (grad * plain).sum(-1, dtype=weight.dtype)
    found = back((grad * weight.unsqueeze(1)).to(plain.dtype))
    for out, part in zip(grads, found, strict=True):
        out.copy_(part)
    return inner, of_weight


def _add_up(rows: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    total = rows[slots[:, 0]].to(dtype)
    for choice in range(1, slots.shape[1]):
        total = total + rows[slots[:, choice]]
    return total


def candidates(
    *, device: torch.device, dtype: torch.dtype
) -> list[Candidate[MoEElementwiseKernel]]:
    """Return the kernels by preference: on a GPU inductor's, then torch's; on a CPU torch's
    first."""

    def inductor() -> MoEElementwiseKernel:
        needs_inductor(device)
        return InductorRows()

    def results(kernel: MoEElementwiseKernel, precision: torch.dtype) -> Sequence[Tensor]:
        shapes = [(9, 256), (9, 128), (9, 48)]
        wide, grad, rows = (x.detach() for x in small_data(shapes, dtype, precision, device))
        weight = torch.linspace(0.1, 0.9, 9, device=device).to(
            torch.promote_types(precision, torch.float32)
        )
        slots = torch.tensor([[0, 8], [6, 3], [5, 4], [7, 1]], device=device)
        swiglu = Activate("swiglu")
        found = kernel.gradients(wide, weight, grad.clone, swiglu)
        total = kernel.unpermute(rows, slots, weight.dtype)
        return [kernel.activate_and_weight(wide, weight, swiglu), *found, total]

    def check(kernel: MoEElementwiseKernel) -> None:
        agree(kernel, TorchRows(), results, dtype)

    found = [
        Candidate[MoEElementwiseKernel]("inductor", inductor, check),
        Candidate[MoEElementwiseKernel]("torch", TorchRows),
    ]
    return in_preference(found, device)
