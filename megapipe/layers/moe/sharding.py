"""How layers with experts are split, and their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from torch.nn import Parameter

from megapipe.distributed.axis import Axis
from megapipe.layers.moe.dispatch import Dispatcher
from megapipe.layers.moe.dispatchers.all_to_all import AllToAllDispatcher
from megapipe.layers.moe.owners import ExpertOwners
from megapipe.layers.parameter import Sharding, local_parameter, make_parameter
from megapipe.layers.specs import ParameterSpec


@dataclass(frozen=True)
class MoESharding(Sharding):
    """How the layers of a stage are split that has experts, by default over tp alone."""

    dispatcher: Dispatcher = field(default_factory=lambda: AllToAllDispatcher(Axis.alone()))
    """How tokens get to their experts, which ranks have these."""
    bandwidths: Sequence[float] | None = None
    """From this rank to each of those with experts, for the balance term; None: all count alike
    there."""

    @classmethod
    def of(cls, sharding: Sharding) -> MoESharding:
        """Return `sharding` itself, or where it says nothing of experts one of all of them on this
        rank."""
        if isinstance(sharding, cls):
            return sharding
        return cls(**{each.name: getattr(sharding, each.name) for each in fields(Sharding)})

    @property
    def ranks(self) -> int:
        """Ranks with experts of their own; neighbours with parts of the same ones count as one."""
        return self.dispatcher.ep.size // self.dispatcher.etp

    @property
    def rank(self) -> int:
        """The number of this one among them."""
        return self.dispatcher.ep.index // self.dispatcher.etp

    @property
    def part(self) -> int:
        """Which part of its experts' width this rank has."""
        return self.dispatcher.ep.index % self.dispatcher.etp


def expert_parameter(sharding: MoESharding, spec: ParameterSpec, owners: ExpertOwners) -> Parameter:
    """Make a parameter of experts, of which `owners` says which are here, without storage yet."""
    assert spec.over_ep, spec.name
    etp, part = sharding.dispatcher.etp, sharding.part
    sizes = spec.local_shape(sharding.tp.size, sharding.ranks, etp)
    offsets = [0] * len(sizes)
    if spec.inner_dim is not None:
        offsets[spec.inner_dim] = sizes[spec.inner_dim] * part
    counted = spec.split or part == 0
    region = tuple(offsets), sizes
    return make_parameter(local_parameter(sharding, spec, region, counted, owners), sharding.dtype)
