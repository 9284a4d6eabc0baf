"""Gradients of the plain reference, split by the positions that they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.parity import reference
from tests.parity.reference import Params


def grads_by_position(
    params: Mapping[str, Tensor],
    parts: Sequence[Sequence[int]],
    objective: Callable[[Params], Tensor],
) -> list[Params]:
    """Return the fp64 gradients of a function of all weights that come from the positions of each
    of `parts`.

    Each position is in one part, so the gradients of the parts add up to the gradient.
    """
    learning = reference.trained(params)
    copies = {n: [params[n].detach().requires_grad_() for _ in parts] for n in learning}
    given = {n: _Copies(copies[n], parts) if n in copies else p for n, p in params.items()}
    value = objective(given)  # type: ignore[arg-type]
    leaves = [copies[n][i] for i in range(len(parts)) for n in learning]
    grads = iter(torch.autograd.grad(value, leaves, materialize_grads=True))
    return [{n: next(grads) for n in learning} for _ in parts]


class _Copies:
    """Equal copies of a weight, one for each part of the positions.

    A function of the weight and of activations [b, s, ...] is computed with each copy; each
    position takes the result of its own copy.
    """

    def __init__(self, copies: Sequence[Tensor], parts: Sequence[Sequence[int]]) -> None:
        self.copies, self.parts = copies, parts
        self.shape = copies[0].shape

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        """Call a function of activations and copies with each copy."""
        named = kwargs or {}
        parts = next(x.parts for x in (*args, *named.values()) if isinstance(x, cls))

        def of(x: Any, i: int) -> Any:
            return x.copies[i] if isinstance(x, cls) else x

        found = [
            function(*(of(x, i) for x in args), **{key: of(x, i) for key, x in named.items()})
            for i in range(len(parts))
        ]
        return _of_each(found, parts)

    def at(self, position: int) -> Tensor:
        """Return the copy that a position uses."""
        (number,) = (i for i, part in enumerate(self.parts) if position in part)
        return self.copies[number]

    @property
    def T(self) -> _Copies:
        return _Copies([x.T for x in self.copies], self.parts)

    def to(self, dtype: torch.dtype) -> _Copies:
        return _Copies([x.to(dtype) for x in self.copies], self.parts)

    def __radd__(self, number: int) -> _Copies:
        return _Copies([number + x for x in self.copies], self.parts)

    def __getitem__(self, index: Any) -> Any:
        """Return a part of the weight or, for tokens [b, s], their rows [b, s, ...]."""
        found = [x[index] for x in self.copies]
        return _of_each(found, self.parts) if torch.is_tensor(index) else _Copies(found, self.parts)


def _of_each(found: Sequence[Tensor], parts: Sequence[Sequence[int]]) -> Tensor:
    """Join results [b, s, ...] of the parts: each position takes the result of its part."""
    order = torch.tensor([position for part in parts for position in part])
    joined = torch.cat([x[:, list(part)] for x, part in zip(found, parts, strict=True)], 1)
    return joined[:, order.argsort()]
