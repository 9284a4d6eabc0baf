"""Local search: tabu search along critical paths, and restarts from a shaken order.

As in job-shop scheduling (Nowicki and Smutnicki 1996; Balas and Vazacopoulos 1998), a *critical
block* is a sequence of operations of the critical path that one rank runs without idling. An order
gets shorter only if operations of a critical block change places. A move is judged by the longest
path through the operations that it moves, with the heads and tails of the order before the move.
The best move that is not forbidden (tabu) is made, even if it makes the order longer; undoing it is
then forbidden for some iterations.
"""

import random
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from megapipe.schedule.cost import Time
from megapipe.schedule.search.problem import Order, Problem, TimedOrder

MOVES = 40
"""Maximum number of moves judged per iteration; more moves of a critical path are sampled."""
TENURE = (8, 20)
SHAKES = (10, 40)
REACH = 6
"""Maximum distance, in indices of a rank's list, that an operation moves in :func:`shaken`."""


class Move(NamedTuple):
    """A move of the operation at index `source` of a rank's list to index `target`."""

    rank: int
    source: int
    target: int


def make(order: Order, move: Move) -> None:
    """Make a move in an order, in place."""
    ops = order[move.rank]
    ops.insert(move.target, ops.pop(move.source))


def copy(order: Order) -> Order:
    """Return a copy that can be changed."""
    return [list(ops) for ops in order]


class Tabu:
    """Tabu search from one order."""

    def __init__(self, problem: Problem, order: Order, rng: random.Random) -> None:
        self.problem, self.order, self.rng = problem, copy(order), rng
        self.forbidden: dict[tuple[int, int], int] = {}
        """For a pair (a, b) of operations: iteration until which no move may put a before b."""
        self.iteration = 0
        self.held: dict[int, list[int]] = {}

    def run(self, iterations: int, target: Time) -> TimedOrder | None:
        """Return the best order found; None if the initial order deadlocks. Stop early if an order
        is as short as `target`."""
        problem = self.problem
        best: TimedOrder | None = None
        move: Move | None = None
        pairs: list[tuple[int, int]] = []
        while self.iteration < iterations:
            self.iteration += 1
            run = problem.ends(self.order)
            if run is None:
                if move is None:
                    return None
                self.forbidden.update(dict.fromkeys(pairs, iterations + 1))
                make(self.order, Move(move.rank, move.target, move.source))
                continue
            ends, sequence = run
            value = problem.value(self.order, ends)
            if best is None or value < best.value:
                best = TimedOrder(value, copy(self.order))
                if value <= target:
                    return best
            tails = problem.tails(self.order, ends, sequence)
            move = self._choose(ends, tails, best.value)
            if move is None:
                return best
            pairs = list(_pairs(move, *self._parts(move)[1:]))
            until = self.iteration + self.rng.randint(*TENURE)
            self.forbidden.update({(second, first): until for first, second in pairs})
            make(self.order, move)
        return best

    def _parts(self, move: Move) -> tuple[int, int, list[int]]:
        """Return the first index that changes, the moved operation, and the operations that it
        moves past."""
        rank, source, target = move
        ops = self.order[rank]
        if target > source:
            return source, ops[source], ops[source + 1 : target + 1]
        return target, ops[source], ops[target:source]

    def _choose(self, ends: list[Time], tails: list[Time], best: Time) -> Move | None:
        """Return the best move that is not forbidden or, if all are, the best forbidden move."""
        self.held.clear()
        moves = [move for block in self._blocks(ends) for move in _moves(*block)]
        if len(moves) > MOVES:
            moves = self.rng.sample(moves, MOVES)
        choice = None
        for move in moves:
            if not self.legal(move):
                continue
            length = self._judge(move, ends, tails)
            _, moved, others = self._parts(move)
            tabu = length >= best and any(
                self.forbidden.get(pair, 0) > self.iteration for pair in _pairs(move, moved, others)
            )
            rated = (tabu, length, self.rng.random(), move)
            if choice is None or rated < choice:
                choice = rated
        return None if choice is None else choice[3]

    def _blocks(self, ends: list[Time]) -> Iterator[tuple[int, int, int]]:
        """Yield the critical blocks of a random critical path, from its end, as (rank, first index,
        last index)."""
        problem, order, rng = self.problem, self.order, self.rng
        offsets = problem.offsets(order, ends)
        lasts = [ends[ops[-1]] - offset for ops, offset in zip(order, offsets, strict=True)]
        value = max(lasts)
        rank = rng.choice([rank for rank, last in enumerate(lasts) if last == value])
        index = stop = len(order[rank]) - 1
        while True:
            ops = order[rank]
            op = ops[index]
            start = ends[op] - problem.duration[op]
            need = problem.needs[op]
            sent = need < problem.size and ends[need] + problem.lag[op] == start
            gapless = index > 0 and ends[ops[index - 1]] == start
            if gapless and not (sent and rng.random() < 0.5):
                index -= 1
                continue
            yield rank, index, stop
            if not sent:
                return
            rank = problem.rank[need]
            index = stop = order[rank].index(need)

    def legal(self, move: Move) -> bool:
        """Whether every operation stays after its input on the rank, and memory suffices, if the
        move is made."""
        problem = self.problem
        first, moved, others = self._parts(move)
        if any(_depends(problem, before, after) for after, before in _pairs(move, moved, others)):
            return False
        amount = problem.amount
        if amount[moved] <= 0 and max(amount[op] for op in others) <= 0:
            return True
        if move.rank not in self.held:
            ops = self.order[move.rank]
            self.held[move.rank] = [0, *accumulate(amount[op] for op in ops)]
        held, room = self.held[move.rank][first], problem.room[move.rank]
        for op in _segment(move, moved, others):
            held += amount[op]
            if held > room:
                return False
        return True

    def _judge(self, move: Move, ends: list[Time], tails: list[Time]) -> Time:
        """Estimate the longest path through the operations that the move affects."""
        problem = self.problem
        first, moved, others = self._parts(move)
        ops, segment = self.order[move.rank], _segment(move, moved, others)
        now = ends[ops[first - 1]] if first else 0
        new_ends: dict[int, Time] = {}
        for op in segment:
            need = problem.needs[op]
            arrived = new_ends.get(need, ends[need]) + problem.lag[op]
            if arrived > now:
                now = arrived
            now += problem.duration[op]
            new_ends[op] = now
        after = first + len(segment)
        if after < len(ops):
            tail = tails[ops[after]]
        else:
            tail = -problem.offsets(self.order, ends)[move.rank]
        longest: Time = 0
        new_tails: dict[int, Time] = {}
        for op in reversed(segment):
            fed = problem.feeds[op]
            follows = new_tails.get(fed, tails[fed]) + problem.lag_after[op]
            if follows > tail:
                tail = follows
            longest = max(longest, new_ends[op] + tail)
            tail += problem.duration[op]
            new_tails[op] = tail
        return longest


