"""Bytes on the wire when experts change their owners, counted before a run: ``policy=migrate``.

It is no part of a step, so :func:`megapipe.plan.traffic.step_traffic` has none of it: it happens
after one step in ``experts.replan`` at most. How many experts move depends on what is chosen, so
this counts all of them: each rank gives away every expert that it owns, and gets as many.

Of each parameter, and of each kind of value that there is of it, masters and states, an exchange
takes values to ranks of the new owners and a second one to those of them whose slices have their
places (:mod:`megapipe.optim.moe.migration`); the weights are then gathered as after an update.
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
    """Collectives of a process at pipeline index `rank` where all experts of its layers move at
    once, of one whose slices have no padding, which sends most; nothing where experts stay."""
    if config.experts.policy != "migrate":
        return []
    found = _exchanges(config, layout, rank)
    return [exchange for exchange in found if exchange.members > 1]


def _exchanges(config: Config, layout: Layout, rank: int) -> Iterator[CollectiveTraffic]:
    kept = declaration(config.optimizer.rule).kept(config.optimizer.momentum)
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
