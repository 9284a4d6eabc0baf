"""A way to attend over split positions, as text."""

from __future__ import annotations

from megapipe.plan.context_choice import ContextCost, ContextOption
from megapipe.plan.demand import milliseconds, size_text


def row(way: ContextOption) -> dict[str, str]:
    """Its row in a table, by headings; a time only where that is known."""
    context, in_ring = way.context, way.rounds > 1
    found = {
        "plan": way.name if in_ring else "-",
        "order": context.order if in_ring else "-",
        "ulysses": str(context.ulysses),
        "ranks": context.ranks if in_ring and context.ulysses > 1 else "-",
        "in node": size_text(way.intra_node_bytes),
        "to others": size_text(way.inter_node_bytes),
        "rounds": str(way.rounds),
        "slowest/mean": f"{way.work:.2f}",
    }
    if isinstance(way, ContextCost):
        found["ms"] = milliseconds(way.seconds)
        found["exposed"] = f"{sum(way.exposed.values()) / way.seconds:.0%}"
    return {**found, "bundles": str(way.bundles)}
