"""The section `context` of the configuration: how sequences are split over `parallel.cp`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megapipe.config.section import ExpectedText, Needs, OnResume, Section, needs
from megapipe.util.user_code import names_or_code

ALGORITHMS = ("ring", "double_ring", "helpers", "teams", "all_gather")
TURNED = ("ring", "double_ring")
"""Algorithms of ``context.algorithm`` with which ``context.backward_circulates`` has an effect:
keys or queries circulate around the ring in the backward."""


RING = Needs(
    "a ring of ranks (parallel.cp / context.ulysses is 1)",
    lambda config: config.parallel.cp != config.context.ulysses,
)
RING_THAT_TURNS = Needs(
    f"a ring of ranks and context.algorithm={' or '.join(TURNED)}",
    lambda config: RING.is_met(config) and config.context.algorithm in TURNED,
)
BOTH = Needs(
    "both a ring of ranks and context.ulysses above 1",
    lambda config: RING.is_met(config) and config.context.ulysses > 1,
)


class ContextConfig(Section):
    """How sequences are split over `parallel.cp` ranks, and how a rank attends to positions of
    other ranks (docs/context.md). No key changes a result."""

    ON_RESUME = OnResume.HARMLESS

    ulysses: int = Field(1, ge=1)
    """Ulysses degree (DeepSpeed-Ulysses): number of ranks over which heads are split during
    attention, while positions are gathered. The other factor of cp, cp / ulysses, is the number of
    ranks of a ring. parallel.cp: only Ulysses; 1: only a ring."""
    algorithm: Annotated[
        str,
        ExpectedText(f"one of {', '.join(ALGORITHMS)}, or a function of your own as module:name"),
        RING,
    ] = Field("ring", pattern=names_or_code(ALGORITHMS))
    """Algorithm of the ring. ring: keys and values circulate. double_ring: they circulate in rings
    of `inner_ring_size` consecutive ranks, and at the same time from ring to ring. helpers: idle
    ranks compute for others (position_split=contiguous). teams: in a grid of ranks, rows of
    `team_size` ranks share queries and columns share keys. all_gather: each rank gathers all keys
    and values at once. Or your own function as `module:name`, which returns a ring plan for a
    number of ranks (docs/context.md)."""
    position_split: Annotated[Literal["zigzag", "striped", "contiguous"], RING] = "zigzag"
    """Which positions of a sequence a rank of the ring holds. zigzag: a range from the beginning
    and an equally long one from the end, so that all ranks have the same work. striped: every n-th
    position of n ranks. contiguous: one range; the last rank has most work."""
    inner_ring_size: Annotated[int | None, needs("context.algorithm", "double_ring")] = Field(
        None, ge=2
    )
    """With algorithm=double_ring: number of consecutive ranks in an inner ring."""
    team_size: Annotated[int | None, needs("context.algorithm", "teams")] = Field(None, ge=2)
    """With algorithm=teams: number of ranks in a team; its square divides the ring's ranks."""
    backward_circulates: Annotated[Literal["auto", "keys", "queries"], RING_THAT_TURNS] = "auto"
    """Tensors that circulate around a ring in the backward, together with their gradients; auto:
    whichever has fewer bytes."""
    rank_order: Annotated[Literal["heads_first", "context_first"], BOTH] = "heads_first"
    """Which ranks are consecutive: those that split heads (heads_first), or those of a ring."""
