"""The section `context` of the configuration: how sequences are split over parallel.cp."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megapipe.config.section import ExpectedText, Needs, OnResume, Section, needs
from megapipe.util.user_code import names_or_code

PLANS = ("ring", "double_ring", "helpers", "teams", "all_gather")
TURNED = ("ring", "double_ring")
"""Plans in whose backward either keys or queries go around (`travels`)."""


RING = Needs(
    "a ring of ranks (parallel.cp / context.ulysses is 1)",
    lambda config: config.parallel.cp != config.context.ulysses,
)
RING_THAT_TURNS = Needs(
    f"a ring of ranks and context.plan={' or '.join(TURNED)}",
    lambda config: RING.is_met(config) and config.context.plan in TURNED,
)
BOTH = Needs(
    "both a ring of ranks and context.ulysses above 1",
    lambda config: RING.is_met(config) and config.context.ulysses > 1,
)


class ContextConfig(Section):
    """How sequences are split over `parallel.cp` ranks, and how these attend to each other's
    positions (docs/context.md). No key changes a result."""

    ON_RESUME = OnResume.HARMLESS

    ulysses: int = Field(1, ge=1)
    """Ranks over which heads are split while attending, positions being gathered in exchange; the
    cp / ulysses others form a ring. parallel.cp: DeepSpeed-Ulysses; 1: a ring alone."""
    plan: Annotated[
        str,
        ExpectedText(f"one of {', '.join(PLANS)}, or a function of your own as module:name"),
        RING,
    ] = Field("ring", pattern=names_or_code(PLANS))
    """Of the ring. ring: keys go around. double_ring: around rings of `inner` neighbours, and from
    ring to ring beside that. helpers: ranks that would have nothing to do compute for others
    (order=contiguous). teams: `team` ranks share their queries, columns of them their keys.
    all_gather: all keys at once. Or a function of your own as `module:name`, which gives a plan for
    a number of ranks (docs/context.md)."""
    order: Annotated[Literal["zigzag", "striped", "contiguous"], RING] = "zigzag"
    """Which positions a member of the ring holds. zigzag: a part from the beginning and the same
    from the end, so that all have the same work. striped: every n-th. contiguous: a piece, of which
    the last is the most work."""
    inner: Annotated[int | None, needs("context.plan", "double_ring")] = Field(None, ge=2)
    """Neighbours in an inner ring of plan=double_ring."""
    team: Annotated[int | None, needs("context.plan", "teams")] = Field(None, ge=2)
    """Ranks in a row of plan=teams; its square divides the ring."""
    travels: Annotated[Literal["auto", "keys", "queries"], RING_THAT_TURNS] = "auto"
    """Bundles that go around a ring in the backward; auto: those that are fewer bytes."""
    ranks: Annotated[Literal["heads_first", "context_first"], BOTH] = "heads_first"
    """Which are neighbours: ranks that split heads, or those of a ring."""
