"""Which ranks have the experts of each layer: maps that follow what tokens choose.

Every ``experts.replan`` steps, after the update, ``experts.policy`` makes a map of each layer. It
goes by the choices of the step, which are in its totals: so all ranks that have a layer make the
same map, and nothing is exchanged for it. Rows are taken as spread evenly over ranks. A step
without an update leaves maps as they are.

Copies follow from the choices by which they were made and from nothing else of the past. So a
checkpoint has these choices, and a run that goes on makes the copies anew, in its own layout. Other
owners, of ``policy=migrate``, follow from those before them (:mod:`megapipe.train.moe.migration`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from pydantic import JsonValue

from megapipe.checkpoint.manifest import Count
from megapipe.checkpoint.regions import whole
from megapipe.checkpoint.stateful import TensorReader
from megapipe.checkpoint.writer import Piece
from megapipe.config.config import Config
from megapipe.distributed.mesh import ParallelMesh
from megapipe.experts.rows import evenly
from megapipe.experts.shadow import ShadowCosts
from megapipe.layers.moe.experts import expert_layers
from megapipe.layers.moe.replicas import ExpertReplicas
from megapipe.layers.moe.specs import replica_counts_name
from megapipe.layout.layout import Layout
from megapipe.layout.moe.replicas import ep_ranks_per_node
from megapipe.layout.speeds import known_speeds
from megapipe.model.interface import StageModule
from megapipe.optim.optimizer import Optimizer
from megapipe.plan.moe.placement import Costs, Policy, by_balance, by_shadows
from megapipe.plan.units import Units
from megapipe.train.followers import Follower
from megapipe.train.moe.migration import Migration, Owners
from megapipe.train.moe.routing import by_layer
from megapipe.words import plural, ranges


class ExpertRebalancer(Follower):
    """Those of the layers here, `places`, each made by its one of the `policies` every so many
    steps; `experts` has the number of experts of each layer of the model, and is empty where there
    are no copies. With a `migration` owners change instead."""

    name = "owners"
    kind = dict[str, list[Count]]

    def __init__(
        self,
        experts: Mapping[int, int],
        every: int = 1,
        policies: Mapping[int, Policy] | None = None,
        places: Mapping[int, ExpertReplicas] | None = None,
        migration: Migration | None = None,
    ) -> None:
        self.migration = migration
        self._experts = experts
        self._every = every
        self._policies = policies or {}
        self.places = places or {}
        self.counts = {n: torch.zeros(e, dtype=torch.int64) for n, e in experts.items()}
        """By layer, [experts], on the host: the choices of the step by which the present maps were
        made; none at first, by which no policy makes copies."""

    @classmethod
    def of(
        cls,
        config: Config,
        layout: Layout,
        modules: Iterable[StageModule],
        optimizer: Optimizer,
    ) -> ExpertRebalancer:
        """Those of a run. All ranks call it, as that of rank 0 says how fast devices are, and reads
        the pool of owners; raises ConfigError on all where it cannot."""
        if not config.experts.moves:
            return cls({})
        layers = [layer for module in modules for layer in expert_layers(module)]
        places = {layer.layer: layer.places for layer in layers if layer.places is not None}
        if not config.experts.copies:
            return cls({}, migration=Migration.of(config, layout, optimizer, places))
        policies = _policies(config, layout, places, optimizer.mesh)
        return cls(layout.model.experts(), config.experts.replan, policies, places)

    @property
    def empty(self) -> bool:
        """Whether experts stay where they are."""
        return not self._experts and self.migration is None

    def after_update(self, step: int, routing: Sequence[float]) -> str | None:
        """If the step is one after which maps are made, take over others. Returns a line for the
        user if they are others."""
        if self.migration is not None:
            moved = self.migration.migrate_if_due(step, routing)
            return _line(step, "experts moved to other ranks", moved) if moved else None
        if not self._experts or (step + 1) % self._every:
            return None
        for layer, _, numbers, _ in by_layer(self._experts, routing):
            self.counts[layer].copy_(torch.tensor(numbers, dtype=torch.int64))
        before = {layer: places.map for layer, places in self.places.items()}
        self._make()
        after = {layer: places.map for layer, places in self.places.items()}
        copied = {layer: len(set().union(*each.replicas)) for layer, each in after.items()}
        return None if after == before else _line(step, "experts with copies", copied)

    def _make(self) -> None:
        for layer, places in self.places.items():
            totals, present = self.counts[layer].tolist(), places.map
            rows = evenly(totals, present.ranks)
            places.set_map(self._policies[layer](present, rows, totals))

    def state(self) -> JsonValue:
        """The owners of experts that have moved; None where none has."""
        owners = {} if self.migration is None else self.migration.owners
        return {layer: list[JsonValue](own) for layer, own in owners.items()} or None

    def load(self, stored: Owners | None) -> None:
        """Take over the owners of a checkpoint, before its values are read."""
        if self.migration is not None:
            self.migration.load(stored or {})

    def tensors(self) -> Iterator[Piece]:
        """Yield the choices by which the maps were made."""
        for layer, counts in self.counts.items():
            shape = tuple(counts.shape)
            yield Piece(replica_counts_name(layer), shape, whole(shape), counts)

    def entries(self) -> list[str]:
        """Return the names of their entries."""
        return [replica_counts_name(layer) for layer in self.counts]

    def read(self, weights: TensorReader, names: Collection[str]) -> None:
        """Make the maps of the choices that are among the `names` of what is there, and those of
        the beginning where none are. All ranks call it. Raises CheckpointError."""
        for layer, counts in self.counts.items():
            counts.zero_()
            if replica_counts_name(layer) in names:
                weights.read_into(counts, replica_counts_name(layer), whole(tuple(counts.shape)))
        self._make()


def _line(step: int, what: str, numbers: Mapping[int, int]) -> str:
    """A line on experts after a step, with how many they are in each layer."""
    where = f"{plural('layer', len(numbers))} {ranges(numbers)}"
    return f"step {step + 1}: {what}: {sum(numbers.values()):,}, in {where}"


def _policies(
    config: Config, layout: Layout, layers: Iterable[int], mesh: ParallelMesh
) -> dict[int, Policy]:
    """Of each layer."""
    if config.experts.policy == "balance":
        return dict.fromkeys(layers, by_balance(ep_ranks_per_node(config)))
    told: dict[int, ShadowCosts] = {}
    if mesh.rank == 0:
        speeds, units = known_speeds(config), Units(config, layout)
        told = {n: Costs.of(units, speeds, n).times for n in layout.model.experts()}
    times = json.loads(mesh.share(json.dumps(told)))
    return {n: by_shadows(ShadowCosts(*times[str(n)])) for n in layers}
