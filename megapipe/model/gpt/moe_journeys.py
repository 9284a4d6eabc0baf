"""Memory of the ways of a layer's rows to their experts and back, on a tape. No torch.

As in :mod:`megapipe.layers.dispatch`, whose steps are taken here one by one: what travels is there
until it has arrived, beside what arrives; on its arrival it is put into the order of experts, and
results into that of the ranks that they go to. Before rows leave they are coded, if so wanted
(:mod:`megapipe.layers.row_codec`), and decoded when they have come. What is left when a layer is
through, its function lets go of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megapipe.layers.moe_specs import wire_bytes
from megapipe.model.gpt.moe_memory import PLACE
from megapipe.model.tape import Tape


class Row(NamedTuple):
    """Bytes of a row."""

    plain: int
    wire: int
    """On its way."""
    coding: int = 0
    """Of what is made and let go of before it is coded."""
    decoding: int = 0
    is_coded: bool = False

    @classmethod
    def of(cls, codec: str, width: int, size: int) -> Row:
        """Of so many values of `size` bytes each."""
        wire = wire_bytes(codec, width, size)
        if codec != "int8":
            return cls(width * size, wire, is_coded=codec != "none")
        wide, step = width * max(size, 4), 4
        copy = wide if size < 4 else 0
        return cls(width * size, wire, copy + 2 * wide + step, 2 * wide + step, is_coded=True)


class Chunk(NamedTuple):
    """Rows of a part of the experts, each of which is chosen as often as the others."""

    experts: int
    own: int
    """Rows of the tokens here, one for each rank that has a part of their expert."""
    here: int
    """Rows of the experts here."""
    matrices: int
    """Bytes of the matrices that are fetched."""


@dataclass(frozen=True)
class Ways:
    """The ways of a layer's rows."""

    chunks: Sequence[Chunk]
    etp: int = 1
    """Ranks with parts of the same experts."""
    ranks: int = 1
    """Those that rows travel to; 1: they stay."""
    gathers: bool = False
    """Each rank has all tokens."""
    two_hops: bool = False
    joins: bool = False
    """Fetched matrices are put together from parts."""

    @property
    def here(self) -> int:
        return sum(chunk.here for chunk in self.chunks)

    def journey(self, tape: Tape) -> Journey:
        return Journey(self, tape)


class _Coming(Protocol):
    """Values or matrices on their way to where experts are computed, by the numbers of chunks."""

    def begin(self, number: int) -> None: ...
    def go_on(self, number: int) -> None: ...
    def take(self, number: int) -> None: ...


class _Step(NamedTuple):
    rows: int
    """Afterwards."""
    is_hop: bool
    """Otherwise a turn, into another order."""


class _Trip:
    """So many rows on their way, which have been taken. Whoever gives them lets go of them when the
    first hop has begun, unless they are what is sent."""

    def __init__(self, tape: Tape, row: Row, rows: int, steps: Sequence[_Step]) -> None:
        self._tape, self._row, self._steps, self._sent = tape, row, deque(steps), 0
        is_sent = steps[0].is_hop and not row.is_coded
        self._rows, self._own = rows, rows * row.plain if is_sent else 0
        if row.is_coded:
            tape.pass_by(rows * row.coding)
            self._own = rows * row.wire
            tape.take(self._own)
        self._begin()
        if not is_sent:
            tape.drop(rows * row.plain)

    def go_on(self) -> None:
        if any(step.is_hop for step in self._steps):
            self._begin()

    def arrived(self) -> int:
        """Returns the bytes of what has come."""
        while self._steps:
            self._begin()
        self._tape.drop(self._sent)
        self._sent, come = 0, self._rows * self._row.plain
        if self._row.is_coded:
            self._tape.pass_by(self._rows * self._row.decoding)
            self._tape.take(come)
            self._tape.drop(self._own)
        return come

    def _begin(self) -> None:
        self._tape.drop(self._sent)
        self._sent = 0
        while self._steps:
            self._rows, is_hop = self._steps.popleft()
            before, self._own = self._own, self._rows * self._row.wire
            self._tape.take(self._own)
            if is_hop:
                self._sent = before
                return
            self._tape.drop(before)


class Journey:
    """The ways there and back of one pass."""

    def __init__(self, ways: Ways, tape: Tape) -> None:
        self.ways, self.tape = ways, tape
        self._matrices = _Matrices(self)

    def rows(self, row: Row, own: int) -> _Coming:
        """Values that go to the experts, those of each row; `own`: so many of them, of all tokens
        or all choices here, are gathered where rows are not sent."""
        if self.ways.ranks == 1:
            return _Staying(self, row)
        return _Gathered(self, row, own) if self.ways.gathers else _Travelling(self, row)

    def in_turn(self, *values: _Coming) -> Iterator[Chunk]:
        """Each chunk once it has come and the next is on its way."""
        chunks, hops = self.ways.chunks, 2 if self.ways.two_hops else 1
        coming = [self._matrices, *values]
        for turn in range(-hops, len(chunks)):
            for ahead in range(hops, 0, -1):
                if 0 <= turn + ahead < len(chunks):
                    for each in coming:
                        (each.begin if ahead == hops else each.go_on)(turn + ahead)
            if turn >= 0:
                for each in (*values, self._matrices):
                    each.take(turn)
                yield chunks[turn]
                self.tape.drop(chunks[turn].matrices)

    def home(self, row: Row, summed: int) -> Homeward:
        return Homeward(self, row, summed)


