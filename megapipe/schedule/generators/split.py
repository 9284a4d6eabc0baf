"""Split backwards where a schedule has fused ones."""

from dataclasses import replace

from megapipe.schedule.ir import JOINED, KIND_MASK, Kind, Schedule, packed


def split_backwards(schedule: Schedule) -> Schedule:
    """Every B as an I with its W directly after it: the same order, and input gradients leave
    sooner. A B that is joined with another operation stays."""
    lists = []
    for ops in schedule.ops:
        codes: list[int] = []
        joined = False
        for code in ops:
            alone = not joined
            joined = code >= JOINED
            if code & KIND_MASK == Kind.B and alone and not joined:
                base = code - Kind.B
                codes += [base + Kind.I, base + Kind.W]
            else:
                codes.append(code)
        lists.append(packed(codes))
    return replace(schedule, ops=tuple(lists))
