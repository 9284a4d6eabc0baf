"""Migration of experts: sends masters and states to new owners (SmartMoE, Zhai et al., ATC 2023).

The values of one expert in a parameter are contiguous in the bucket, with equal length on every
rank, but their offset changes with the owner. If the bucket is sharded, each rank of the shard axis
has some of them. Values move in two all-to-alls over existing groups. The first one is over ep: it
sends values to the rank of the new owner's shard group that has the same shard of the bucket. The
second one is over the shard axis: it sends values from that rank to the ranks whose shards contain
the new offset. So each value is sent at most twice, at any ZeRO stage.

One parameter and one kind of value is moved at a time. So the extra memory is a few times one
parameter of the experts that a rank sends or receives. Weights are then set from the masters, and
all-gathered as after an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import all_to_all
from megapipe.experts.map import ExpertMap
from megapipe.layers.moe.owners import ExpertOwners
from megapipe.optim.buffers import ParamRange
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.shard import Shard
from megapipe.optim.state_store import MASTER

Maps = Mapping[ExpertOwners, ExpertMap]
"""New expert maps, by the current owners of a layer: one for each layer whose experts move."""


class ExpertMove(NamedTuple):
    """Move of one expert's values of a parameter: from flat position `source` in the bucket of
    owner `giver` to position `goal` in the bucket of owner `taker`, which may be the same rank."""

    giver: int
    taker: int
    source: int
    goal: int


class MovedRange(NamedTuple):
    """A range [start, stop) of an expert's values that one rank sends to another in a move."""

    move: ExpertMove
    start: int
    stop: int


@torch.no_grad()
def move_experts(optimizer: Optimizer, after: Maps) -> None:
    """Move masters and states of experts to the owners in `after`; start the weights' all-gather.

    Call this between steps, before the layers switch to the new maps. Collective: every rank passes
    the maps of its local layers, equal on all ranks that have a layer.
    """
    ep, etp = optimizer.mesh.ep, optimizer.mesh.grid.etp
    for shard in optimizer.shards_by_first_use():
        entries = [e for e in shard.bucket.entries if e.spec.owners in after]
        if not entries:
            continue
        shard.await_readers()
        for entry in entries:
            _move(shard, entry, after, ep, etp)
        shard.start_gather_after_update()


def _move(shard: Shard, entry: ParamRange, after: Maps, ep: Axis, etp: int) -> None:
    """Move a parameter's masters and states to the experts' new owners."""
    owners = entry.spec.owners
    assert isinstance(owners, ExpertOwners)
    length = entry.spec.numel // entry.spec.sizes[0]
    found = expert_moves(owners.map, after[owners], entry.start, length)
    if not found:
        return
    over_ep, over_slices = move_exchanges(
        found, length, shard.stop - shard.start, shard.axis, ep, etp
    )
    for kind in (MASTER, *shard.store.states):
        _move_kind(kind, shard, over_ep, over_slices)


def _move_kind(kind: str, shard: Shard, over_ep: MoveExchange, over_slices: MoveExchange) -> None:
    device, store = shard.weights.device, shard.store

    def kept(piece: MovedRange) -> Tensor:
        start = piece.move.source - shard.start
        return store.read(kind, start + piece.start, start + piece.stop).to(device)

    like = store.read(kind, 0, 0).to(device)
    arrived = {piece.move: (piece, values) for piece, values in over_ep.travel(kept, like)}

    def here(piece: MovedRange) -> Tensor:
        whole, values = arrived[piece.move]
        return values[piece.start - whole.start : piece.stop - whole.start]

    for piece, values in over_slices.travel(here, like):
        start = piece.move.goal - shard.start
        store.write(kind, start + piece.start, start + piece.stop, values)


def expert_moves(before: ExpertMap, after: ExpertMap, start: int, length: int) -> list[ExpertMove]:
    """Return the moves of one parameter, one per expert whose slot changes. `start` is the
    parameter's offset in the bucket, `length` its number of values per expert."""
    each = before.experts // before.ranks
    found = []
    for old, new in zip(before.positions(), after.positions(), strict=True):
        if old != new:
            (giver, a), (taker, b) = divmod(old, each), divmod(new, each)
            found.append(ExpertMove(giver, taker, start + a * length, start + b * length))
    return found


class MoveExchange(NamedTuple):
    """One all-to-all of expert values between the members of an axis."""

    axis: Axis
    sends: list[list[MovedRange]]
    """Ranges that this rank sends, by receiver."""
    receives: list[list[MovedRange]]
    """Ranges that this rank receives, by sender."""

    def travel(
        self, take: Callable[[MovedRange], Tensor], like: Tensor
    ) -> Iterator[tuple[MovedRange, Tensor]]:
        """Run the all-to-all; return the ranges that this rank receives, with their values. `take`:
        function that returns the values of a range to send, in the type of `like`."""
        leaving = [take(piece) for pieces in self.sends for piece in pieces]
        send_buffer = torch.cat([like[:0], *leaving])
        received = all_to_all(send_buffer, _lengths(self.sends), _lengths(self.receives), self.axis)
        pieces = list(chain(*self.receives))
        return zip(pieces, received.split([p.stop - p.start for p in pieces]), strict=True)


def move_exchanges(
    found: Sequence[ExpertMove], length: int, of_slice: int, axis: Axis, ep: Axis, etp: int
) -> tuple[MoveExchange, MoveExchange]:
    """Return this rank's all-to-alls over `ep` and over the shard `axis`. A shard has `of_slice`
    values of the bucket; an expert has `length` values of the parameter."""

    def cut(position: int, member: int) -> tuple[int, int]:
        """Return the range of an expert's values that the shard of `member` has, if the values
        begin at `position` of the bucket."""
        start = member * of_slice - position
        return max(start, 0), min(start + of_slice, length)

    def between(giver: int, taker: int) -> list[MovedRange]:
        """Return the ranges of this shard that one member of ep sends to another."""
        if giver % etp != taker % etp:
            return []
        pair = giver // etp, taker // etp
        own = (move for move in found if (move.giver, move.taker) == pair)
        return _non_empty(MovedRange(move, *cut(move.source, axis.index)) for move in own)

    def within(giver: int, taker: int) -> list[MovedRange]:
        """Return the ranges that one rank of the shard axis sends to another, for experts that come
        to this owner."""
        pieces = []
        for move in found:
            if move.taker == ep.index // etp:
                (a, b), (c, d) = cut(move.source, giver), cut(move.goal, taker)
                pieces.append(MovedRange(move, max(a, c), min(b, d)))
        return _non_empty(pieces)

    def of(members: Axis, pieces: Callable[[int, int], list[MovedRange]]) -> MoveExchange:
        others, me = range(members.size), members.index
        sends = [pieces(me, other) for other in others]
        return MoveExchange(members, sends, [pieces(other, me) for other in others])

    return of(ep, between), of(axis, within)


def _non_empty(pieces: Iterable[MovedRange]) -> list[MovedRange]:
    return [piece for piece in pieces if piece.start < piece.stop]


def _lengths(of_members: Sequence[Sequence[MovedRange]]) -> list[int]:
    return [sum(piece.stop - piece.start for piece in pieces) for pieces in of_members]
