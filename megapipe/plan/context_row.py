"""A context-parallel option as a row of a table."""

from __future__ import annotations

from megapipe.plan.context_options import ContextCost, ContextOption
from megapipe.plan.memory_fit import milliseconds, size_text


def row(option: ContextOption) -> dict[str, str]:
    """Return the cells of an option's row, by heading. Only a :class:`ContextCost` has times."""
    context, in_ring = option.context, option.rounds > 1
    found = {
        "algorithm": option.name if in_ring else "-",
        "position_split": context.position_split if in_ring else "-",
        "ulysses": str(context.ulysses),
        "rank_order": context.rank_order if in_ring and context.ulysses > 1 else "-",
        "in node": size_text(option.intra_node_bytes),
        "to others": size_text(option.inter_node_bytes),
        "rounds": str(option.rounds),
        "slowest/mean": f"{option.work:.2f}",
    }
    if isinstance(option, ContextCost):
        found["ms"] = milliseconds(option.seconds)
        found["exposed"] = f"{sum(option.exposed.values()) / option.seconds:.0%}"
    return {**found, "KV shards": str(option.bundles)}
