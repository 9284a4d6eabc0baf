"""All-to-all exchanges that send rows between ranks: one exchange, or one within nodes and one
between nodes.

With two exchanges (Tutel, Hwang et al., 2206.03382) a rank first sends its rows to the rank of its
own node that has the target's local index. That rank then exchanges with the ranks of its local
index on other nodes. The bytes between nodes are the same, in fewer and larger messages::

    rank (a, i)  --within node a-->  rank (a, j)  --between nodes-->  rank (b, j)

Either way, rows arrive in the order of their source ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import Wait, done, start_all_to_all
from megapipe.layers.moe.row_codec import UNCODED, RowCodec


class AllToAll(NamedTuple):
    """An all-to-all of rows."""

    axis: Axis
    sends: Sequence[int]
    """Number of rows for each member."""
    receives: Sequence[int]
    """Number of rows from each member."""


class Permute(NamedTuple):
    """A transposition of blocks of rows, from order (i, j) to (j, i)."""

    blocks: Sequence[Sequence[int]]
    """Number of rows of each block, [i][j]."""


Step = AllToAll | Permute
Moved = Callable[[int, int], int]
"""Function (source, target) that returns how many rows one member of the group sends to another."""
StartExchange = Callable[[Tensor, Axis, Sequence[int], Sequence[int]], tuple[Tensor, Wait]]
"""Type of :func:`start_exchange` and of its replacements."""


def start_exchange(
    rows: Tensor, axis: Axis, sends: Sequence[int], receives: Sequence[int]
) -> tuple[Tensor, Wait]:
    """Start to send the first `sends[0]` of `rows` [rows, ...] to member 0 of `axis`, the next
    `sends[1]` to member 1, ... Return the rows to receive, in the order of the members, and a
    function that waits for them."""
    shape = rows.shape[1:]
    of_row = prod(shape)
    parts = ([of_row * n for n in each] for each in (sends, receives))
    flat, wait = start_all_to_all(rows.flatten(), axis, *parts)
    return flat.view(-1, *shape), wait


class Transfer:
    """Transfer of encoded rows in steps; making the object starts the first exchange."""

    def __init__(
        self,
        rows: Tensor,
        steps: Iterable[Step],
        codec: RowCodec = UNCODED,
        start: StartExchange = start_exchange,
    ) -> None:
        self._codec, self._dtype = codec, rows.dtype
        self._rows = codec.encode(rows)
        self._steps = deque(steps)
        self._start_exchange = start
        self._wait = done
        self._start()

    def start_next_hop(self) -> None:
        """Start the next exchange (between nodes), if there is one."""
        if any(isinstance(step, AllToAll) for step in self._steps):
            self._start()

    def wait(self) -> Tensor:
        """Return the decoded rows, once all steps are done."""
        while self._steps:
            self._start()
        self._wait()
        self._wait = done
        self._rows = self._codec.decode(self._rows, self._dtype)
        return self._rows

    def _start(self) -> None:
        """Complete the current exchange, run the steps before the next exchange, and start it."""
        self._wait()
        self._wait = done
        while self._steps:
            step = self._steps.popleft()
            if isinstance(step, Permute):
                self._rows = _permuted(self._rows, step.blocks)
                continue
            self._rows, self._wait = self._start_exchange(self._rows, *step)
            return


def _permuted(rows: Tensor, blocks: Sequence[Sequence[int]]) -> Tensor:
    sizes = [size for line in blocks for size in line]
    parts, width = rows.split(sizes), len(blocks[0])
    return torch.cat([part for j in range(width) for part in parts[j::width]])


def dispatch_steps(moved: Moved, ep: Axis, hops: tuple[Axis, Axis] | None) -> list[Step]:
    """List the steps from tokens to experts: one exchange over `ep`, or, if `hops` has the axes
    within and between nodes, one exchange over each."""
    if ep.size == 1:
        return []
    if hops is None:
        return [_flat(moved, ep)]
    own, passing, coming = _two_hops(moved, *hops)
    inner, outer = hops
    return [
        Permute(own),
        AllToAll(inner, _sums(_across(own)), _sums(passing)),
        Permute(passing),
        AllToAll(outer, _sums(_across(passing)), _sums(coming)),
    ]


def combine_steps(moved: Moved, ep: Axis, hops: tuple[Axis, Axis] | None) -> list[Step]:
    """List the steps from experts to tokens, the reverse of :func:`dispatch_steps`."""
    if ep.size == 1:
        return []
    if hops is None:
        axis, sends, receives = _flat(moved, ep)
        return [AllToAll(axis, receives, sends)]
    own, passing, coming = _two_hops(moved, *hops)
    inner, outer = hops
    return [
        AllToAll(outer, _sums(coming), _sums(_across(passing))),
        Permute(_across(passing)),
        AllToAll(inner, _sums(passing), _sums(_across(own))),
        Permute(_across(own)),
    ]


def _flat(moved: Moved, ep: Axis) -> AllToAll:
    members = range(ep.size)
    sends = [moved(ep.index, member) for member in members]
    return AllToAll(ep, sends, [moved(source, ep.index) for source in members])


Blocks = list[list[int]]


def _two_hops(moved: Moved, inner: Axis, outer: Axis) -> tuple[Blocks, Blocks, Blocks]:
    """Return row counts: sent by this rank to each (node, local index); forwarded by this rank
    from each local index to each node; received by this rank from each (node, local index)."""
    inner_indices, nodes = range(inner.size), range(outer.size)

    def rank(node: int, inner_index: int) -> int:
        return node * inner.size + inner_index

    me = rank(outer.index, inner.index)
    own = [[moved(me, rank(node, inner_index)) for inner_index in inner_indices] for node in nodes]
    passing = [
        [moved(rank(outer.index, inner_index), rank(node, inner.index)) for node in nodes]
        for inner_index in inner_indices
    ]
    coming = [
        [moved(rank(node, inner_index), me) for inner_index in inner_indices] for node in nodes
    ]
    return own, passing, coming


def _across(blocks: Blocks) -> Blocks:
    return [list(column) for column in zip(*blocks, strict=True)]


def _sums(blocks: Blocks) -> list[int]:
    return [sum(line) for line in blocks]
