"""Sharding of MoE layers and of their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from torch.nn import Parameter

from megapipe.distributed.axis import Axis
from megapipe.experts.map import ExpertMap
from megapipe.layers.moe.dispatch import Dispatcher
from megapipe.layers.moe.dispatchers.all_to_all import AllToAllDispatcher
from megapipe.layers.moe.owners import ExpertOwners
from megapipe.layers.parameter import Sharding, local_parameter, make_parameter, new_parameter
from megapipe.layers.specs import ParameterSpec


@dataclass(frozen=True)
class MoESharding(Sharding):
    """Sharding of the layers of a stage with MoE layers; by default over tp only."""

    dispatcher: Dispatcher = field(default_factory=lambda: AllToAllDispatcher(Axis.alone()))
    """Dispatcher that sends tokens to their experts; it holds the expert-parallel group."""
    bandwidths: Sequence[float] | None = None
    """Bandwidths from this rank to each rank with experts, for the auxiliary loss; None: equal."""

    @classmethod
    def of(cls, sharding: Sharding) -> MoESharding:
        """Return `sharding` itself if it is a MoESharding, else one with all experts on this
        rank."""
        if isinstance(sharding, cls):
            return sharding
        return cls(**{each.name: getattr(sharding, each.name) for each in fields(Sharding)})

    @property
    def ranks(self) -> int:
        """Number of ranks with different experts; etp ranks that share experts count once."""
        return self.dispatcher.ep.size // self.dispatcher.etp

    @property
    def rank(self) -> int:
        """Index of this rank among the ranks with different experts; etp ranks that share experts
        have the same index."""
        return self.dispatcher.ep.index // self.dispatcher.etp

    @property
    def part(self) -> int:
        """Index of this rank among the etp ranks that share its experts."""
        return self.dispatcher.ep.index % self.dispatcher.etp


def parameter_of(sharding: Sharding, spec: ParameterSpec) -> Parameter:
    """Make a parameter without storage; of experts, those that an even map gives this rank."""
    if not spec.over_ep:
        return new_parameter(sharding, spec)
    own = MoESharding.of(sharding)
    even = ExpertMap.even(spec.shape[0], own.ranks)
    return expert_parameter(own, spec, ExpertOwners(even, own.rank))


def expert_parameter(sharding: MoESharding, spec: ParameterSpec, owners: ExpertOwners) -> Parameter:
    """Make a parameter of experts without storage; `owners` has the local experts."""
    assert spec.over_ep, spec.name
    etp, part = sharding.dispatcher.etp, sharding.part
    sizes = spec.local_shape(sharding.tp.size, sharding.ranks, etp)
    offsets = [0] * len(sizes)
    if spec.inner_dim is not None:
        offsets[spec.inner_dim] = sizes[spec.inner_dim] * part
    counted = spec.split or part == 0
    region = tuple(offsets), sizes
    return make_parameter(local_parameter(sharding, spec, region, counted, owners), sharding.dtype)
