"""Experts change their owners with what tokens choose: ``experts.policy=migrate``.

Every ``experts.replan`` steps, after the update, each layer takes over the best of the owners that
there are and those of its pool (:func:`megapipe.experts.pool.migrate`), by the choices of the step,
which are in its totals. So every rank knows the owners of all layers and nothing is exchanged for
the choice; pools and the price of a move are those of the first rank. A step without an update
leaves owners as they are.

Owners follow from those before them, so checkpoints have them. They are of a number of ranks: a run
that goes on with another one begins with owners as any run does.
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
from megapipe.layout.moe.replicas import pools_of
from megapipe.layout.speeds import known_speeds
from megapipe.optim.moe.migration import move_experts
from megapipe.optim.optimizer import Optimizer
from megapipe.plan.moe.placement import Costs
from megapipe.plan.units import Units
from megapipe.train.moe.routing import by_layer

Owners = Mapping[str, Sequence[int]]
"""By the number of a layer the rank that owns each expert, as JSON has it."""


@dataclass(frozen=True)
class OwnerChoice:
    """Of a layer: what it chooses among, and the price of that."""

    pool: Sequence[ExpertMap]
    worth: float
    """Rows as which an expert counts that moves."""


class Migration:
    """Owners of the experts of all layers of a model, each with its choice, every so many steps; of
    some layers the `places` are here, in an `optimizer`."""

    def __init__(
        self,
        optimizer: Optimizer,
        begin: Mapping[int, ExpertMap],
        choices: Mapping[int, OwnerChoice],
        every: int,
        places: Mapping[int, ExpertReplicas],
    ) -> None:
        self.present = dict(begin)
        """By layer, the maps in force."""
        self._experts = {layer: each.experts for layer, each in begin.items()}
        self._optimizer, self._places = optimizer, places
        self._choices, self._every = choices, every

    @classmethod
    def of(
        cls,
        config: Config,
        layout: Layout,
        optimizer: Optimizer,
        places: Mapping[int, ExpertReplicas],
    ) -> Migration:
        """That of a run. All ranks call it. Raises ConfigError on all where the first one cannot
        read the pool."""
        begin = {n: ExpertMap.even(e, layout.ep) for n, e in layout.model.experts().items()}
        choices = _shared(config, layout, optimizer.mesh)
        return cls(optimizer, begin, choices, config.experts.replan, places)

    def migrate_if_due(self, step: int, told: Sequence[float]) -> dict[int, int]:
        """After the update of a step, counted from 0, of which all ranks together have `told`: if
        it is one after which owners are chosen, let experts move. Returns by layer how many have;
        all ranks call it."""
        if (step + 1) % self._every:
            return {}
        after = {}
        for layer, _, numbers, _ in by_layer(self._experts, told):
            pool, worth = self._choices[layer].pool, self._choices[layer].worth
            found = migrate(self.present[layer], pool, [int(n) for n in numbers], worth)
            if found.owners != self.present[layer].owners:
                after[layer] = found
        here = after.keys() & self._places.keys()
        move_experts(self._optimizer, {self._places[layer].owners: after[layer] for layer in here})
        moved = {n: _moved(self.present[n].owners, each.owners) for n, each in after.items()}
        self._take_over(after)
        return moved

    def _take_over(self, after: Mapping[int, ExpertMap]) -> None:
        self.present |= after
        for layer, present in after.items():
            if layer in self._places:
                self._places[layer].set_map(present)

    @property
    def owners(self) -> Owners:
        """Its part of a checkpoint: those that are others than as a run begins."""
        return {
            str(layer): list(each.owners)
            for layer, each in self.present.items()
            if each.owners != ExpertMap.even(each.experts, each.ranks).owners
        }

    def load(self, stored: Owners) -> None:
        """Take over the owners of a checkpoint before its values are read, if they are of as many
        ranks; other layers begin anew. All ranks call it."""
        self._take_over(
            {
                layer: _stored(stored.get(str(layer)), each.experts, each.ranks)
                for layer, each in self.present.items()
            }
        )


def _moved(before: Sequence[int], after: Sequence[int]) -> int:
    """Experts that have other owners."""
    return sum(old != new for old, new in zip(before, after, strict=True))


def _stored(owners: Sequence[int] | None, experts: int, ranks: int) -> ExpertMap:
    begin = ExpertMap.even(experts, ranks)
    try:
        return begin if owners is None else ExpertMap(tuple(owners), begin.replicas)
    except ConfigError:  # they are of other ranks
        return begin


def _shared(config: Config, layout: Layout, mesh: ParallelMesh) -> dict[int, OwnerChoice]:
    """The choices of the first rank, which reads the pool and knows its device, on all ranks."""
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
        worth = Costs.of(units, speeds, layer).worth(config.experts.replan)
        found[layer] = [each.plain() for each in pool], worth
    return json.dumps(found)
