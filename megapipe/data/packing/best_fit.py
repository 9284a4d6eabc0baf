"""Best-fit packing: many pieces of text in few samples (Ding et al., 2404.10830).

Pieces are taken from the longest to the shortest, and each goes to the sample with the least room
that still takes it. Pieces of equal length are placed at once: a sample with room r takes r // n of
length n one after the other, since what is left of it is the tightest place for the next.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


def best_fit(lengths: npt.NDArray[np.integer[Any]], room: int) -> Numbers:
    """The sample of each piece.

    Args:
        lengths: of the pieces [n], from 1 to `room`.
        room: length of a sample.

    Returns:
        Numbers of samples [n], from 0 on, in the order in which these are opened. Takes about 60
        bytes a piece.
    """
    pieces = np.argsort(-lengths.astype(np.int64), kind="stable")
    in_order = lengths[pieces]
    starts = np.flatnonzero(np.diff(in_order, prepend=-1))
    sample_of = np.empty(len(lengths), np.int64)
    open_by_room: dict[int, list[Numbers]] = {}
    """Samples that have so much room left, in the order in which they came to it."""
    opened = 0
    for start, stop in zip(starts, [*starts[1:], len(pieces)], strict=True):
        length, waiting = int(in_order[start]), pieces[start:stop]
        for left in sorted(r for r in open_by_room if r >= length):
            if not len(waiting):
                break
            waiting = _fill(open_by_room, left, length, waiting, sample_of)
        if len(waiting):
            count = -(-len(waiting) // (room // length))
            open_by_room.setdefault(room, []).append(np.arange(opened, opened + count))
            opened += count
            _fill(open_by_room, room, length, waiting, sample_of)
    return sample_of


def _fill(
    open_by_room: dict[int, list[Numbers]],
    left: int,
    length: int,
    waiting: Numbers,
    sample_of: Numbers,
) -> Numbers:
    """Put pieces of one length into samples with so much room left; returns those that wait on."""
    samples = np.concatenate(open_by_room.pop(left))
    each = left // length
    used = min(-(-len(waiting) // each), len(samples))
    taken = min(used * each, len(waiting))
    sample_of[waiting[:taken]] = np.repeat(samples[:used], each)[:taken]
    full, last = divmod(taken, each)
    for count, some in ((each, samples[:full]), (last, samples[full:used]), (0, samples[used:])):
        if len(some):
            open_by_room.setdefault(left - count * length, []).append(some)
    return waiting[taken:]