def _moves(rank: int, first: int, last: int) -> Iterator[Move]:
    """Yield the moves within a critical block: swaps of neighbours, and moves of any operation to
    the first or last index of the block."""
    for index in range(first, last):
        yield Move(rank, index, index + 1)
    for index in range(first, last - 1):
        yield Move(rank, index, last)
    for index in range(first + 2, last + 1):
        yield Move(rank, index, first)


def _segment(move: Move, moved: int, others: list[int]) -> list[int]:
    return [*others, moved] if move.target > move.source else [moved, *others]


def _pairs(move: Move, moved: int, others: list[int]) -> Iterator[tuple[int, int]]:
    """Return the pairs (a, b) of operations for which the move puts a before b."""
    if move.target > move.source:
        return ((other, moved) for other in others)
    return ((moved, other) for other in others)


def _depends(problem: Problem, before: int, after: int) -> bool:
    """Whether operation `after` directly depends on operation `before` of the same rank: both are
    in one stream, or `after` needs the output of `before`."""
    if before // problem.microbatches == after // problem.microbatches:
        return True
    weight = before >= problem.row and after == before + problem.row
    return weight or problem.needs[after] == before


def shaken(problem: Problem, order: Order, rng: random.Random) -> Order:
    """Return an order with some operations moved at random; it keeps the memory limit and does not
    deadlock."""
    tabu = Tabu(problem, order, rng)
    left = rng.randint(*SHAKES)
    for _ in range(4 * left):
        rank = rng.randrange(len(order))
        last = len(order[rank]) - 1
        source = rng.randint(0, last)
        target = min(last, max(0, source + rng.choice((-1, 1)) * rng.randint(1, REACH)))
        move = Move(rank, source, target)
        tabu.held.clear()
        if left == 0:
            break
        if source == target or not tabu.legal(move):
            continue
        make(tabu.order, move)
        if problem.ends(tabu.order) is None:
            make(tabu.order, Move(rank, target, source))
        else:
            left -= 1
    return tabu.order
