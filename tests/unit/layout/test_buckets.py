"""Buckets that a layout plans."""

from __future__ import annotations

from megapipe.layout.buckets import process_buckets
from tests.parity.cases import Case
from tests.parity.user_models import Own, settle


def test_a_parameter_that_is_used_twice_is_planned_once() -> None:
    """A layer uses it twice, or the first and the last layer do, each with a gradient buffer."""
    config, layout = settle(Own("shared", Case(), 4))
    inner, tied = process_buckets(config, layout, 0)
    twice = [f"layers.{n}.{name}" for n in (1, 2) for name in ("up.weight", "up.bias", "down.bias")]
    assert [spec.name for spec in inner.parameters] == [*twice, "layers.3.inner.bias"]
    assert [spec.name for spec in tied.parameters] == ["layers.0.scale", "layers.0.inner.weight"]
    assert (inner.uses, tied.uses) == (1, 2)
    assert inner.numel == 2 * 8 * 8 + 4 * 8 + 300 + 4, "to a multiple of 16"
