"""Substitutions are verified on numbers, and searched for the fastest expression."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from examples.sharding.substitution import (
    SUBSTITUTIONS,
    Expr,
    Substitution,
    Value,
    best,
    evaluate,
    verified,
)

WRONG = (
    Substitution(
        "GELU of terms",
        ("gelu", ("reduce", "a")),
        ("reduce", ("gelu", "a")),
        {"a": (4, 6)},
        frozenset({"a"}),
    ),
    Substitution("changed places", ("mm", "a", "b"), ("mm", "b", "a"), {"a": (4, 4), "b": (4, 4)}),
    Substitution("lost term", ("add", "a", "b"), "a", {"a": (4, 6), "b": (4, 6)}),
    Substitution(
        "rows for columns",
        ("combine", 0, "a"),
        ("combine", 1, "a"),
        {"a": (4, 4)},
        frozenset({"a"}),
    ),
)


@pytest.mark.parametrize("substitution", SUBSTITUTIONS, ids=lambda each: each.name)
@pytest.mark.parametrize("devices", [1, 2])
def test_both_sides_are_equal(substitution: Substitution, devices: int) -> None:
    assert all(verified(substitution, devices, seed) for seed in range(2))


@pytest.mark.parametrize("substitution", WRONG, ids=lambda each: each.name)
def test_a_wrong_one_is_noticed(substitution: Substitution) -> None:
    assert not verified(substitution)


@pytest.fixture
def values() -> dict[str, Value]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (8, 16), "up": (16, 64), "gate": (16, 64), "down": (64, 16)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def equal(one: Expr, other: Expr, values: dict[str, Value]) -> bool:
    (a, _), (b, _) = (evaluate(each, values, 2) for each in (one, other))
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)
    return torch.allclose(a, b, rtol=0, atol=1e-12)


COLUMNS = [each for each in SUBSTITUTIONS if each.name != "split rows"]


def test_columns_then_rows_of_an_mlp_are_found(values: dict[str, Value]) -> None:
    mlp: Expr = ("mm", ("gelu", ("mm", "x", "up")), "down")
    found, cost = best(mlp, values, 2, COLUMNS)
    wide = ("mm", ("replicate", "x"), ("partition", 1, "up"))
    assert found == ("reduce", ("mm", ("gelu", wide), ("partition", 0, "down")))
    assert cost.bytes == 2 * 8 * 16 * 8
    assert equal(found, mlp, values)


def test_algebra_and_parallelism_are_found_together(values: dict[str, Value]) -> None:
    both: Expr = ("add", ("mm", "x", "up"), ("mm", "x", "gate"))
    mlp: Expr = ("mm", ("gelu", both), "down")
    found, cost = best(mlp, values, 2, COLUMNS)
    assert "('add', 'up', 'gate')" in str(found)
    assert (
        cost.seconds()
        < best(mlp, values, 2, [x for x in COLUMNS if x.name != "one product"])[1].seconds()
    )
    assert equal(found, mlp, values)
