"""Mesh-TensorFlow (1811.02084): every dimension has a name, and a table maps names to mesh axes.

Only dimensions of the inputs are named. The rules carry names to all other values, since a letter
of a rule is one dimension in several tensors. So the table alone places every value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from examples.sharding.placement import BROADCAST, Mesh, Placement, divides, split
from examples.sharding.plan import Hints
from examples.sharding.program import Op, Program
from examples.sharding.rules import rule
from megapipe.errors import ConfigError

Dim = tuple[str, int]
"""A value and the index of a dimension of it."""

GPT_BLOCK: Mapping[str, Sequence[str]] = {
    "x": ("batch", "sequence", "hidden"),
    "target": ("batch", "sequence", "hidden"),
    **{f"attention.{each}.weight": ("heads", "hidden") for each in "qkv"},
    **{f"attention.{each}.bias": ("heads",) for each in "qkv"},
    "attention.out.weight": ("hidden", "heads"),
    "attention.out.bias": ("hidden",),
    "mlp.up.weight": ("wide", "hidden"),
    "mlp.up.bias": ("wide",),
    "mlp.down.weight": ("hidden", "wide"),
    "mlp.down.bias": ("hidden",),
    **{
        f"{each}_norm.{kind}": ("hidden",)
        for each in ("attention", "mlp")
        for kind in ("weight", "bias")
    },
}
"""Dimension names of the inputs of a GPT block."""


def name_dims(program: Program, names: Mapping[str, Sequence[str]]) -> dict[Dim, str]:
    """Return the name of each dimension that has one.

    Raises:
        ConfigError: an input with another number of names than dimensions, or a dimension that
            would have two names.
    """
    found: dict[Dim, str] = {}
    for value in program.inputs:
        own, shape = names.get(value, ()), program.shapes[value]
        if own and len(own) != len(shape):
            raise ConfigError(f"dims: {value} of shape {shape} has {len(own)} names: {own}")
        found.update({(value, dim): name for dim, name in enumerate(own)})
    groups = [group for op in program.ops for group in _same_dims(program, op)]
    changed = True
    while changed:
        changed = False
        for group in groups:
            given = {found[dim] for dim in group if dim in found}
            if len(given) > 1:
                raise ConfigError(f"dims: {', '.join(sorted(given))} are one dimension: {group}")
            for dim in group if given else ():
                if dim not in found:
                    found[dim] = next(iter(given))
                    changed = True
    return found


def _same_dims(program: Program, op: Op) -> list[list[Dim]]:
    """Return dimensions that have one letter in the rule of an operation, letter by letter."""
    own = rule(op, program.shapes)
    groups: dict[str, list[Dim]] = {}
    for values, texts in ((op.inputs, own.inputs), (op.outputs, own.outputs)):
        for value, text in zip(values, texts, strict=True):
            for dim, letter in enumerate(text):
                if letter != ".":
                    groups.setdefault(letter, []).append((value, dim))
    return list(groups.values())


def layout_hints(
    program: Program, mesh: Mesh, names: Mapping[str, Sequence[str]], layout: Mapping[str, str]
) -> Hints:
    """Return where the table `layout`, axis by name of a dimension, places every value.

    Raises:
        ConfigError: an unknown axis, or names that :func:`name_dims` refuses.
    """
    axes = {name: mesh.index(axis) for name, axis in layout.items()}
    hints: Hints = {}
    for (value, dim), name in name_dims(program, names).items():
        if name in axes:
            before = hints.get(value, (None,) * len(mesh.axes))
            after: tuple[Placement | None, ...] = (
                *before[: axes[name]],
                split(dim),
                *before[axes[name] + 1 :],
            )
            full = tuple(each or BROADCAST for each in after)
            if divides(program.shapes[value], full, mesh.sizes):
                hints[value] = after
    return hints
