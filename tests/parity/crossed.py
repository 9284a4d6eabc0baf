"""A schedule in which ranks take micro-batches in another order than they arrive."""

from __future__ import annotations

from array import array

from megapipe.schedule.ir import Kind, Schedule, pack
from megapipe.schedule.placement import vee


def crossed() -> Schedule:
    """Build a V whose second rank takes the micro-batches in the opposite order of their
    arrival."""
    forward = {0: ((0, 0), (0, 1), (0, 2), (3, 2), (3, 0), (3, 1))}
    forward[1] = ((1, 2), (1, 1), (1, 0), (2, 2), (2, 0), (2, 1))
    backward = {0: ((3, 1), (3, 0), (3, 2), (0, 0), (0, 2), (0, 1))}
    backward[1] = ((2, 2), (2, 1), (2, 0), (1, 2), (1, 0), (1, 1))
    ops = []
    for rank in (0, 1):
        codes = [pack(Kind.F, s, m) for s, m in forward[rank]]
        codes += [pack(kind, s, m) for kind in (Kind.I, Kind.W) for s, m in backward[rank]]
        ops.append(array("q", codes))
    return Schedule(name="crossed", placement=vee(2), microbatches=3, ops=tuple(ops))
