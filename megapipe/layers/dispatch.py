"""Dispatch: the way of tokens to the ranks that have their experts, and of results back.

All ranks of the expert-parallel group go it together, also those without rows, or with experts
without any. There are three forms (section `experts` of the configuration):

- rows travel (:class:`RowsTravel`): each goes to the rank of its expert, in one hop or in two
  (:mod:`megapipe.layers.expert_hops`);
- tokens are gathered (:class:`TokensGathered`): every rank gets all tokens of the group, with their
  weights and choices, and takes the rows of its experts from them;
- experts travel (:mod:`megapipe.layers.expert_fetch`): all rows stay, as if this rank were alone.

In the first two the rows of an expert are in the order of the ranks that they are from, then of
positions, and results come back as rows, which are added up where the tokens are: neither changes a
bit. Where the width of an expert is split over etp ranks each of these gets its rows, and their
results are added up, in the order of the ranks, where the tokens are.

Rows travel in chunks of experts (:mod:`megapipe.layers.expert_chunks`): before a rank computes with
one, the next has begun its way, and results leave while the next is computed. Each way is an
all-to-all that has begun and is waited for later, so on a GPU it runs on NCCL's own stream.

Values of rows may travel coded (:mod:`megapipe.layers.row_codec`), all of them, also those that
stay on their rank: weights of choices and their gradients, choices and counts never.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import Wait, start_gathering
from megapipe.layers.expert_chunks import Chunk, chunks_of, fetched_chunks
from megapipe.layers.expert_hops import Trip, steps_back, steps_there
from megapipe.layers.expert_padding import PaddedRows, among_choices
from megapipe.layers.expert_rows import Counts, Rows, count_rows
from megapipe.layers.moe_specs import Codec
from megapipe.layers.row_codec import CODECS, UNCODED, RowCodec


@dataclass(frozen=True)
class Form:
    """How tokens get to experts."""

    gathers: bool = False
    """Tokens are gathered."""
    fetches: bool = False
    """Experts travel, and no rows."""
    hops: tuple[Axis, Axis] | None = None
    """Rows travel within the node, and between nodes."""
    chunks: int = 1
    codec: Codec = "none"
    """Of rows, and of tokens that are gathered."""
    pad: bool = False
    """There is room for all rows that there can be, so these are not counted."""
    count: Callable[[Tensor, int, Axis], Counts] = count_rows
    """Counts rows where they are counted."""

    def counted(self, ep: Axis) -> Axis:
        """The ranks that tell each other how many rows they have."""
        return Axis.alone() if self.fetches else ep


M = TypeVar("M")
T_co = TypeVar("T_co", covariant=True)


class Coming(Protocol[T_co]):
    """Values or matrices on their way to where experts are computed, chunk by chunk."""

    def begin(self, number: int) -> None:
        """Begin the way of a chunk."""

    def go_on(self, number: int) -> None:
        """Begin its next hop."""

    def take(self, number: int) -> T_co:
        """The values of the chunk, [rows, ...] in the order of experts, or its matrices."""


class Plan(NamedTuple):
    """All that the host knows of a micro-batch's way in a layer."""

    form: Form
    ep: Axis
    etp: int
    """Neighbours in the group with parts of the same experts."""
    chunks: Sequence[Chunk]

    @property
    def own(self) -> int:
        """Rows of the tokens here."""
        return int(self.chunks[-1].own.stop)

    @property
    def here(self) -> int:
        """Rows of the experts here."""
        return int(self.chunks[-1].here.stop)

    @property
    def ends(self) -> list[int]:
        """Of the rows of each expert here."""
        return [chunk.here.start + end for chunk in self.chunks for end in chunk.ends]

    @property
    def alone(self) -> bool:
        """Whether this rank has all experts."""
        return self.ep.size == 1

    @property
    def codec(self) -> RowCodec:
        return CODECS[self.form.codec]


