"""Expert maps that follow the load: which ranks have the experts of each layer.

Every ``experts.rebalance_every`` steps, after the update, the policy ``experts.rebalance`` makes a
map of each layer. It uses the choices of the step, which are in the step's totals. So all ranks
that have a layer make the same map without communication. Rows are assumed to be spread evenly over
ranks. A step without an update leaves the maps unchanged.

Replicas depend only on the choices from which they were made. So a checkpoint stores the choices,
and a resumed run makes the replicas from them, in its layout. Changed owners
(``experts.rebalance=migrate``) depend on earlier owners (:mod:`megapipe.train.moe.migration`).
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
from megapipe.experts.row_routing import evenly
from megapipe.experts.shadow import ShadowCosts
from megapipe.layers.moe.experts import expert_layers
from megapipe.layers.moe.replicas import ExpertReplicas
from megapipe.layers.moe.specs import replica_counts_name
from megapipe.layout.layout import Layout
from megapipe.layout.moe.rebalance_checks import ep_ranks_per_node
from megapipe.layout.speeds import known_speeds
from megapipe.model.interface import StageModule
from megapipe.optim.optimizer import Optimizer
from megapipe.plan.moe.placement import Costs, Policy, by_balance, by_shadows
from megapipe.plan.units import Units
from megapipe.text import plural, ranges
from megapipe.train.followers import Follower
from megapipe.train.moe.migration import Migration, Owners
from megapipe.train.moe.routing_stats import by_layer


class ExpertRebalancer(Follower):
    """Makes new expert maps every `every` steps. By local layer, `replicas` has the expert slots,
    and `policies` the policy that makes the map. `experts` has the number of experts of each MoE
    layer of the model; it is empty without expert replicas. With a `migration`, owners change
    instead of replicas."""

    name = "expert_owners"
    kind = dict[str, list[Count]]

    def __init__(
        self,
        experts: Mapping[int, int],
        every: int = 1,
        policies: Mapping[int, Policy] | None = None,
        replicas: Mapping[int, ExpertReplicas] | None = None,
        migration: Migration | None = None,
    ) -> None:
        self.migration = migration
        self._experts = experts
        self._every = every
        self._policies = policies or {}
        self.replicas = replicas or {}
        self.counts = {n: torch.zeros(e, dtype=torch.int64) for n, e in experts.items()}
        """Choice counts [experts] of each layer, on the host, in the step from which the current
        maps were made. They are zero at first; from zeros no policy makes replicas."""

    @classmethod
    def of(
        cls,
        config: Config,
        layout: Layout,
        modules: Iterable[StageModule],
        optimizer: Optimizer,
    ) -> ExpertRebalancer:
        """Build the rebalancer of a run. Collective: rank 0 measures the devices' speed and reads
        the pool of owner maps. Raises ConfigError on all ranks if rank 0 cannot."""
        if not config.experts.moves:
            return cls({})
        layers = [layer for module in modules for layer in expert_layers(module)]
        replicas = {layer.layer: layer.replicas for layer in layers if layer.replicas is not None}
        if not config.experts.copies:
            return cls({}, migration=Migration.of(config, layout, optimizer, replicas))
        policies = _policies(config, layout, replicas, optimizer.mesh)
        return cls(layout.model.experts(), config.experts.rebalance_every, policies, replicas)

    @property
    def empty(self) -> bool:
        """Whether experts never move."""
        return not self._experts and self.migration is None

    def after_update(self, step: int, routing: Sequence[float]) -> str | None:
        """Make new maps if due after this step; return a line to print if the maps changed."""
        if self.migration is not None:
            moved = self.migration.migrate_if_due(step, routing)
            return _line(step, "experts moved to other ranks", moved) if moved else None
        if not self._experts or (step + 1) % self._every:
            return None
        for layer, _, numbers, _ in by_layer(self._experts, routing):
            self.counts[layer].copy_(torch.tensor(numbers, dtype=torch.int64))
        before = {layer: replicas.map for layer, replicas in self.replicas.items()}
        self._make()
        after = {layer: replicas.map for layer, replicas in self.replicas.items()}
        copied = {layer: len(set().union(*each.replicas)) for layer, each in after.items()}
        return None if after == before else _line(step, "experts with replicas", copied)

    def _make(self) -> None:
        for layer, replicas in self.replicas.items():
            totals, present = self.counts[layer].tolist(), replicas.map
            rows = evenly(totals, present.ranks)
            replicas.set_map(self._policies[layer](present, rows, totals))

    def state(self) -> JsonValue:
        """Return the owners of experts that have moved; None if none have."""
        owners = {} if self.migration is None else self.migration.owners
        return {layer: list[JsonValue](own) for layer, own in owners.items()} or None

    def load(self, stored: Owners | None) -> None:
        """Load the owners of a checkpoint, before the checkpoint's tensors are read."""
        if self.migration is not None:
            self.migration.load(stored or {})

    def tensors(self) -> Iterator[Piece]:
        """Yield the choice counts from which the current maps were made."""
        for layer, counts in self.counts.items():
            shape = tuple(counts.shape)
            yield Piece(replica_counts_name(layer), shape, whole(shape), counts)

    def entries(self) -> list[str]:
        """Return the names of the choice counts in a checkpoint."""
        return [replica_counts_name(layer) for layer in self.counts]

    def read(self, weights: TensorReader, names: Collection[str]) -> None:
        """Make the maps from the stored choice counts, or the initial maps if the counts are not
        among the entries `names`. Collective. Raises CheckpointError."""
        for layer, counts in self.counts.items():
            counts.zero_()
            if replica_counts_name(layer) in names:
                weights.read_into(counts, replica_counts_name(layer), whole(tuple(counts.shape)))
        self._make()


def _line(step: int, what: str, numbers: Mapping[int, int]) -> str:
    """Format a line on experts after a step; `numbers` has the number of experts by layer."""
    where = f"{plural('layer', len(numbers))} {ranges(numbers)}"
    return f"step {step + 1}: {what}: {sum(numbers.values()):,}, in {where}"


def _policies(
    config: Config, layout: Layout, layers: Iterable[int], mesh: ParallelMesh
) -> dict[int, Policy]:
    """Make the rebalancing policy of each layer."""
    if config.experts.rebalance == "balance":
        return dict.fromkeys(layers, by_balance(ep_ranks_per_node(config)))
    measured: dict[int, ShadowCosts] = {}
    if mesh.rank == 0:
        speeds, units = known_speeds(config), Units(config, layout)
        measured = {n: Costs.of(units, speeds, n).times for n in layout.model.experts()}
    times = json.loads(mesh.share(json.dumps(measured)))
    return {n: by_shadows(ShadowCosts(*times[str(n)])) for n in layers}
