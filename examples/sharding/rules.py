"""Sharding rules of aten operations: which placements of the inputs give which of the outputs.

A rule is written in the index notation of Tofu's tensor description language (1807.08887), with a
letter for each dimension: ``mk,kn->mn`` for a matrix product. A dot is a dimension that has to be
whole. From this follow the signatures of OneFlow (2110.15032):

- splitting a letter splits each tensor that has it. A tensor without it is broadcast. An output
  without it is a sum over it, so it is partial.
- an operation that is linear in some inputs takes these as partial, and its outputs are partial.

Nothing here is taken on trust: :mod:`examples.sharding.verify` runs every signature on pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from string import ascii_letters
from typing import NamedTuple

from torch import Tensor

from examples.sharding.placement import (
    BROADCAST,
    PARTIAL,
    Placement,
    Shape,
    split,
)
from examples.sharding.program import Op, Program
from megapipe.errors import ConfigError


class Signature(NamedTuple):
    """Placements of the inputs and outputs of an operation along one mesh axis."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]

    def __str__(self) -> str:
        left, right = (" ".join(map(str, side)) for side in self)
        return f"{left} -> {right}"

    @property
    def splits(self) -> bool:
        """Whether some tensor is split."""
        return any(place.kind == "S" for place in (*self.inputs, *self.outputs))

    @property
    def passes_partial(self) -> bool:
        """Whether it takes partial inputs only because the operation is linear in them."""
        return not self.splits and PARTIAL in self.inputs


class Rule(NamedTuple):
    """The rule of one operation on tensors of given shapes."""

    inputs: tuple[str, ...]
    """Letters of each input."""
    outputs: tuple[str, ...]
    """Letters of each output."""
    linear: tuple[tuple[int, ...], ...] = ()
    """Groups of inputs in which the operation is linear, the others fixed."""
    addends: tuple[int, ...] = ()
    """Inputs that are added to a sum: partial if the sum is."""

    def signatures(self) -> list[Signature]:
        """Return all signatures: broadcast first, one per letter, one per linear group."""
        count, made = len(self.inputs), len(self.outputs)
        found = [Signature((BROADCAST,) * count, (BROADCAST,) * made)]
        letters = dict.fromkeys("".join(self.inputs).replace(".", ""))
        for letter in letters:
            summed = letter not in self.outputs[0]
            ins = tuple(
                split(text.index(letter))
                if letter in text
                else PARTIAL
                if summed and index in self.addends
                else BROADCAST
                for index, text in enumerate(self.inputs)
            )
            outs = (
                split(text.index(letter)) if letter in text else PARTIAL for text in self.outputs
            )
            found.append(Signature(ins, tuple(outs)))
        for group in self.linear:
            ins = tuple(PARTIAL if index in group else BROADCAST for index in range(count))
            found.append(Signature(ins, (PARTIAL,) * made))
        return found


Shapes = Sequence[Shape]


def _rule(text: str, *linear: tuple[int, ...], addends: tuple[int, ...] = ()) -> Rule:
    left, right = text.split("->")
    return Rule(tuple(left.split(",")), tuple(right.split(",")), linear, addends)


def _fixed(text: str, *linear: tuple[int, ...], addends: tuple[int, ...] = ()) -> _Make:
    return lambda op, ins, outs: _rule(text, *linear, addends=addends)


_Make = Callable[[Op, Shapes, Shapes], Rule]


def _pointwise(*linear: tuple[int, ...]) -> _Make:
    """Return the rule of a pointwise operation, linear in groups that are among its tensors."""

    def make(op: Op, ins: Shapes, outs: Shapes) -> Rule:
        (out,) = outs
        letters = ascii_letters[: len(out)]
        texts = tuple(
            "".join(
                "." if length == 1 else letter
                for length, letter in zip(shape, letters[len(out) - len(shape) :], strict=True)
            )
            for shape in ins
        )
        groups = linear if len(ins) == len(op.args[:2]) else ()
        return Rule(texts, (letters,), groups)

    return make


