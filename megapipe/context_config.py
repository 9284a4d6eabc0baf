"""The section `context` of the configuration: how sequences are split over parallel.cp."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megapipe.section import Expected, Section
from megapipe.user_code import names_or_code

PLANS = ("ring", "double_ring", "helpers", "teams", "all_gather")
TURNED = ("ring", "double_ring")
"""Plans in whose backward either keys or queries go around (`travels`)."""


class ContextConfig(Section):
    """How sequences are split over `parallel.cp` ranks, and how these attend to each other's
    positions (docs/context.md). No key changes a result."""

    ulysses: int = Field(1, ge=1)
    """Ranks over which heads are split while attending, positions being gathered in exchange; the
    cp / ulysses others form a ring. parallel.cp: DeepSpeed-Ulysses; 1: a ring alone."""
    plan: Annotated[
        str, Expected(f"one of {', '.join(PLANS)}, or a function of your own as module:name")
    ] = Field("ring", pattern=names_or_code(PLANS))
    """Of the ring. ring: keys go around. double_ring: around rings of `inner` neighbours, and from
    ring to ring beside that. helpers: ranks that would have nothing to do compute for others
    (order=contiguous). teams: `team` ranks share their queries, columns of them their keys.
    all_gather: all keys at once. Or a function of your own as `module:name`, which gives a plan for
    a number of ranks (docs/context.md)."""
    order: Literal["zigzag", "striped", "contiguous"] = "zigzag"
    """Which positions a member of the ring holds. zigzag: a part from the beginning and the same
    from the end, so that all have the same work. striped: every n-th. contiguous: a piece, of which
    the last is the most work."""
    inner: int | None = Field(None, ge=2)
    """Neighbours in an inner ring of plan=double_ring."""
    team: int | None = Field(None, ge=2)
    """Ranks in a row of plan=teams; its square divides the ring."""
    travels: Literal["auto", "keys", "queries"] = "auto"
    """Bundles that go around a ring in the backward; auto: those that are fewer bytes."""
    ranks: Literal["heads_first", "context_first"] = "heads_first"
    """Which are neighbours: ranks that split heads, or those of a ring."""