class Dispatch(ABC):
    """The way of the rows of a micro-batch in a layer."""

    def __init__(self, plan: Plan, order: Tensor, slots: Tensor, *arrival: Tensor) -> None:
        self.plan = plan
        self.rows = (PaddedRows if plan.form.pad else Rows)(order, slots, plan.own)
        self.arrival = arrival
        """[rows of a chunk here] of each chunk, int64: in the order of experts, which of what
        arrives they are, or beyond all of it; nothing where this rank has all experts."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that makes the same again, with the plan."""
        return self.rows.order, self.rows.slots, *self.arrival

    @abstractmethod
    def tokens(self, x: Tensor) -> Coming[Tensor]:
        """Values of tokens [tokens, h] go to the experts."""

    @abstractmethod
    def choices(self, values: Tensor) -> Coming[Tensor]:
        """Values of choices [tokens, k] go to the experts."""

    @abstractmethod
    def departure(self, number: int, rows: Tensor) -> Tensor:
        """Rows of a chunk, in the order of the ranks that they are from, and of their rows."""

    def in_turn(
        self, matrices: Coming[M], *values: Coming[Tensor]
    ) -> Iterator[tuple[Chunk, M, list[Tensor]]]:
        """Each chunk with its matrices and the values for it, once those of the next one are on
        their way."""
        chunks = self.plan.chunks
        coming: list[Coming[Any]] = [matrices, *values]
        hops = 1 if self.plan.form.hops is None else 2
        for turn in range(-hops, len(chunks)):
            for ahead in range(hops, 0, -1):
                if 0 <= turn + ahead < len(chunks):
                    for each in coming:
                        (each.begin if ahead == hops else each.go_on)(turn + ahead)
            if turn >= 0:
                here = [each.take(turn) for each in values]
                yield chunks[turn], matrices.take(turn), here

    def home(self) -> Homeward:
        """For rows of results of experts, nothing of which is on its way yet."""
        return Homeward(self, self.plan.codec)

    def home_of_choices(self) -> Homeward:
        """For one value of each row."""
        return Homeward(self, UNCODED)


class Homeward:
    """Results of experts on their way to the tokens."""

    def __init__(self, dispatch: Dispatch, codec: RowCodec) -> None:
        self._dispatch, self._codec = dispatch, codec
        self._trips: list[Trip] = []

    def give(self, rows: Tensor) -> None:
        """Those of the next chunk, in the order of experts: they leave."""
        for trip in self._trips:
            trip.go_on()
        form, ep, _, chunks = self._dispatch.plan
        number = len(self._trips)
        steps = steps_back(chunks[number].moved, ep, form.hops)
        departing = self._dispatch.departure(number, rows)
        self._trips.append(Trip(departing, steps, self._codec))

    def arrived(self) -> Tensor:
        """[rows of the tokens here, ...], sums over etp in higher precision."""
        chunks = self._dispatch.plan.chunks
        return joined(
            [self._summed(c, trip.arrived()) for c, trip in zip(chunks, self._trips, strict=True)]
        )

    def _summed(self, chunk: Chunk, rows: Tensor) -> Tensor:
        _, ep, etp, _ = self._dispatch.plan
        if etp == 1:
            return rows
        high = torch.promote_types(rows.dtype, torch.float32)
        sizes = [chunk.moved(ep.index, member) for member in range(ep.size)]
        parts = [part.to(high) for part in rows.split(sizes)]
        firsts = range(0, ep.size, etp)
        return torch.cat([sum(parts[i + 1 : i + etp], parts[i]) for i in firsts])


class RowsTravel(Dispatch):
    """Each row goes to the rank of its expert."""

    def tokens(self, x: Tensor) -> Coming[Tensor]:
        return _RowsOut(self, lambda part: self.rows.gather(x, part), self.plan.codec)

    def choices(self, values: Tensor) -> Coming[Tensor]:
        return _RowsOut(self, lambda part: self.rows.of_choices(values, part), UNCODED)

    def departure(self, number: int, rows: Tensor) -> Tensor:
        if self.plan.alone:
            return rows
        arrived = torch.empty_like(rows)
        arrived[self.arrival[number]] = rows
        return arrived


class _RowsOut:
    def __init__(
        self, dispatch: RowsTravel, part_of: Callable[[slice], Tensor], codec: RowCodec
    ) -> None:
        self._dispatch, self._codec = dispatch, codec
        self._part_of = part_of
        self._trips: dict[int, Trip] = {}

    def begin(self, number: int) -> None:
        form, ep, etp, chunks = self._dispatch.plan
        chunk = chunks[number]
        rows = self._part_of(chunk.own)
        if etp > 1:
            sizes = [chunk.moved(ep.index, member) for member in range(0, ep.size, etp)]
            rows = torch.cat([part for part in rows.split(sizes) for _ in range(etp)])
        self._trips[number] = Trip(rows, steps_there(chunk.moved, ep, form.hops), self._codec)

    def go_on(self, number: int) -> None:
        self._trips[number].go_on()

    def take(self, number: int) -> Tensor:
        arrived = self._trips.pop(number).arrived()
        return arrived if self._dispatch.plan.alone else arrived[self._dispatch.arrival[number]]


