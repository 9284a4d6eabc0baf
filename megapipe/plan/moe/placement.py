"""Maps of experts for a run, judged by recorded counts: loads of ranks, bytes and seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from megapipe.config.config import Config
from megapipe.experts.balance import balance
from megapipe.experts.map import ExpertMap
from megapipe.experts.pool import Trace, largest_load, migrate
from megapipe.experts.rows import TokensPerExpert, evenly, tokens_per_rank
from megapipe.experts.shadow import ShadowCosts, shadow
from megapipe.experts.traffic import ExpertBytes, migration, most, replica_traffic
from megapipe.layers.moe.specs import wire_bytes
from megapipe.layout.buckets import process_buckets
from megapipe.layout.layout import Layout
from megapipe.layout.links import speed
from megapipe.layout.moe.replicas import ep_ranks_per_node
from megapipe.layout.speeds import Speeds
from megapipe.model.partition import StageSpec
from megapipe.plan.memory import state_bytes
from megapipe.plan.moe.time import Products
from megapipe.plan.units import Units
from megapipe.util.dtypes import DTYPE_BYTES, main_bytes

Policy = Callable[[ExpertMap, TokensPerExpert, Sequence[int]], ExpertMap]
"""The present map, the rows of each rank for each expert, and their sums -> the next map."""

POLICIES = ("shadow", "balance", "migrate")


def by_shadows(times: ShadowCosts) -> Policy:
    return lambda present, rows, _: shadow(present, rows, times)


def by_balance(node: int) -> Policy:
    """With so many ranks on a node."""
    return lambda present, rows, _: balance(present, rows, node)


class PlacementScore(NamedTuple):
    """A policy in a layer, on average over the recorded steps but the first."""

    layer: int
    policy: str
    before: float
    """The largest load of a rank by the mean, with the experts as a run begins."""
    after: float
    """The same with the maps that the policy has chosen, each by the counts recorded before."""
    copies: float
    """Of all ranks together."""
    moved: int
    """Experts that have changed their rank, in all steps together."""
    bytes: float
    """In a step, of the rank that sends or receives most: copies, their gradients, and experts that
    move."""
    seconds: float
    """That this takes at the speed of the link."""


class Costs(NamedTuple):
    """Bytes and times by which maps of a layer are judged."""

    sizes: ExpertBytes
    flops: float
    """Of a row, by the copies of the experts."""
    trip: float
    shadow: float
    """As :class:`ShadowCosts` has them."""
    speeds: Speeds
    rate: float
    """Bytes per second of the slowest link between ranks that share experts."""
    node: int
    """ep ranks of a node."""

    @classmethod
    def of(cls, units: Units, speeds: Speeds, layer: int) -> Costs:
        """Those of a layout. Rows are counted over all copies of the experts, so a row takes its
        part of the time."""
        config, layout, products = units.config, units.layout, Products.of(units, layer)
        spec, model = StageSpec(False, range(layer, layer + 1), False), config.model
        each = layout.model.experts()[layer] // layout.ep
        parameters = (p for p in layout.model.parameters(spec) if p.over_ep)
        numel = sum(p.local_numel(1, *layout.ep_sizes) for p in parameters) // each
        size, main = DTYPE_BYTES[model.dtype], main_bytes(model.dtype)
        owners = _owners_of_slices(config, layout, layer)
        sizes = ExpertBytes(
            numel * size, numel * main, -(-numel * state_bytes(config, layout) // owners)
        )
        rate = 1e9 * speed(config, layout.ep_ranks)
        row = wire_bytes(config.experts.codec, model.hidden, size)
        return cls(
            sizes=sizes,
            flops=products.flops / products.rows / layout.edp,
            trip=(row + main / 2) / rate / layout.edp,
            shadow=(layout.ep - 1) * (sizes.weights + sizes.gradients) / rate,
            speeds=speeds,
            rate=rate,
            node=ep_ranks_per_node(config),
        )

    @property
    def times(self) -> ShadowCosts:
        """Raises :class:`ConfigError` if the speed of the device is not known."""
        return ShadowCosts(self.flops / self.speeds.reached, self.trip, self.shadow)

    def worth(self, steps: float) -> float:
        """Rows whose time it takes to move an expert, if the next move is so many steps later.
        Raises :class:`ConfigError` if the speed of the device is not known."""
        seconds = (self.sizes.weights + self.sizes.states) / self.rate
        return seconds / ((3 * self.times.row + 4 * self.times.trip) * steps)


def _owners_of_slices(config: Config, layout: Layout, layer: int) -> int:
    """Ranks that update different parts of the same experts."""
    (stage,) = (n for n, spec in enumerate(layout.stage_layers) if layer in spec.layers)
    rank = 0 if layout.in_process else layout.schedule.placement.rank_of(stage)
    buckets = process_buckets(config, layout, rank)
    (shard,) = {
        bucket.shard.members for bucket in buckets if bucket.over_ep and bucket.stage == stage
    }
    return shard


def score_placements(
    layer: int,
    trace: Mapping[int, Sequence[int]],
    begin: ExpertMap,
    pool: Sequence[ExpertMap],
    costs: Costs,
    policies: Sequence[str] = POLICIES,
) -> list[PlacementScore]:
    """Policies, on the rows of each expert by step: each step is computed with the map for which
    the one before is the reason, the first as a run begins. Rows are taken as spread evenly over
    the ranks that they are from. All but balance go by the speed of the device; raises
    :class:`ConfigError` if it is not known."""
    steps, every = [trace[step] for step in sorted(trace)], steps_between(trace)

    def way(name: str) -> tuple[ExpertMap, Policy]:
        if name == "shadow":
            return begin, by_shadows(costs.times)
        if name == "balance":
            return begin, by_balance(costs.node)
        worth = costs.worth(every)
        without = replace(begin, slots=0)
        return without, lambda present, _, totals: migrate(present, pool, totals, worth)

    return [_judged(layer, name, steps, every, *way(name), costs) for name in policies]


def steps_between(trace: Mapping[int, Sequence[int]]) -> float:
    """Steps from one that is recorded to the next, on average."""
    return (max(trace) - min(trace)) / (len(trace) - 1)


def _judged(
    layer: int,
    name: str,
    steps: Trace,
    every: float,
    present: ExpertMap,
    policy: Policy,
    costs: Costs,
) -> PlacementScore:
    begin, before, after = present, 0.0, 0.0
    had, moved, sent = 0, 0, 0.0
    for last, totals in pairwise(steps):
        old = present
        present = policy(old, evenly(last, old.ranks), last)
        mean = sum(totals) / old.ranks
        before += largest_load(begin, totals) / mean
        after += max(tokens_per_rank(present, evenly(totals, old.ranks), costs.node)) / mean
        had += sum(map(len, present.replicas))
        moved += sum(a != b for a, b in zip(old.owners, present.owners, strict=True))
        sent += most(replica_traffic(present, costs.sizes)) * every
        sent += most(migration(old, present, costs.sizes))
    number = len(steps) - 1
    of_step = sent / every / number
    return PlacementScore(
        layer=layer,
        policy=name,
        before=before / number,
        after=after / number,
        copies=had / number,
        moved=moved,
        bytes=of_step,
        seconds=of_step / costs.rate,
    )
