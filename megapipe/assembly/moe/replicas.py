"""Places of experts in the stages of a process, where these may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megapipe.config.config import Config
from megapipe.layers.moe.experts import Experts, expert_layers
from megapipe.layers.moe.replicas import ExpertPlaces
from megapipe.layout.moe.replicas import ranks_of_a_node
from megapipe.model.interface import StageModule


def make_places(
    config: Config, modules: Mapping[int, StageModule]
) -> dict[int, list[ExpertPlaces]]:
    """Give layers with experts their places, which begin without copies, and return them by stage;
    none where maps stay as they are."""
    if not config.experts.moves:
        return {}
    return {
        stage: [_given(config, layer) for layer in expert_layers(m)] for stage, m in modules.items()
    }


def _given(config: Config, layer: Experts) -> ExpertPlaces:
    """Give a layer its places, and return them."""
    layer.ownership.present = replace(layer.ownership.present, slots=config.experts.slots)
    given = layer.dispatcher.ep, layer.dispatcher.etp, ranks_of_a_node(config)
    layer.places = ExpertPlaces(layer.of_experts, layer.ownership, *given)
    return layer.places