class TokensGathered(Dispatch):
    """Every rank gets all tokens; `arrival` are numbers of choices among those of all ranks."""

    def tokens(self, x: Tensor) -> Coming[Tensor]:
        k = self.rows.slots.shape[1]
        at = self.rows.at
        return _TokensOut(self, x, lambda whole, choices: at(whole, choices // k), self.plan.codec)

    def choices(self, values: Tensor) -> Coming[Tensor]:
        at = self.rows.at
        return _TokensOut(self, values, lambda whole, number: at(whole.flatten(), number), UNCODED)

    def departure(self, number: int, rows: Tensor) -> Tensor:
        _, ep, _, chunks = self.plan
        if self.plan.form.pad:  # as many rows of each expert and rank
            each = rows.unflatten(0, (len(chunks[number].ends), ep.size, -1))
            return each.transpose(0, 1).flatten(0, 2)
        source = self.arrival[number] // self.rows.slots.numel()
        return rows[source.argsort(stable=True)]


class _TokensOut:
    def __init__(
        self,
        dispatch: TokensGathered,
        own: Tensor,
        take: Callable[[Tensor, Tensor], Tensor],
        codec: RowCodec,
    ) -> None:
        self._dispatch, self._codec = dispatch, codec
        self._values, self._take = own, take
        self._coming: list[tuple[Tensor, Wait]] = []

    def begin(self, number: int) -> None:
        if number == 0:
            own = self._codec.coded(self._values)
            self._coming.append(start_gathering(own, self._dispatch.plan.ep))

    def go_on(self, number: int) -> None:
        """There is one hop alone."""

    def take(self, number: int) -> Tensor:
        if number == 0:
            coded, wait = self._coming.pop()
            wait()
            self._values = self._codec.decoded(coded, self._values.dtype)
        return self._take(self._values, self._dispatch.arrival[number])


def remade(plan: Plan, *tensors: Tensor) -> Dispatch:
    """A dispatch from its plan and its tensors."""
    return (TokensGathered if plan.form.gathers else RowsTravel)(plan, *tensors)


def dispatch_of(
    choice: Tensor, told: Counts, ep: Axis, etp: int, form: Form, copies: int = 0
) -> Dispatch:
    """The way of what :func:`~megapipe.layers.routing.choose` found here, `told` being the rows
    that each rank has for each expert; or of places, of which each rank has so many for copies."""
    if form.fetches:
        chunks = fetched_chunks(told.of_ranks[0], ep.size // etp, form.chunks)
        plan = Plan(form, Axis.alone(), 1, chunks)
    else:
        plan = Plan(form, ep, etp, chunks_of(told.of_ranks, ep.index, etp, form.chunks, copies))
    of_each = plan.chunks[0].of_each
    if form.pad:
        rows: Rows = PaddedRows.with_room(choice, told, of_each, form.chunks)
    else:
        rows = Rows.of(choice, plan.own, of_each, form.chunks, copies)
    if plan.alone:
        return remade(plan, rows.order, rows.slots)
    if form.gathers:
        arrival = _among_choices(choice, plan, of_each, told)
    else:
        of_each_chunk = [_among_rows(told, chunk, ep.index, choice.device) for chunk in plan.chunks]
        arrival = joined(of_each_chunk)
    of_chunks = arrival.split([chunk.ends[-1] for chunk in plan.chunks])
    return remade(plan, rows.order, rows.slots, *of_chunks)


def _among_rows(told: Counts, chunk: Chunk, index: int, device: torch.device) -> Tensor:
    """Which of the rows that arrive, from one rank after the other, come first, by expert."""
    rows = torch.arange(chunk.ends[-1], device=device)
    if told.there is None:  # as many of each rank and expert
        return rows.view(len(told.of_ranks), len(chunk.ends), -1).transpose(0, 1).flatten()
    first = chunk.of_each * (index // chunk.etp)
    columns = slice(first + chunk.experts.start, first + chunk.experts.stop)
    stops = told.there[:, columns].flatten().cumsum(0)  # by source, then expert
    found = torch.searchsorted(stops, rows, right=True).remainder_(len(chunk.ends))
    return found.argsort(stable=True)


def _among_choices(choice: Tensor, plan: Plan, of_each: int, told: Counts) -> Tensor:
    """Which choices of all ranks are of the experts here, by expert."""
    everyone, wait = start_gathering(choice.contiguous().view(torch.uint8), plan.ep)
    wait()
    numbers = everyone.view(choice.dtype).int()
    numbers -= of_each * (plan.ep.index // plan.etp)
    elsewhere = (numbers < 0) | (numbers >= of_each)  # or dropped
    numbers.masked_fill_(elsewhere, of_each)
    if plan.form.pad:
        return among_choices(numbers.view(-1, *choice.shape), of_each, told)
    return numbers.flatten().argsort(stable=True)[: plan.here].clone()


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Values of all chunks."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