def _transpose(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    letters = list(ascii_letters[: len(ins[0])])
    first, second = op.args[1:] or (0, 1)
    letters[first], letters[second] = letters[second], letters[first]
    return Rule((ascii_letters[: len(ins[0])],), ("".join(letters),), ((0,),))


def _sum(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    (shape,) = ins
    dims = [dim % len(shape) for dim in op.args[1]] if len(op.args) > 1 else range(len(shape))
    keep = len(op.args) > 2 and op.args[2]
    text = ascii_letters[: len(shape)]
    out = (("." if keep else "") if dim in dims else letter for dim, letter in enumerate(text))
    return Rule((text,), ("".join(out),), ((0,),))


def _view(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Match dimensions that are merged or divided: the first of each group can be split."""
    (source,), (to,) = ins, outs
    texts = ["." * len(source), "." * len(to)]
    letters = iter(ascii_letters)
    left = [dim for dim, length in enumerate(source) if length != 1]
    right = [dim for dim, length in enumerate(to) if length != 1]
    while left and right:
        first, second, letter = left.pop(0), right.pop(0), next(letters)
        for index, dim in ((0, first), (1, second)):
            texts[index] = texts[index][:dim] + letter + texts[index][dim + 1 :]
        a, b = source[first], to[second]
        while a != b:
            if a < b:
                a *= source[left.pop(0)]
            else:
                b *= to[right.pop(0)]
    return Rule((texts[0],), (texts[1],), ((0,),))


def _norm(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    rows = _rows(ins[0], op.args[1])
    stats = rows[: -len(op.args[1])] + "." * len(op.args[1])
    weights = ("." * len(op.args[1]),) * (len(ins) - 1)
    return Rule((rows, *weights), (rows, stats, stats))


def _norm_backward(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    rows, whole = _rows(ins[0], op.args[2]), "." * len(op.args[2])
    weights = (whole,) * (len(ins) - 4)
    return Rule((rows, rows, rows, rows, *weights), (rows, whole, whole), ((0,),))


def _rows(shape: Shape, normalized: Sequence[int]) -> str:
    free = len(shape) - len(normalized)
    return ascii_letters[:free] + "." * len(normalized)


RULES: Mapping[str, _Make] = {
    "mm": _fixed("mk,kn->mn", (0,), (1,)),
    "bmm": _fixed("bmk,bkn->bmn", (0,), (1,)),
    "addmm": _fixed("n,mk,kn->mn", (0, 1), (0, 2), addends=(0,)),
    "add": _pointwise((0, 1)),
    "sub": _pointwise((0, 1)),
    "mul": _pointwise((0,), (1,)),
    "gelu": _pointwise(),
    "gelu_backward": _pointwise((0,)),
    "sum": _sum,
    "t": _transpose,
    "transpose": _transpose,
    "view": _view,
    "_unsafe_view": _view,
    "native_layer_norm": _norm,
    "native_layer_norm_backward": _norm_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _fixed("bh..,bh..,bh..->bh..,bh."),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _fixed(
        "bh..,bh..,bh..,bh..,bh..,bh.->bh..,bh..,bh..", (0,)
    ),
}
"""Rule of each operation, by the name of the operation."""


def rule(op: Op, shapes: Mapping[str, Shape]) -> Rule:
    """Return the rule of an operation. Raises ConfigError for one without a rule."""
    if op.name not in RULES:
        raise ConfigError(
            f"sharding: operation {op.name} has no rule; add one to RULES of "
            f"examples/sharding/rules.py (known are {', '.join(RULES)})"
        )
    return RULES[op.name](op, [shapes[x] for x in op.inputs], [shapes[x] for x in op.outputs])


@lru_cache(maxsize=2**12)
def signatures(op: Op, program: Program) -> tuple[Signature, ...]:
    """Return the signatures of an operation of a program."""
    return tuple(rule(op, program.shapes).signatures())


def run_piece(op: Op, pieces: Sequence[Tensor], shape: Shape) -> tuple[Tensor, ...]:
    """Run an operation on pieces of its inputs; `shape`: that of the first output's piece."""
    if RULES[op.name] is _view:
        return (pieces[0].reshape(shape),)
    return op.run(pieces)
