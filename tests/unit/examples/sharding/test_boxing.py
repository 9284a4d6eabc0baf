"""Conversions between placements: values are kept, and bytes are those of rings."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from examples.sharding.boxing import apply, assemble, route, scatter
from examples.sharding.placement import BROADCAST as B
from examples.sharding.placement import PARTIAL as P
from examples.sharding.placement import Mesh, Placements, local_shape, shown, split
from megapipe.errors import ConfigError

SHAPE = (4, 8)
BYTES = 4 * 8 * 8
WAYS: list[Placements] = list(product((B, P, split(0), split(1)), repeat=2))


@pytest.mark.parametrize("source", WAYS, ids=shown)
def test_every_conversion_keeps_the_value(source: Placements) -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    for to in WAYS:
        pieces = scatter(value, source, (2, 2), generator)
        assert torch.allclose(assemble(pieces, source, (2, 2)), value)
        for step in route(SHAPE, source, to, (2, 2)):
            pieces = apply(pieces, step, (2, 2))
        assert {piece.shape for piece in pieces} == {local_shape(SHAPE, to, (2, 2))}
        assert torch.allclose(assemble(pieces, to, (2, 2)), value)


@pytest.mark.parametrize("count", [2, 4])
def test_bytes_are_those_of_the_published_table(count: int) -> None:
    """It is table 2 of OneFlow (2110.15032)."""
    for source, to, kind, sent in (
        (split(0), B, "all-gather", (count - 1) * BYTES),
        (split(0), split(1), "all-to-all", (count - 1) * BYTES // count),
        (P, B, "all-reduce", 2 * (count - 1) * BYTES),
        (P, split(0), "reduce-scatter", (count - 1) * BYTES),
        (B, split(0), "slice", 0),
        (B, P, "zeros", 0),
        (split(0), P, "zeros", 0),
    ):
        (step,) = route(SHAPE, (source,), (to,), (count,))
        assert (step.kind, step.bytes) == (kind, sent)
        assert step.sends == (sent > 0)
    assert route(SHAPE, (B,), (B,), (count,)) == ()


def test_parts_of_a_dimension_that_two_axes_split_are_gathered_in_order() -> None:
    """Devices along the first axis do not have neighbouring parts of it."""
    both = split(0), split(0)
    assert [step.axis for step in route(SHAPE, both, (split(0), B), (2, 2))] == [1]
    assert len(route(SHAPE, both, (B, split(0)), (2, 2))) > 1


def test_replicas_that_differ_are_noticed() -> None:
    with pytest.raises(ValueError, match="device 1 of an axis has another value"):
        assemble([torch.zeros(2), torch.ones(2)], (B,), (2,))


@pytest.mark.parametrize(
    ("axes", "error"),
    [
        ((("data", 0),), "axis data has 0 devices"),
        ((("data", 2), ("data", 2)), "each needs a name of its own"),
    ],
)
def test_meshes_that_cannot_be(axes: tuple[tuple[str, int], ...], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        Mesh(axes)
