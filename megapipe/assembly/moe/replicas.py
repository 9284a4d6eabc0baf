"""Places of experts in the stages of a process, where these may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megapipe.config.config import Config
from megapipe.layers.moe.experts import RoutedExperts, expert_layers
from megapipe.layers.moe.replicas import ExpertReplicas
from megapipe.layout.moe.replicas import ep_ranks_per_node
from megapipe.model.interface import StageModule


def attach_expert_replicas(
    config: Config, modules: Mapping[int, StageModule]
) -> dict[int, list[ExpertReplicas]]:
    """Give layers with experts their places, which begin without copies, and return them by stage;
    none where maps stay as they are."""
    if not config.experts.moves:
        return {}
    return {
        stage: [_given(config, layer) for layer in expert_layers(m)] for stage, m in modules.items()
    }


def _given(config: Config, layer: RoutedExperts) -> ExpertReplicas:
    """Give a layer its places, and return them."""
    layer.ownership.map = replace(layer.ownership.map, slots=config.experts.slots)
    given = layer.dispatcher.ep, layer.dispatcher.etp, ep_ranks_per_node(config)
    layer.places = ExpertReplicas(layer.of_experts, layer.ownership, *given)
    return layer.places
