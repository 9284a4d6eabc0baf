"""Unity (OSDI 2022): algebra and parallelisation are substitutions on one graph, searched jointly.

An expression is a variable or a tuple (operation, arguments). Parallel operations are nodes too:
``partition`` and ``replicate`` turn a whole tensor into pieces, ``combine`` and ``reduce`` turn
pieces into a whole one. A substitution is used only if :func:`verified` finds both sides equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from examples.sharding.boxing import ITEM

Expr = str | int | tuple["Expr", ...]
Value = Tensor | list[Tensor]
"""A whole tensor, or its pieces on the devices."""


class Substitution(NamedTuple):
    """Two expressions that are equal for all values of their variables."""

    name: str
    before: Expr
    after: Expr
    shapes: Mapping[str, tuple[int, ...]]
    """Example shapes of the variables, for the verification."""
    pieces: frozenset[str] = frozenset()
    """Variables that stand for pieces, each of that shape."""


_MM: Mapping[str, tuple[int, ...]] = {"a": (4, 6), "b": (6, 8), "c": (6, 8)}
_PIECES = frozenset({"a", "b"})
SUBSTITUTIONS: Sequence[Substitution] = (
    Substitution(
        "split rows",
        ("mm", "a", "b"),
        ("combine", 0, ("mm", ("partition", 0, "a"), ("replicate", "b"))),
        _MM,
    ),
    Substitution(
        "split columns",
        ("mm", "a", "b"),
        ("combine", 1, ("mm", ("replicate", "a"), ("partition", 1, "b"))),
        _MM,
    ),
    Substitution(
        "split sum",
        ("mm", "a", "b"),
        ("reduce", ("mm", ("partition", 1, "a"), ("partition", 0, "b"))),
        _MM,
    ),
    *(
        Substitution(
            f"GELU of pieces {dim}",
            ("gelu", ("combine", dim, "a")),
            ("combine", dim, ("gelu", "a")),
            {"a": (4, 6)},
            _PIECES,
        )
        for dim in (0, 1)
    ),
    *(
        Substitution(
            f"stay split {dim}",
            ("partition", dim, ("combine", dim, "a")),
            "a",
            {"a": (4, 6)},
            _PIECES,
        )
        for dim in (0, 1)
    ),
    Substitution(
        "one reduction",
        ("add", ("reduce", "a"), ("reduce", "b")),
        ("reduce", ("add", "a", "b")),
        {"a": (4, 6), "b": (4, 6)},
        _PIECES,
    ),
    Substitution(
        "one product",
        ("add", ("mm", "a", "b"), ("mm", "a", "c")),
        ("mm", "a", ("add", "b", "c")),
        _MM,
    ),
    Substitution(
        "other order",
        ("mm", ("mm", "a", "b"), "c"),
        ("mm", "a", ("mm", "b", "c")),
        {"a": (4, 6), "b": (6, 8), "c": (8, 2)},
    ),
)
"""The substitutions that :func:`best` uses."""


class Cost(NamedTuple):
    """What the busiest device does, and what all devices send."""

    flops: int
    bytes: int

    def seconds(self, flops: float = 1e9, bytes_: float = 1e9) -> float:
        """Return the time at a rate of products and a rate of messages."""
        return self.flops / flops + self.bytes / bytes_


def evaluate(expr: Expr, values: Mapping[str, Value], devices: int) -> tuple[Value, Cost]:
    """Return the value of an expression and its cost.

    Whole operations run on every device. Weights and inputs are on all devices, so that only
    ``combine`` (all-gather) and ``reduce`` (all-reduce) send.
    """
    if isinstance(expr, str):
        return values[expr], Cost(0, 0)
    assert isinstance(expr, tuple)
    name, *rest = expr
    dims = [each for each in rest if isinstance(each, int)]
    done = [evaluate(each, values, devices) for each in rest if not isinstance(each, int)]
    args = [value for value, _ in done]
    spent = Cost(sum(cost.flops for _, cost in done), sum(cost.bytes for _, cost in done))
    value, flops, sent = _call(str(name), dims, args, devices)
    return value, Cost(spent.flops + flops, spent.bytes + sent)


def _call(name: str, dims: list[int], args: list[Value], devices: int) -> tuple[Value, int, int]:
    """Return the result of an operation, its FLOPs on a device, and its bytes."""
    first = args[0]
    if name == "partition":
        assert isinstance(first, Tensor)
        return list(first.chunk(devices, dims[0])), 0, 0
    if name == "replicate":
        assert isinstance(first, Tensor)
        return [first] * devices, 0, 0
    if name in ("combine", "reduce"):
        assert isinstance(first, list)
        whole = torch.cat(first, dims[0]) if dims else torch.stack(first).sum(0)
        return whole, 0, (1 if dims else 2) * (devices - 1) * ITEM * whole.numel()
    if isinstance(first, list):
        pieces = [_compute(name, list(own)) for own in zip(*args, strict=True)]
        return [value for value, _ in pieces], pieces[0][1], 0
    value, flops = _compute(name, [each for each in args if isinstance(each, Tensor)])
    return value, flops, 0


def _compute(name: str, args: list[Tensor]) -> tuple[Tensor, int]:
    if name == "mm":
        return args[0] @ args[1], 2 * prod(args[0].shape) * args[1].shape[1]
    if name == "add":
        return args[0] + args[1], args[0].numel()
    assert name == "gelu", name
    return F.gelu(args[0]), args[0].numel()


def verified(substitution: Substitution, devices: int = 2, seed: int = 0) -> bool:
    """Whether both sides have equal values and equal gradients for random fp64 tensors."""
    generator = torch.Generator().manual_seed(seed)

    def fresh(name: str) -> Tensor:
        shape = substitution.shapes[name]
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    values: dict[str, Value] = {
        name: [fresh(name) for _ in range(devices)] if name in substitution.pieces else fresh(name)
        for name in substitution.shapes
    }
    leaves = [
        x for value in values.values() for x in (value if isinstance(value, list) else [value])
    ]
    sides = []
    for expr in (substitution.before, substitution.after):
        value, _ = evaluate(expr, values, devices)
        out = torch.stack(value) if isinstance(value, list) else value
        weight = torch.linspace(1, 2, out.numel(), dtype=torch.float64).view_as(out)
        grads = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
        sides.append([out, *(torch.zeros(()) if grad is None else grad for grad in grads)])
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-10, atol=1e-10)
        for a, b in zip(*sides, strict=True)
    )


def best(
    expr: Expr,
    values: Mapping[str, Value],
    devices: int,
    substitutions: Sequence[Substitution] = SUBSTITUTIONS,
    limit: int = 3000,
) -> tuple[Expr, Cost]:
    """Return the fastest expression among the first `limit` ones that substitutions lead to."""
    seen, queue = {expr}, [expr]
    for each in queue:
        for after in _rewritten(each, substitutions):
            if after not in seen and len(seen) < limit and _possible(after, values, devices):
                seen.add(after)
                queue.append(after)
    costs = {each: evaluate(each, values, devices)[1] for each in queue}
    fastest = min(queue, key=lambda each: costs[each].seconds())
    return fastest, costs[fastest]


def _possible(expr: Expr, values: Mapping[str, Value], devices: int) -> bool:
    """Whether no operation has whole tensors and pieces, and no piece is missing."""
    try:
        evaluate(expr, values, devices)
    except (AssertionError, RuntimeError, ValueError):
        return False
    return True


def _rewritten(expr: Expr, substitutions: Sequence[Substitution]) -> Iterator[Expr]:
    """Yield the expressions that one substitution makes, at the top or deeper."""
    for each in substitutions:
        found = _match(each.before, expr, {})
        if found is not None:
            yield _filled(each.after, found)
    if isinstance(expr, tuple):
        for index, inner in enumerate(expr[1:], 1):
            for after in _rewritten(inner, substitutions):
                yield (*expr[:index], after, *expr[index + 1 :])


def _match(pattern: Expr, expr: Expr, found: dict[str, Expr]) -> dict[str, Expr] | None:
    """Return the variables of a pattern that make it equal to an expression; None if none do."""
    if isinstance(pattern, str):
        if pattern in found:
            return found if found[pattern] == expr else None
        return {**found, pattern: expr}
    if isinstance(pattern, int) or isinstance(expr, str | int):
        return found if pattern == expr else None
    if len(pattern) != len(expr) or pattern[0] != expr[0]:
        return None
    matched: dict[str, Expr] | None = found
    for own, other in zip(pattern[1:], expr[1:], strict=True):
        matched = None if matched is None else _match(own, other, matched)
    return matched


def _filled(pattern: Expr, found: Mapping[str, Expr]) -> Expr:
    if isinstance(pattern, str):
        return found[pattern]
    if isinstance(pattern, int):
        return pattern
    return (pattern[0], *(_filled(each, found) for each in pattern[1:]))
