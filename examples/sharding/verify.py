"""Verification of sharding rules: each signature is executed on pieces and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from examples.sharding.boxing import assemble, scatter
from examples.sharding.placement import divides, local_shape
from examples.sharding.program import Op, Program
from examples.sharding.rules import Signature, run_piece, signatures


class Check(NamedTuple):
    """The outcome of executing a signature."""

    op: Op
    signature: Signature
    error: float
    """Largest difference from the whole operation; infinity if pieces do not fit the operation or
    each other, or if replicas differ."""


def check(
    op: Op,
    signature: Signature,
    inputs: Sequence[Tensor],
    devices: int,
    generator: torch.Generator,
) -> Check | None:
    """Execute a signature on pieces; None if a dimension is not divisible by `devices`."""
    expected = op.run(inputs)
    sizes = (devices,)
    tensors = (*inputs, *expected)
    places = (*signature.inputs, *signature.outputs)
    if not all(divides(tuple(x.shape), (p,), sizes) for x, p in zip(tensors, places, strict=True)):
        return None
    pieces = [
        scatter(tensor, (place,), sizes, generator)
        for tensor, place in zip(inputs, signature.inputs, strict=True)
    ]
    shape = local_shape(tuple(expected[0].shape), signature.outputs[:1], sizes)
    try:
        results = [run_piece(op, own, shape) for own in zip(*pieces, strict=True)]
        made = [
            assemble([result[index] for result in results], (place,), sizes)
            for index, place in enumerate(signature.outputs)
        ]
    except (RuntimeError, ValueError):
        return Check(op, signature, float("inf"))
    if [each.shape for each in made] != [each.shape for each in expected]:
        return Check(op, signature, float("inf"))
    differences = (a - b for a, b in zip(made, expected, strict=True))
    return Check(op, signature, max(float(each.abs().max()) for each in differences))


def verify(program: Program, tensors: Mapping[str, Tensor], devices: int = 2) -> list[Check]:
    """Execute every signature of every operation on pieces of the tensors that it has in a run."""
    generator = torch.Generator().manual_seed(1)
    values = program.run(tensors)
    found = []
    for op in program.ops:
        inputs = [values[name] for name in op.inputs]
        for signature in signatures(op, program):
            done = check(op, signature, inputs, devices, generator)
            found += [done] if done else []
    return found