class _Matrices:
    """Those of a chunk's experts, where they are fetched."""

    def __init__(self, journey: Journey) -> None:
        self._tape, self._ways = journey.tape, journey.ways

    def begin(self, number: int) -> None:
        self._tape.take(self._ways.chunks[number].matrices)

    def go_on(self, number: int) -> None:
        """There is one hop alone."""

    def take(self, number: int) -> None:
        if self._ways.joins:
            self._tape.pass_by(self._ways.chunks[number].matrices)


class _Staying:
    def __init__(self, journey: Journey, row: Row) -> None:
        self._tape, self._ways, self._row = journey.tape, journey.ways, row

    def begin(self, number: int) -> None:
        self._tape.take(self._ways.chunks[number].here * self._row.plain)

    def go_on(self, number: int) -> None:
        """Nothing travels."""

    def take(self, number: int) -> None:
        """They are in the order of experts."""


class _Travelling:
    def __init__(self, journey: Journey, row: Row) -> None:
        self._tape, self._ways, self._row = journey.tape, journey.ways, row
        self._trips: dict[int, _Trip] = {}

    def begin(self, number: int) -> None:
        tape, (_, own, here, _), etp = self._tape, self._ways.chunks[number], self._ways.etp
        tape.take(own // etp * self._row.plain)
        if etp > 1:
            tape.take(own * self._row.plain)
            tape.drop(own // etp * self._row.plain)
        steps = [_Step(here, True)]
        if self._ways.two_hops:
            steps = [_Step(own, False), *steps, _Step(here, False), *steps]
        self._trips[number] = _Trip(tape, self._row, own, steps)

    def go_on(self, number: int) -> None:
        self._trips[number].go_on()

    def take(self, number: int) -> None:
        come = self._trips.pop(number).arrived()
        self._tape.take(come)  # in the order of experts
        self._tape.drop(come)


class _Gathered:
    def __init__(self, journey: Journey, row: Row, own: int) -> None:
        self._tape, self._ways, self._row = journey.tape, journey.ways, row
        self._own, self._whole = own, journey.ways.ranks * own

    def begin(self, number: int) -> None:
        if number:
            return
        if self._row.is_coded:
            self._tape.pass_by(self._own * self._row.coding)
            self._tape.take(self._own * self._row.wire)
        self._tape.take(self._whole * self._row.wire)

    def go_on(self, number: int) -> None:
        """There is one hop alone."""

    def take(self, number: int) -> None:
        tape, row, coded = self._tape, self._row, 0
        if row.is_coded and number == 0:
            tape.drop(self._own * row.wire)
            tape.pass_by(self._whole * row.decoding)
            tape.take(self._whole * row.plain)
            coded = self._whole * row.wire
        here = self._ways.chunks[number].here
        tape.pass_by(here * PLACE, here * row.plain)
        tape.take(here * row.plain)
        tape.drop(coded)


class Homeward:
    """Results on their way to the tokens, which are `summed` bytes over the ranks of etp."""

    def __init__(self, journey: Journey, row: Row, summed: int) -> None:
        self._tape, self._ways, self._row, self._summed = journey.tape, journey.ways, row, summed
        self._trips: list[_Trip] = []

    def give(self, chunk: Chunk) -> None:
        """Those of the next chunk, which have been taken: they leave."""
        for trip in self._trips:
            trip.go_on()
        if self._ways.ranks == 1:
            return
        _, own, here, _ = chunk
        self._tape.take(here * self._row.plain)  # in the order of the ranks that they go to
        steps = [_Step(own, True)]
        if self._ways.two_hops:
            steps += [_Step(own, False), _Step(own, True), _Step(own, False)]
        self._trips.append(_Trip(self._tape, self._row, here, steps))
        self._tape.drop(here * self._row.plain)

    def arrived(self) -> None:
        ways, tape = self._ways, self._tape
        for trip, chunk in zip(self._trips, ways.chunks[: len(self._trips)], strict=True):
            trip.arrived()
            if ways.etp > 1:
                wide = chunk.own * self._summed if self._summed > self._row.plain else 0
                total = chunk.own // ways.etp * self._summed
                tape.take(wide, total)
                tape.take(total)
                tape.drop(wide, total)
        if len(ways.chunks) > 1:
            whole = sum(chunk.own for chunk in ways.chunks) // ways.etp * self._summed
            tape.take(whole)
            tape.drop(whole if ways.etp > 1 else 0)
