"""Schedules for the tests: every registered one at every size, and those without a name."""

from hypothesis import strategies as st

from megapipe.schedule.generators import accepts, build, forward_only, gpipe_on, names
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import Placement, loop, vee


def all_small(ranks: int, microbatches: int) -> list[Schedule]:
    """All registered schedules, all chunks up to 3 and all groups, up to the given sizes."""
    return [
        build(name, ranks=p, microbatches=m, chunks=v, group=g)
        for name in names()
        for p in range(1, ranks + 1)
        for m in range(1, microbatches + 1)
        for v in (range(1, 4) if "chunks" in accepts(name) else [1])
        for g in ([None, *range(1, m + 1)] if "group" in accepts(name) else [None])
    ]


@st.composite
def registered(draw, max_ranks: int = 6, max_microbatches: int = 12) -> Schedule:
    name = draw(st.sampled_from(names()))
    microbatches = draw(st.integers(1, max_microbatches))
    chunks = draw(st.integers(1, 4)) if "chunks" in accepts(name) else 1
    group = None
    if "group" in accepts(name):
        group = draw(st.none() | st.integers(1, microbatches))
    return build(
        name,
        ranks=draw(st.integers(1, max_ranks)),
        microbatches=microbatches,
        chunks=chunks,
        group=group,
    )


@st.composite
def placements(draw) -> Placement:
    """Loop, V, and any map of stages to ranks."""
    ranks = draw(st.integers(1, 4))
    table = draw(st.lists(st.integers(0, ranks - 1), max_size=5))
    any_order = draw(st.permutations([*range(ranks), *table]))
    return draw(
        st.sampled_from([loop(ranks, 2), vee(ranks), Placement(ranks, (tuple(any_order),))])
    )


def schedules() -> st.SearchStrategy[Schedule]:
    """Valid schedules of every kind on every placement."""
    unnamed = st.builds(
        lambda make, placement, m: make(placement, m),
        st.sampled_from([forward_only, gpipe_on]),
        placements(),
        st.integers(1, 5),
    )
    return registered(4, 6) | unnamed
