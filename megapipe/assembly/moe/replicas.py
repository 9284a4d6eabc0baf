"""Expert replicas in the stages of a process, if experts may move between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megapipe.config.config import Config
from megapipe.layers.moe.experts import RoutedExperts, expert_layers
from megapipe.layers.moe.replicas import ExpertReplicas
from megapipe.layout.moe.rebalance_checks import ep_ranks_per_node
from megapipe.model.interface import StageModule


def attach_expert_replicas(
    config: Config, modules: Mapping[int, StageModule]
) -> dict[int, list[ExpertReplicas]]:
    """Attach an :class:`ExpertReplicas`, which has no replicas at first, to every MoE layer. Return
    these objects by stage; {} if experts never move."""
    if not config.experts.moves:
        return {}
    return {
        stage: [_attach_replicas(config, layer) for layer in expert_layers(m)]
        for stage, m in modules.items()
    }


def _attach_replicas(config: Config, layer: RoutedExperts) -> ExpertReplicas:
    """Attach an :class:`ExpertReplicas` to a layer, and return it."""
    layer.ownership.map = replace(layer.ownership.map, slots=config.experts.replica_slots)
    arguments = layer.dispatcher.ep, layer.dispatcher.etp, ep_ranks_per_node(config)
    layer.replicas = ExpertReplicas(layer.of_experts, layer.ownership, *arguments)
    return layer.replicas
