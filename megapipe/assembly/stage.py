"""Stages that the engine runs."""

from __future__ import annotations

from megapipe.engine.stage import Stage
from megapipe.engine.tuple_stage import TupleStage
from megapipe.layout.layout import Layout
from megapipe.model.interface import StageModule


def make_stage(layout: Layout, number: int, module: StageModule, *, recompute: bool) -> Stage:
    """Make the engine's stage of this number; `recompute`: it is recomputed as a whole."""
    kind = TupleStage if layout.sends_tuples else Stage
    return kind(module, layout.spans[number], recompute=recompute)
