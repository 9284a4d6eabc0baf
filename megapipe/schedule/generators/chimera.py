r"""Chimera (Li and Hoefler, 2107.06925): pipelines in opposite directions, merged.

Down pipeline j of f has stage s on rank (s + j p/f) mod p, up pipelines are the mirror image, and
a rank's stages all differ as p is a multiple of 2f. Time is cut in slots, one for each operation,
and all pipelines have the same grid: F at stage s in slot 2x + s, B in slot 2y + p-1 - s, with
even numbers 2x and 2y, and y >= x + p/2 so that B comes after F. Forwards of down pipelines and
backwards of up pipelines meet on a rank r in slots of one parity, and by symmetry the others in
those of the other parity. As there are f pipelines each way, one x or y fills f slots of a parity,
every h-th one, h = p/(2f). So what is left is the order in which x and y follow each other. A
*unit* is a row of letters, F or B: letter c is slot

    2 ((c div h) p/2 + c mod h)

and a unit of p micro-batches is h times F, then h times B. Every slot of a parity then has one
operation, and units follow each other without a gap (*direct concatenation*).

Doubling and halving give F two micro-batches, or two halves of one, which run as one operation,
and B one of the two, so that F and B take the same time if B = 2F: a unit is h times F, then 2h
times B, and direct concatenation leaves no gap there.

What m leaves after whole units joins the last unit if f = 1: h times F, then B and F in turn, then
the rest of B. For f > 1 it is a unit with some micro-batches left out.
"""

from collections.abc import Iterator
from fractions import Fraction

from megapipe.schedule.generators.grid import MicroBatchPath, both_ways, on_grid
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import loop


@register("chimera")
def chimera(ranks: int, microbatches: int, pairs: int = 1) -> Schedule:
    """Micro-batches take turns between 2 * pairs pipelines, joined by direct concatenation.

    Idle time, for m a multiple of p: (p/f-2) F if B = F, that is (p-2)/(2m+p-2) of the makespan
    for one pair; for one pair it holds for any even m >= p. If B = 2F: 2 (p/f-2) F at m = p, and
    (p/f-2) F more for each further unit, which the two remedies below avoid. Peak on rank r for
    one pair: p/2+1 + min(r, p-1-r) micro-batches where p divides m, else up to p; weights: 2f
    copies. The paper has even m; any m can be executed, an odd one as if the last up micro-batch
    of the next even one were left out.

    Raises:
        ScheduleError: ranks that are not a multiple of 2 * pairs.
    """
    return _concatenated("chimera", ranks, microbatches, pairs)


@register("chimera_forward_doubling")
def chimera_forward_doubling(ranks: int, microbatches: int, pairs: int = 1) -> Schedule:
    """Chimera with forwards of two micro-batches at once, for B = 2F.

    Idle time, for B = 2F and m a multiple of 2p: 2 (p/f-2) F, that is (p-2)/(1.5m+p-2) of the
    makespan for one pair. Peak: up to 2p micro-batches, which is why the paper recomputes with it.
    Any m; the last micro-batch of an odd m goes forward alone.

    Raises:
        ScheduleError: ranks that are not a multiple of 2 * pairs.
    """
    return _concatenated("chimera_forward_doubling", ranks, microbatches, pairs, parts=2)


@register("chimera_backward_halving")
def chimera_backward_halving(ranks: int, microbatches: int, pairs: int = 1) -> Schedule:
    """Chimera with backwards of half a micro-batch, for B = 2F.

    Micro-batches 2i and 2i+1 of the schedule are the halves of micro-batch i. Idle time, for
    B = 2F and m a multiple of p: (p/f-2) F, that is (p-2)/(3m+p-2) of the makespan for one pair.
    Peak: up to p micro-batches. Any m.

    Raises:
        ScheduleError: ranks that are not a multiple of 2 * pairs.
    """
    halves = (Fraction(1, 2),) * (2 * microbatches)
    return _concatenated(
        "chimera_backward_halving", ranks, len(halves), pairs, parts=2, sizes=halves
    )


def _concatenated(
    name: str,
    ranks: int,
    microbatches: int,
    pairs: int,
    *,
    parts: int = 1,
    sizes: tuple[Fraction, ...] | None = None,
) -> Schedule:
    """Every `parts` micro-batches go forward as one and backward each by itself."""
    placement = both_ways(name, loop(ranks), pairs)
    directions, length = 2 * pairs, ranks // (2 * pairs)
    per_direction = -(-microbatches // (directions * parts))
    units = _units(per_direction, length, parts, extend=pairs == 1)
    places = [
        (letter, 2 * (place // length * (ranks // 2) + place % length))
        for place, letter in enumerate("".join(units))
    ]
    forwards = [at for letter, at in places if letter == "F"]
    backwards = [at for letter, at in places if letter == "B"]
    trips = []
    for microbatch in range(microbatches):
        together, part = divmod(microbatch, parts)
        turn, direction = divmod(together, directions)
        trips.append(
            MicroBatchPath(direction, forwards[turn], backwards[turn * parts + part] + ranks - 1)
        )
    return on_grid(name, placement, trips, sizes=sizes)


def _units(forwards: int, length: int, parts: int, *, extend: bool) -> Iterator[str]:
    """Units with so many forwards in all, `length` in a whole one."""
    whole, rest = divmod(forwards, length)
    joins = extend and whole > 0 and rest > 0
    back = "B" * parts
    yield from ["F" * length + back * length] * (whole - joins)
    if joins:
        yield "F" * length + (back + "F") * rest + back * length
    elif rest:
        yield "F" * rest + "-" * (length - rest) + back * rest
