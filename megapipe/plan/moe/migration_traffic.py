"""Bytes on the wire when experts change their owners, counted before a run: ``policy=migrate``.

:func:`megapipe.plan.traffic.step_traffic` does not include these bytes: experts move between steps,
at most once in ``experts.rebalance_every`` steps. How many experts move depends on routing, so the
count assumes that all do: a rank sends every expert that it owns, and receives as many.

For each parameter, and for its masters and each of its states, one exchange sends the values to the
new owners' ranks, and a second one sends them to the ranks whose shards contain them
(:mod:`megapipe.optim.moe.migration`). The weights are then gathered as after an update.
"""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.config.config import Config
from megapipe.config.update_rules import declaration
from megapipe.layout.buckets import process_buckets
from megapipe.layout.layout import Layout
from megapipe.plan.memory import kept_bytes
from megapipe.plan.traffic import CollectiveTraffic
from megapipe.util.dtypes import DTYPE_BYTES


def migration_traffic(config: Config, layout: Layout, rank: int) -> list[CollectiveTraffic]:
    """Return the collectives of a process at pipeline index `rank` if all its experts move at once.
    The bytes are an upper bound, for shards without padding. Return [] if experts never move."""
    if config.experts.rebalance != "migrate":
        return []
    found = _exchanges(config, layout, rank)
    return [exchange for exchange in found if exchange.members > 1]


def _exchanges(config: Config, layout: Layout, rank: int) -> Iterator[CollectiveTraffic]:
    kept = declaration(config.optimizer.rule).kept(config.optimizer.rule_options)
    kinds, size = 1 + len(kept), DTYPE_BYTES[config.model.dtype]
    for bucket in process_buckets(config, layout, rank):
        if not bucket.over_ep:
            continue
        shard = bucket.shard
        values = sum(spec.local_numel(1, *layout.ep_sizes) for spec in bucket.parameters)
        calls = kinds * len(bucket.parameters)
        amount = min(values, bucket.numel // shard.members) * kept_bytes(config, layout)
        for axis, members in (("ep", layout.ep_ranks), (shard.axis, shard.members)):
            yield CollectiveTraffic(
                axis, "all_to_all", "owners", calls, amount, members, whole=False
            )
        if layout.replicas.zero < 3:
            whole = bucket.numel * size
            yield CollectiveTraffic(shard.axis, "all_gather", "weights", 1, whole, shard.members)
