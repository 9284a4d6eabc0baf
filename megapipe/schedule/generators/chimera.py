r"""Chimera (Li and Hoefler, 2107.06925): pipelines in opposite directions, merged.

There are f down and f up pipelines (f is `chimera_pairs`). Down pipeline j has stage s on rank
(s + j p/f) mod p; up pipelines are the mirror image. The stages of a rank all differ, as p is a
multiple of 2f. Each operation takes one time slot. A micro-batch has two integers x and y: its F at
stage s is in slot 2x + s, its B in slot 2y + p-1 - s, with y >= x + p/2 so that B comes after F. On
a rank, forwards of down pipelines and backwards of up pipelines have slots of one parity; by
symmetry, all other operations have the other parity. One micro-batch of each pipeline has the same
x and y. So each x and each y fills f slots of a parity on a rank: every h-th slot, h = p/(2f). Only
the order of all x and y remains to be chosen. It is written as a string of letters F (an x) and B
(a y). The letter at index c has a 2x or 2y of

    2 ((c div h) p/2 + c mod h)

A *unit* of p micro-batches is h letters F, then h letters B. Every slot of a parity then has one
operation, and units follow each other without a gap (*direct concatenation*).

With doubling, an F runs two micro-batches as one operation; with halving, it runs both halves of a
micro-batch. A B runs only one of the two. So F and B take the same time if B = 2F: a unit is h
letters F, then 2h letters B, and direct concatenation leaves no gap.

If f = 1, micro-batches that remain after whole units join the last unit: h letters F, then B and F
in turn, then the remaining B. If f > 1, they form an incomplete unit.
"""

from collections.abc import Iterator
from fractions import Fraction

from megapipe.schedule.generators.grid import MicroBatchPath, bidirectional, on_grid
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import loop


@register("chimera")
def chimera(ranks: int, microbatches: int, chimera_pairs: int = 1) -> Schedule:
    """Let micro-batches take turns between 2f pipelines: f = chimera_pairs in each direction.

    Idle time, for m a multiple of p: (p/f-2) F if B = F. For f = 1 this is (p-2)/(2m+p-2) of the
    makespan, and holds for any even m >= p. If B = 2F: 2 (p/f-2) F at m = p, and (p/f-2) F more for
    each further p micro-batches; chimera_forward_doubling and chimera_backward_halving avoid this.
    Peak on rank r for f = 1: p/2+1 + min(r, p-1-r) micro-batches if p divides m, else up to p;
    weights: 2f replicas. The paper has even m. Here any m works: an odd m has the schedule of m + 1
    without the last micro-batch.

    Raises:
        ScheduleError: the number of ranks is not a multiple of 2 * chimera_pairs.
    """
    return _concatenated("chimera", ranks, microbatches, chimera_pairs)


@register("chimera_forward_doubling")
def chimera_forward_doubling(ranks: int, microbatches: int, chimera_pairs: int = 1) -> Schedule:
    """Run Chimera with forwards of two micro-batches at once, for B = 2F.

    Idle time, for B = 2F, f = chimera_pairs and m a multiple of 2p: 2 (p/f-2) F, that is
    (p-2)/(1.5m+p-2) of the makespan for f = 1. Peak: up to 2p micro-batches, so the paper combines
    it with recomputation. Any m; the last micro-batch of an odd m has a forward of its own.

    Raises:
        ScheduleError: the number of ranks is not a multiple of 2 * chimera_pairs.
    """
    return _concatenated("chimera_forward_doubling", ranks, microbatches, chimera_pairs, parts=2)


@register("chimera_backward_halving")
def chimera_backward_halving(ranks: int, microbatches: int, chimera_pairs: int = 1) -> Schedule:
    """Run Chimera with backwards of half a micro-batch, for B = 2F.

    Micro-batches 2i and 2i+1 of the schedule are the halves of micro-batch i. Idle time, for B =
    2F, f = chimera_pairs and m a multiple of p: (p/f-2) F, that is (p-2)/(3m+p-2) of the makespan
    for f = 1. Peak: up to p micro-batches. Any m.

    Raises:
        ScheduleError: the number of ranks is not a multiple of 2 * chimera_pairs.
    """
    halves = (Fraction(1, 2),) * (2 * microbatches)
    return _concatenated(
        "chimera_backward_halving", ranks, len(halves), chimera_pairs, parts=2, sizes=halves
    )


def _concatenated(
    name: str,
    ranks: int,
    microbatches: int,
    chimera_pairs: int,
    *,
    parts: int = 1,
    sizes: tuple[Fraction, ...] | None = None,
) -> Schedule:
    """Build a Chimera schedule in which the forwards of `parts` micro-batches are one operation,
    and each micro-batch has a backward of its own."""
    placement = bidirectional(name, loop(ranks), chimera_pairs)
    directions, length = 2 * chimera_pairs, ranks // (2 * chimera_pairs)
    per_direction = -(-microbatches // (directions * parts))
    units = _units(per_direction, length, parts, extend=chimera_pairs == 1)
    slots = [
        (letter, 2 * (index // length * (ranks // 2) + index % length))
        for index, letter in enumerate("".join(units))
    ]
    forwards = [at for letter, at in slots if letter == "F"]
    backwards = [at for letter, at in slots if letter == "B"]
    paths = []
    for microbatch in range(microbatches):
        together, part = divmod(microbatch, parts)
        turn, direction = divmod(together, directions)
        paths.append(
            MicroBatchPath(direction, forwards[turn], backwards[turn * parts + part] + ranks - 1)
        )
    return on_grid(name, placement, paths, sizes=sizes)


def _units(forwards: int, length: int, parts: int, *, extend: bool) -> Iterator[str]:
    """Yield units as strings of F and B (see the module), with `forwards` F in total and `length` F
    in a whole unit. There are `parts` B per F. If `extend`, a remainder joins the last unit."""
    whole, rest = divmod(forwards, length)
    joins = extend and whole > 0 and rest > 0
    back = "B" * parts
    yield from ["F" * length + back * length] * (whole - joins)
    if joins:
        yield "F" * length + (back + "F") * rest + back * length
    elif rest:
        yield "F" * rest + "-" * (length - rest) + back * rest
