"""Stages that the engine runs."""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.engine.stage import Stage
from megapipe.engine.tuple_stage import TupleStage
from megapipe.layers.activation_policy import BlockSpan
from megapipe.layout.layout import Layout
from megapipe.model.interface import StageModule


def make_stage(
    layout: Layout, module: StageModule, spans: Sequence[BlockSpan], *, recompute: bool
) -> Stage:
    """Make the engine's stage for a module; with `recompute` the whole stage is recomputed."""
    kind = TupleStage if layout.sends_tuples else Stage
    return kind(module, spans, recompute=recompute)
