"""Which ranks have the experts of each layer: maps that follow what tokens choose.

Every ``experts.replan`` steps, after the update, ``experts.policy`` makes a map of each layer. It
goes by the choices of the step, which are in its totals: so all ranks that have a layer make the
same map, and nothing is exchanged for it. Rows are taken as spread evenly over ranks. A step
without an update leaves maps as they are.

Copies follow from the choices by which they were made and from nothing else of the past. So a
checkpoint has these choices, and a run that goes on makes the copies anew, in its own layout. Other
owners, of ``policy=migrate``, follow from those before them (:mod:`megapipe.train.migration`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from megapipe.checkpoint.regions import whole
from megapipe.checkpoint.writer import Piece
from megapipe.config import Config
from megapipe.distributed.mesh import ParallelMesh
from megapipe.experts.rows import evenly
from megapipe.layers.expert_places import ExpertPlaces
from megapipe.layers.experts import expert_layers
from megapipe.layers.moe_specs import placed_name
from megapipe.layout.expert_copies import ranks_of_a_node
from megapipe.layout.layout import Layout
from megapipe.layout.speeds import known_speeds
from megapipe.model.interface import StageModule
from megapipe.optim.optimizer import Optimizer
from megapipe.plan.expert_placement import Costs, Policy, by_balance, by_shadows
from megapipe.train.checkpoint_io import Weights
from megapipe.train.migration import Migration, Owners
from megapipe.train.routing import by_layer
from megapipe.words import plural, ranges


class ExpertMaps:
    """Those of the layers here, `places`, each made by its one of the `policies` every so many
    steps; `experts` has the number of experts of each layer of the model, and is empty where there
    are no copies. With a `migration` owners change instead."""

    def __init__(
        self,
        experts: Mapping[int, int],
        every: int = 1,
        policies: Mapping[int, Policy] | None = None,
        places: Mapping[int, ExpertPlaces] | None = None,
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
    ) -> ExpertMaps:
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

    def decide(self, step: int, told: Sequence[float]) -> str | None:
        """After the update of a step, counted from 0, of which all ranks together have `told`: if
        it is one after which maps are made, take over others. Returns a line for the user if they
        are others; all ranks call it."""
        if self.migration is not None:
            moved = self.migration.decide(step, told)
            return _line(step, "experts moved to other ranks", moved) if moved else None
        if not self._experts or (step + 1) % self._every:
            return None
        for layer, _, numbers, _ in by_layer(self._experts, told):
            self.counts[layer].copy_(torch.tensor(numbers, dtype=torch.int64))
        before = {layer: places.present for layer, places in self.places.items()}
        self._make()
        after = {layer: places.present for layer, places in self.places.items()}
        copied = {layer: len(set().union(*each.copies)) for layer, each in after.items()}
        return None if after == before else _line(step, "experts with copies", copied)

    def _make(self) -> None:
        for layer, places in self.places.items():
            totals, present = self.counts[layer].tolist(), places.present
            rows = evenly(totals, present.ranks)
            places.take(self._policies[layer](present, rows, totals))

    @property
    def owners(self) -> Owners:
        """Of experts that have moved; part of a checkpoint beside :meth:`pieces`."""
        return {} if self.migration is None else self.migration.owners

    def take_owners(self, stored: Owners) -> None:
        """Take over those of a checkpoint, before its values are read."""
        if self.migration is not None:
            self.migration.load(stored)

    def pieces(self) -> Iterator[Piece]:
        """Its part of a checkpoint, for one rank to write."""
        for layer, counts in self.counts.items():
            shape = tuple(counts.shape)
            yield Piece(placed_name(layer), shape, whole(shape), counts)

    def names(self) -> list[str]:
        """The entries of a checkpoint that :meth:`load` reads."""
        return [placed_name(layer) for layer in self.counts]

    def load(self, weights: Weights, names: Collection[str] = ()) -> None:
        """Make the maps of the choices that are among the `names` of what is there, and those of
        the beginning where none are. All ranks call it. Raises CheckpointError."""
        for layer, counts in self.counts.items():
            counts.zero_()
            if placed_name(layer) in names:
                weights.read_into(counts, placed_name(layer), whole(tuple(counts.shape)))
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
        return dict.fromkeys(layers, by_balance(ranks_of_a_node(config)))
    speeds = known_speeds(config)
    speeds = replace(speeds, tflops=float(mesh.share(str(speeds.tflops))))
    return {n: by_shadows(Costs.of(config, layout, speeds, n).times) for n in layers}
