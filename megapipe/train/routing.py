"""Make what training keeps of routing from step to step, :mod:`megapipe.train.moe`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from megapipe.config.config import Config
from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.layers.scratch import Scratch
from megapipe.layout.layout import Layout
from megapipe.optim.buffers import main_dtype
from megapipe.train.moe.expert_maps import ExpertRebalancer
from megapipe.train.moe.routing import summed_loads
from megapipe.train.moe.routing_state import RoutingState
from megapipe.train.step.machine import Machine


def routing_totals(machine: Machine, scratches: Sequence[Scratch]) -> list[Tensor]:
    """Return the numbers of routing of a step that this rank adds to its totals, by layer; zeros
    for layers of other ranks. `scratches` are those of its micro-batches."""
    return summed_loads(machine.layout.model.routing_stat_counts(), scratches, machine.mesh.device)


class Routing(NamedTuple):
    """The followers of a run."""

    state: RoutingState
    """Biases and counts of choices."""
    maps: ExpertRebalancer
    """Which ranks have which experts."""


def make_routing(config: Config, layout: Layout, machine: Machine) -> Routing:
    """Make the followers of a run; without experts they keep nothing. All ranks call it. Raises
    :class:`ConfigError`."""
    moe, modules = config.model.moe, machine.modules.values()
    state = RoutingState(
        layout.model.experts(),
        modules,
        bias_rate=moe.bias_rate,
        counts=moe.balance_scope == "step",
        first_only=moe.balance_choices == "first",
        dtype=main_dtype(TORCH_DTYPES[config.model.dtype]),
    )
    return Routing(state, ExpertRebalancer.of(config, layout, modules, machine.optimizer))
