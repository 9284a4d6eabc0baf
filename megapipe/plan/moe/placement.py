"""Scores policies that move or replicate experts, with recorded choices: load, bytes, seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from megapipe.config.config import Config
from megapipe.experts.balance import balance
from megapipe.experts.map import ExpertMap
from megapipe.experts.pool import Trace, largest_load, migrate
from megapipe.experts.row_routing import TokensPerExpert, evenly, tokens_per_rank
from megapipe.experts.shadow import ShadowCosts, shadow
from megapipe.experts.traffic import ExpertBytes, migration, most, replica_traffic
from megapipe.layers.moe.specs import wire_bytes
from megapipe.layout.buckets import process_buckets
from megapipe.layout.layout import Layout
from megapipe.layout.moe.rebalance_checks import ep_ranks_per_node
from megapipe.layout.p2p import speed
from megapipe.layout.speeds import Speeds
from megapipe.model.partition import StageSpec
from megapipe.plan.kernel_time import KernelTime
from megapipe.plan.memory import state_bytes
from megapipe.plan.moe.moe_layer_time import Products
from megapipe.plan.units import Units
from megapipe.util.dtypes import DTYPE_BYTES, main_bytes

Policy = Callable[[ExpertMap, TokensPerExpert, Sequence[int]], ExpertMap]
"""Function (current map, rows of each expert by rank, their sums over ranks) -> next map."""

POLICIES = ("shadow", "balance", "migrate")


def by_shadows(times: ShadowCosts) -> Policy:
    return lambda present, rows, _: shadow(present, rows, times)


def by_balance(node: int) -> Policy:
    """Return the policy balance, for `node` expert-parallel ranks per node."""
    return lambda present, rows, _: balance(present, rows, node)


class PlacementScore(NamedTuple):
    """Score of a policy in a layer, as a mean over the recorded steps except the first."""

    layer: int
    policy: str
    before: float
    """Largest load of a rank, relative to the mean load, with the run's initial map."""
    after: float
    """Largest load with the policy's maps; each map is chosen from the previous recorded step."""
    copies: float
    """Mean number of expert replicas on all ranks together."""
    moved: int
    """Number of times that an expert changed its owner, over all steps."""
    bytes: float
    """Bytes per step of the rank that sends or receives most: replicas' weights and gradients, and
    moved experts."""
    seconds: float
    """Seconds that `bytes` take at the speed of the link."""


class Costs(NamedTuple):
    """Bytes and times with which maps of a layer are scored."""

    sizes: ExpertBytes
    products: Products
    edp: int
    """Number of data-parallel replicas of the experts."""
    trip: float
    shadow: float
    """Seconds that a replica on every rank costs, as in :class:`ShadowCosts`."""
    speeds: Speeds
    rate: float
    """Bytes per second of the slowest link between expert-parallel ranks."""
    node: int
    """Number of expert-parallel ranks per node."""

    @classmethod
    def of(cls, units: Units, speeds: Speeds, layer: int) -> Costs:
        """Compute the costs for a layout. Recorded rows are sums over all data-parallel replicas of
        the experts, so a row's time is divided by the number of these replicas."""
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
        row = wire_bytes(config.experts.wire_dtype, model.hidden, size)
        return cls(
            sizes=sizes,
            products=products,
            edp=layout.edp,
            trip=(row + main / 2) / rate / layout.edp,
            shadow=(layout.ep - 1) * (sizes.weights + sizes.gradients) / rate,
            speeds=speeds,
            rate=rate,
            node=ep_ranks_per_node(config),
        )

    @property
    def times(self) -> ShadowCosts:
        """Times per row; raises :class:`ConfigError` if the device's speed is unknown."""
        seconds = KernelTime(self.speeds).of(self.products.kernels).seconds
        return ShadowCosts(seconds / self.products.rows / self.edp, self.trip, self.shadow)

    def worth(self, steps: float) -> float:
        """Return the number of rows per step that take as long as moving an expert once in `steps`
        steps. Raises :class:`ConfigError` if the device's speed is unknown."""
        seconds = (self.sizes.weights + self.sizes.states) / self.rate
        return seconds / ((3 * self.times.row + 4 * self.times.trip) * steps)


def _owners_of_slices(config: Config, layout: Layout, layer: int) -> int:
    """Return the number of ranks that update different shards of the same experts."""
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
    """Score policies on recorded rows per expert (`trace`, by step). Each step uses the map that
    was chosen from the previous step's rows; the first one uses `begin`. Rows are assumed to come
    evenly from all ranks. Raises :class:`ConfigError` if the device's speed is unknown, unless the
    policy is balance."""
    steps, every = [trace[step] for step in sorted(trace)], steps_between(trace)

    def start_and_policy(name: str) -> tuple[ExpertMap, Policy]:
        if name == "shadow":
            return begin, by_shadows(costs.times)
        if name == "balance":
            return begin, by_balance(costs.node)
        worth = costs.worth(every)
        without = replace(begin, slots=0)
        return without, lambda present, _, totals: migrate(present, pool, totals, worth)

    return [_judged(layer, name, steps, every, *start_and_policy(name), costs) for name in policies]


def steps_between(trace: Mapping[int, Sequence[int]]) -> float:
    """Return the mean number of steps from one recorded step to the next."""
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
