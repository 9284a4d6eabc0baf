"""Schedules for the tests: every registered one at every size, and those without a name."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any
from unittest import mock

from hypothesis import assume
from hypothesis import strategies as st

from megapipe.errors import ScheduleError
from megapipe.schedule.generators import accepts, build, forward_only, gpipe_on, names
from megapipe.schedule.ir import Kind, Op, Schedule, pack, packed
from megapipe.schedule.placement import Placement, loop, mirrored, replicated, vee, wave
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.wavefront import Round, Wavefront
from tests.unit.schedule.schedule_referee import deal

WALKS: dict[str, dict[str, int]] = {
    "a loop": {"RANKS": 1 << 30},
    "rounds of all ranks": {"RANKS": 1, "WIDTH": 0},
    "some rounds, then a loop": {"RANKS": 1, "WIDTH": 2, "FILL": 3},
}
"""How few ranks walk through their operations, and how many do: settings of
:mod:`megapipe.schedule.wavefront`."""


@contextmanager
def counted_rounds() -> Iterator[list[int]]:
    """Count the operations that each round of all ranks runs, within the context."""
    counts: list[int] = []
    rounds = Wavefront.rounds

    def counting(front: Wavefront, made: Any) -> Iterator[Round]:
        for each in rounds(front, made):
            counts.append(len(each.indices))
            yield each

    with mock.patch.object(Wavefront, "rounds", counting):
        yield counts


REPLICAS = [[2], [2, 1], [1, 2], [3, 1], [2, 2], [1, 2, 1]]
"""Numbers of replicas of each stage, on 2 to 4 ranks."""


def options_of(name: str, microbatches: int) -> list[dict[str, Any]]:
    """Return small values of every option that a registered schedule has. Chunks and slices are not
    both many, as the work grows with their product."""
    small = {
        "chunks": (1, 2, 3),
        "microbatch_group_size": (None, *range(1, microbatches + 1)),
        "slices": (1, 2, 3),
        "chimera_pairs": (1, 2),
        "extra_warmup": (None, 1, 2),
        "ranks_per_stage": (None, *REPLICAS),
    }
    own = {what: values for what, values in small.items() if what in accepts(name)}
    every = [dict(zip(own, values, strict=True)) for values in product(*own.values())]
    return [each for each in every if each.get("chunks", 1) + each.get("slices", 1) <= 4]


def all_small(name: str, ranks: int, microbatches: int) -> Iterator[Schedule]:
    """Yield a registered schedule with all options at all sizes up to these, without those that it
    refuses."""
    for p, m in product(range(1, ranks + 1), range(1, microbatches + 1)):
        for options in options_of(name, m):
            try:
                schedule = build(name, ranks=p, microbatches=m, **options)
            except ScheduleError:
                continue
            assert schedule.placement.ranks == p
            assert schedule.whole_microbatches == m
            yield schedule


@st.composite
def registered(draw, max_ranks: int = 6, max_microbatches: int = 12) -> Schedule:
    name = draw(st.sampled_from(names()))
    ranks = draw(st.integers(1, max_ranks))
    microbatches = draw(st.integers(1, max_microbatches))
    options = {
        "chunks": draw(st.none() | st.integers(1, 4)),
        "microbatch_group_size": draw(st.none() | st.integers(1, microbatches)),
        "slices": draw(st.none() | st.integers(1, 4)),
        "chimera_pairs": draw(st.none() | st.integers(1, 2)),
        "ranks_per_stage": draw(st.none() | st.sampled_from(REPLICAS)),
    }
    given = {what: value for what, value in options.items() if what in accepts(name)}
    try:
        return build(name, ranks=ranks, microbatches=microbatches, **given)
    except ScheduleError:
        pass
    try:
        return build(name, ranks=ranks, microbatches=microbatches)
    except ScheduleError:
        assume(False)


@st.composite
def placements(draw, directions: bool = False) -> Placement:
    """Draw a loop, V, wave, or any map of stages to ranks; with directions, some have two."""
    ranks = draw(st.integers(1, 4))
    table = draw(st.lists(st.integers(0, ranks - 1), max_size=3))
    rows = [tuple(draw(st.permutations([*range(ranks), *table]))) for _ in range(2)]
    one = [loop(ranks, 2), vee(ranks), wave(min(ranks, 2), 2), Placement(ranks, tuple(rows[:1]))]
    two = [mirrored(loop(ranks)), Placement(ranks, tuple(rows)), replicated([ranks, 2])]
    return draw(st.sampled_from([*one, *two] if directions else one))


@st.composite
def dealt(draw) -> Schedule:
    """Draw any valid order, of schedules with all that a schedule can have."""
    placement = draw(placements(directions=True))
    whole = draw(st.integers(1, 3))
    halves = draw(st.lists(st.booleans(), min_size=whole, max_size=whole))
    sizes = [Fraction(1, 1 + half) for half in halves for _ in range(1 + half)]
    directions = len(placement.table)
    direction = [draw(st.integers(0, directions - 1)) for half in halves for _ in range(1 + half)]
    slices = draw(st.sampled_from([1, 1, 2, 3]))
    recompute = draw(st.frozensets(st.integers(0, placement.stages - 1)))
    empty = Schedule(
        "dealt",
        placement,
        microbatches=len(sizes),
        ops=(packed(()),) * placement.ranks,
        forward_only=draw(st.integers(0, 5)) == 0,
        direction=tuple(direction) if directions > 1 else None,
        slices=slices,
        sizes=tuple(sizes) if any(halves) else None,
        recompute=recompute if slices == 1 and draw(st.booleans()) else frozenset(),
    )
    return deal(empty, random.Random(draw(st.integers(0, 2**32))))


@st.composite
def references(draw) -> Schedule:
    """Draw one of the plain orders that every placement has."""
    placement = draw(placements(directions=True))
    microbatches = draw(st.integers(1, 5))
    if draw(st.booleans()):
        return forward_only(placement, microbatches)
    directions = st.integers(0, len(placement.table) - 1)
    of_each = {"min_size": microbatches, "max_size": microbatches}
    half = st.sampled_from([Fraction(1, 2), Fraction(1)])
    return gpipe_on(
        placement,
        microbatches,
        direction=draw(st.none() | st.lists(directions, **of_each).map(tuple)),
        slices=draw(st.integers(1, 3)),
        sizes=draw(st.none() | st.lists(half, **of_each).map(tuple)),
    )


def schedules() -> st.SearchStrategy[Schedule]:
    """Return a strategy of valid schedules of every kind on every placement."""
    return registered(4, 6) | references() | dealt()


def of(text: str, microbatches: int = 1, placement: Placement | None = None, **fields) -> Schedule:
    """Build a schedule from rows of cells such as ``0F0 0F1+0B0/1F0 1B0``; ``+`` joins a cell with
    the next.

    Unlike a file's, its sizes are those given; its placement, unless given, has each stage where
    its first cell stands.
    """
    lists = [
        [
            cell_of(cell)._replace(joined=joined)
            for group in row.split()
            for cell, joined in joined_cells(group)
        ]
        for row in text.split("/")
    ]
    if placement is None:
        home = {op.stage: rank for rank, ops in reversed([*enumerate(lists)]) for op in ops}
        placement = Placement(len(lists), (tuple(home[stage] for stage in sorted(home)),))
    ops = tuple(packed(pack(*op) for op in ops) for ops in lists)
    return Schedule("x", placement, microbatches, ops, **fields)


def joined_cells(group: str) -> list[tuple[str, bool]]:
    """Split ``0F1+0B0`` into its cells, each with whether it is joined with the next."""
    *firsts, last = group.split("+")
    return [(cell, True) for cell in firsts] + [(last, False)] * bool(last)


def cell_of(cell: str) -> Op:
    kind = next(kind for kind in Kind if kind.name in cell)
    stage, where = cell.split(kind.name)
    microbatch, _, part = where.partition(".")
    return Op(kind, int(stage), int(microbatch), int(part or 0))


def alter(schedule: Schedule, rng: random.Random) -> Schedule:
    """Make one random change: swap, move, delete, duplicate, another rank, or a field of an op."""
    lists = [schedule.rank_ops(rank) for rank in range(len(schedule.ops))]
    rank = rng.choice([rank for rank, ops in enumerate(lists) if ops] or [None])
    if rank is None:
        return schedule
    ops, other = lists[rank], rng.choice(lists)
    index = rng.randrange(len(ops))
    op = ops[index]
    change = rng.choice(
        ["swap", "move", "near", "delete", "copy", "rank", "field", "split", "join", "recompute"]
    )
    if change == "swap":
        second = rng.randrange(len(ops))
        ops[index], ops[second] = ops[second], op
    elif change == "near" and index:
        ops[index - 1 : index + 1] = reversed(ops[index - 1 : index + 1])
    elif change == "move":
        ops.insert(rng.randrange(len(ops)), ops.pop(index))
    elif change == "delete":
        del ops[index]
    elif change == "copy":
        other.insert(rng.randrange(len(other) + 1), op)
    elif change == "rank":
        del ops[index]
        other.insert(rng.randrange(len(other) + 1), op)
    elif change == "field":
        field = rng.choice(["kind", "stage", "microbatch", "slice"])
        value = rng.randrange(schedule.placement.stages + schedule.microbatches + 1)
        ops[index] = op._replace(**{field: Kind(value % 5) if field == "kind" else value})
    elif change == "split" and op.kind == Kind.B:
        ops[index] = op._replace(kind=Kind.I)
        ops.insert(rng.randint(index, len(ops)), op._replace(kind=Kind.W, joined=False))
    elif change == "join":
        ops[index] = op._replace(joined=not op.joined)
    elif change == "recompute" and schedule.recompute:
        stage = rng.choice(sorted(schedule.recompute))
        ahead = Op(Kind.R, stage, rng.randrange(schedule.microbatches))
        ops.insert(rng.randrange(len(ops) + 1), ahead)
    return replace(
        schedule,
        ops=tuple(packed(pack(*op) for op in ops) for ops in lists),
        activation_bound=schedule.activation_bound if rng.random() < 0.5 else None,
    )


def accepted(schedule: Schedule) -> bool:
    """Whether the validator proves it."""
    try:
        validate(schedule)
    except ScheduleError:
        return False
    return True
