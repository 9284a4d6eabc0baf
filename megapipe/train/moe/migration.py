"""Migration of experts to owners that fit the load: ``experts.rebalance=migrate``.

Every ``experts.rebalance_every`` steps, after the update, each layer switches to the best owner
map: its current one, or one of its pool (:func:`megapipe.experts.pool.migrate`). The load is known
from the choices of the step, which are in the step's totals. So every rank computes the owners of
all layers without communication; rank 0 has sent the pools and the price of a move at the start. A
step without an update leaves the owners unchanged.

Owners depend on earlier owners, so checkpoints store them. Owners are ep ranks: a run that resumes
with another number of ep ranks starts with the initial owners.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megapipe.config.config import Config
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import ConfigError
from megapipe.experts.map import ExpertMap
from megapipe.experts.pool import migrate
from megapipe.layers.moe.replicas import ExpertReplicas
from megapipe.layout.layout import Layout
from megapipe.layout.moe.rebalance_checks import pools_of
from megapipe.layout.speeds import known_speeds
from megapipe.optim.moe.migration import move_experts
from megapipe.optim.optimizer import Optimizer
from megapipe.plan.moe.placement import Costs
from megapipe.plan.units import Units
from megapipe.train.moe.routing_stats import by_layer

Owners = Mapping[str, Sequence[int]]
"""Owner rank of each expert, by layer number, as stored in JSON."""


@dataclass(frozen=True)
class OwnerChoice:
    """The owner maps that a layer chooses among, and the price of a move."""

    pool: Sequence[ExpertMap]
    worth: float
    """Price of moving one expert, as the number of rows per step that take equally long."""


class Migration:
    """Owners of all layers' experts, chosen every `every` steps among the owner maps in `choices`.
    `replicas` has the expert slots of the local layers, whose parameters are in `optimizer`."""

    def __init__(
        self,
        optimizer: Optimizer,
        begin: Mapping[int, ExpertMap],
        choices: Mapping[int, OwnerChoice],
        every: int,
        replicas: Mapping[int, ExpertReplicas],
    ) -> None:
        self.present = dict(begin)
        """Maps in force, by layer."""
        self._experts = {layer: each.experts for layer, each in begin.items()}
        self._optimizer, self._replicas = optimizer, replicas
        self._choices, self._every = choices, every

    @classmethod
    def of(
        cls,
        config: Config,
        layout: Layout,
        optimizer: Optimizer,
        replicas: Mapping[int, ExpertReplicas],
    ) -> Migration:
        """Build the migration state of a run. Collective. Raises ConfigError on all ranks if rank 0
        cannot read the pool."""
        begin = {n: ExpertMap.even(e, layout.ep) for n, e in layout.model.experts().items()}
        choices = _shared(config, layout, optimizer.mesh)
        return cls(optimizer, begin, choices, config.experts.rebalance_every, replicas)

    def migrate_if_due(self, step: int, routing: Sequence[float]) -> dict[int, int]:
        """Choose owners and move experts, if due after step `step`, counted from 0. `routing` has
        the step's routing totals over all ranks. Returns the number of moved experts by layer.
        Collective."""
        if (step + 1) % self._every:
            return {}
        after = {}
        for layer, _, numbers, _ in by_layer(self._experts, routing):
            pool, worth = self._choices[layer].pool, self._choices[layer].worth
            found = migrate(self.present[layer], pool, [int(n) for n in numbers], worth)
            if found.owners != self.present[layer].owners:
                after[layer] = found
        here = after.keys() & self._replicas.keys()
        move_experts(
            self._optimizer, {self._replicas[layer].owners: after[layer] for layer in here}
        )
        moved = {n: _moved(self.present[n].owners, each.owners) for n, each in after.items()}
        self._take_over(after)
        return moved

    def _take_over(self, after: Mapping[int, ExpertMap]) -> None:
        self.present |= after
        for layer, present in after.items():
            if layer in self._replicas:
                self._replicas[layer].set_map(present)

    @property
    def owners(self) -> Owners:
        """Owners to store in a checkpoint, for layers where some differ from the initial ones."""
        return {
            str(layer): list(each.owners)
            for layer, each in self.present.items()
            if each.owners != ExpertMap.even(each.experts, each.ranks).owners
        }

    def load(self, stored: Owners) -> None:
        """Load a checkpoint's owners, before its tensors are read. A layer whose owners are missing
        or are for another number of ranks gets the initial owners. Collective."""
        self._take_over(
            {
                layer: _stored(stored.get(str(layer)), each.experts, each.ranks)
                for layer, each in self.present.items()
            }
        )


def _moved(before: Sequence[int], after: Sequence[int]) -> int:
    """Count the experts whose owners differ."""
    return sum(old != new for old, new in zip(before, after, strict=True))


def _stored(owners: Sequence[int] | None, experts: int, ranks: int) -> ExpertMap:
    begin = ExpertMap.even(experts, ranks)
    try:
        return begin if owners is None else ExpertMap(tuple(owners), begin.replicas)
    except ConfigError:  # for another number of ranks
        return begin


def _shared(config: Config, layout: Layout, mesh: ParallelMesh) -> dict[int, OwnerChoice]:
    """Return the owner choices on all ranks; rank 0 reads the pools and measures the price."""
    text, error = "", None
    if mesh.rank == 0:
        try:
            text = _as_text(config, layout)
        except ConfigError as problem:
            error = str(problem)
    error = mesh.agree(error)
    if error is not None:
        raise ConfigError(error)
    return {
        int(layer): OwnerChoice([ExpertMap.stored(each) for each in pool], worth)
        for layer, (pool, worth) in json.loads(mesh.share(text)).items()
    }


def _as_text(config: Config, layout: Layout) -> str:
    speeds, units, found = known_speeds(config), Units(config, layout), {}
    for layer, pool in pools_of(config, layout).items():
        worth = Costs.of(units, speeds, layer).worth(config.experts.rebalance_every)
        found[layer] = [each.plain() for each in pool], worth
    return json.dumps(found)
