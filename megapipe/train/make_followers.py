"""Construction of a run's followers, whose state changes after each update: routing biases, choice
counts and expert maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from megapipe.config.config import Config
from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.layers.scratch import Scratch
from megapipe.layout.layout import Layout
from megapipe.optim.buffers import main_dtype
from megapipe.train.moe.expert_rebalancing import ExpertRebalancer
from megapipe.train.moe.routing_state import RoutingState
from megapipe.train.moe.routing_stats import summed_loads
from megapipe.train.step.machine import Machine


def routing_totals(machine: Machine, scratches: Sequence[Scratch]) -> list[Tensor]:
    """Return this rank's part of the routing totals of a step, by layer; zeros for layers of other
    ranks. `scratches` hold what layers stored for each work item."""
    return summed_loads(machine.layout.model.routing_stat_counts(), scratches, machine.mesh.device)


class Routing(NamedTuple):
    """The followers of a run."""

    state: RoutingState
    """Expert biases, and counts of routing choices."""
    maps: ExpertRebalancer
    """Maps of experts to ranks, and their rebalancing."""


def make_routing(config: Config, layout: Layout, machine: Machine) -> Routing:
    """Make the followers of a run; without experts they are empty. Collective. Raises
    :class:`ConfigError`."""
    moe, modules = config.model.moe, machine.modules.values()
    state = RoutingState(
        layout.model.experts(),
        modules,
        bias_rate=moe.bias_update_rate,
        counts=moe.aux_loss_scope == "step",
        first_only=moe.aux_loss_choices == "first",
        dtype=main_dtype(TORCH_DTYPES[config.model.dtype]),
    )
    return Routing(state, ExpertRebalancer.of(config, layout, modules, machine.optimizer))
