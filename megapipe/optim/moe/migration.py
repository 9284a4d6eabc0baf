"""Experts change the rank that owns them: masters and states go to the new owners (SmartMoE, Zhai
et al., ATC 2023).

The values of an expert in a parameter are neighbours in the bucket, as long on every rank, but
begin elsewhere after a change; where the bucket is sharded each rank of the shard axis has some of
them. They go in two hops over groups that exist already: over the ranks with different experts, to
the rank of the new owner's that has the same slice of the bucket; and from there over the shard
axis to those whose slices have the new place. So each value travels twice at most, whatever changes
and whatever the ZeRO stage is.

One parameter and one kind of value goes after the other, so what is beside the states in memory is
a few times the experts that a rank gives or gets of one parameter. Weights are then set from the
masters, and gathered as after an update.
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
"""The next map of each layer whose experts move."""


class ExpertMove(NamedTuple):
    """An expert's way in a parameter: from a flat position of the bucket of one rank to a position
    of another's, or of its own."""

    giver: int
    taker: int
    source: int
    goal: int


class MovedRange(NamedTuple):
    """The values [start, stop) of an expert that goes some way."""

    way: ExpertMove
    start: int
    stop: int


@torch.no_grad()
def move_experts(optimizer: Optimizer, after: Maps) -> None:
    """Move what the optimizer has of the experts of some layers, and begin to gather their weights.

    Between steps, before the layers take over the maps. All ranks call it, with the same maps of
    the layers that they have.
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
    """All that an optimizer has of a parameter."""
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
        start = piece.way.source - shard.start
        return store.read(kind, start + piece.start, start + piece.stop).to(device)

    like = store.read(kind, 0, 0).to(device)
    arrived = {piece.way: (piece, values) for piece, values in over_ep.travel(kept, like)}

    def here(piece: MovedRange) -> Tensor:
        whole, values = arrived[piece.way]
        return values[piece.start - whole.start : piece.stop - whole.start]

    for piece, values in over_slices.travel(here, like):
        start = piece.way.goal - shard.start
        store.write(kind, start + piece.start, start + piece.stop, values)


def expert_moves(before: ExpertMap, after: ExpertMap, start: int, length: int) -> list[ExpertMove]:
    """Those of the experts whose place changes, by expert, in a parameter that begins at `start` in
    the bucket and has so many values of each."""
    each = before.experts // before.ranks
    found = []
    for old, new in zip(before.places(), after.places(), strict=True):
        if old != new:
            (giver, a), (taker, b) = divmod(old, each), divmod(new, each)
            found.append(ExpertMove(giver, taker, start + a * length, start + b * length))
    return found


class MoveExchange(NamedTuple):
    """An exchange between the members of an axis."""

    axis: Axis
    gives: list[list[MovedRange]]
    """By member, from this one."""
    gets: list[list[MovedRange]]

    def travel(
        self, take: Callable[[MovedRange], Tensor], like: Tensor
    ) -> Iterator[tuple[MovedRange, Tensor]]:
        """The pieces that this member gets, with their values; `take` has those that it gives, of
        the type of `like`."""
        leaving = [take(piece) for pieces in self.gives for piece in pieces]
        given = torch.cat([like[:0], *leaving])
        received = all_to_all(given, _lengths(self.gives), _lengths(self.gets), self.axis)
        pieces = list(chain(*self.gets))
        return zip(pieces, received.split([p.stop - p.start for p in pieces]), strict=True)


def move_exchanges(
    found: Sequence[ExpertMove], length: int, of_slice: int, axis: Axis, ep: Axis, etp: int
) -> tuple[MoveExchange, MoveExchange]:
    """Those of a rank over `ep` and over the shard `axis`, whose members have slices of so many
    values of the bucket."""

    def cut(position: int, member: int) -> tuple[int, int]:
        """The values of an expert at `position` that are in a member's slice."""
        start = member * of_slice - position
        return max(start, 0), min(start + of_slice, length)

    def between(giver: int, taker: int) -> list[MovedRange]:
        """In this slice, from one member of ep to another."""
        if giver % etp != taker % etp:
            return []
        pair = giver // etp, taker // etp
        own = (way for way in found if (way.giver, way.taker) == pair)
        return _there(MovedRange(way, *cut(way.source, axis.index)) for way in own)

    def within(giver: int, taker: int) -> list[MovedRange]:
        """To this rank's experts, from one member of the axis to another."""
        pieces = []
        for way in found:
            if way.taker == ep.index // etp:
                (a, b), (c, d) = cut(way.source, giver), cut(way.goal, taker)
                pieces.append(MovedRange(way, max(a, c), min(b, d)))
        return _there(pieces)

    def of(members: Axis, pieces: Callable[[int, int], list[MovedRange]]) -> MoveExchange:
        others, me = range(members.size), members.index
        gives = [pieces(me, other) for other in others]
        return MoveExchange(members, gives, [pieces(other, me) for other in others])

    return of(ep, between), of(axis, within)


def _there(pieces: Iterable[MovedRange]) -> list[MovedRange]:
    return [piece for piece in pieces if piece.start < piece.stop]


def _lengths(of_members: Sequence[Sequence[MovedRange]]) -> list[int]:
    return [sum(piece.stop - piece.start for piece in pieces) for pieces in of_members]
