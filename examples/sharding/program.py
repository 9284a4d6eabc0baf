"""One block as data: values with shapes, and the torch operations between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from examples.sharding.placement import Shape


class Ref(NamedTuple):
    """A reference to a value, among the arguments of an operation."""

    value: str


@dataclass(frozen=True, eq=False)  # equal only to itself, so that results can be cached
class Op:
    """One torch operation of a program."""

    name: str
    """Name of the aten operation without its overload, for example ``mm``."""
    target: Any
    """The overload, which is called with `args` and `kwargs`."""
    args: tuple[Any, ...]
    """Arguments; tensors are a :class:`Ref`."""
    kwargs: Mapping[str, Any]
    inputs: tuple[str, ...]
    """Values among the arguments, in their order."""
    outputs: tuple[str, ...]
    """Values that it makes."""

    def run(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Call the operation on tensors that stand for `inputs`; return its outputs."""
        left = iter(inputs)
        args = [next(left) if isinstance(arg, Ref) else arg for arg in self.args]
        out = self.target(*args, **self.kwargs)
        return (out,) if isinstance(out, Tensor) else tuple(out[: len(self.outputs)])


@dataclass(frozen=True, eq=False)  # equal only to itself, so that results can be cached
class Program:
    """Operations in an order in which they can run."""

    shapes: Mapping[str, Shape]
    """Shape of every value."""
    inputs: tuple[str, ...]
    """Values that are given: activations and parameters."""
    parameters: frozenset[str]
    """The inputs that are parameters."""
    ops: tuple[Op, ...]
    outputs: Mapping[str, str]
    """Value by the name of the output. The gradient of input w is called ``w.grad``."""

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the block on one device; return every value."""
        values = dict(tensors)
        for op in self.ops:
            out = op.run([values[name] for name in op.inputs])
            values.update(zip(op.outputs, out, strict=True))
        return values

    def random_inputs(self, seed: int = 0) -> dict[str, Tensor]:
        """Return fp64 tensors for the inputs, of a size that keeps all values near 1."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(self.shapes[name], generator=generator, dtype=torch.float64) / 2
            for name in self.inputs
        }
