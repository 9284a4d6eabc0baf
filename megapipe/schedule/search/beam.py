"""Beam search for an order of operations, built one operation at a time.

A *stream* is one kind of operation at one stage, in micro-batch order. A state branches into the
possible next operations of one rank: the rank that can end an operation first (active schedules:
Giffler and Thompson, 1960). If this rank can only begin a forward, operations of the rank that
comes next are branches too, so that memory can be saved for the input that arrives next. After each
step the best states are kept: the states with the least idle time that is already certain.
"""

from dataclasses import dataclass
from heapq import nsmallest

from megapipe.schedule.cost import Time
from megapipe.schedule.search.greedy import leaves_room
from megapipe.schedule.search.problem import NEVER, Order, Problem

AVERAGE = 0.1
"""Weight of the average over ranks in a state's score; the worst rank has weight 1."""

Options = list[tuple[Time, int]]
"""(start, stream) pairs: time at which the next operation of a stream can begin."""


@dataclass(slots=True)
class _State:
    """Beginning of an order. `done` and `ends` are lists by stream, the other lists by rank."""

    done: list[int]
    ends: list[list[Time]]
    free: list[Time]
    held: list[int]
    left: list[Time]
    """Total time of the operations that each rank has still to run."""
    score: Time = 0
    last: int = NEVER
    """Stream of the last operation. This state is the one in `before` with that operation."""
    before: "_State | None" = None


def beam(problem: Problem, width: int) -> Order | None:
    """Return the best order found if `width` states are kept per step; None if all get stuck."""
    return _Beam(problem).run(width)


class _Beam:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        first = range(0, problem.size, problem.microbatches)
        self.duration = [problem.duration[op] for op in first]
        self.lag = [problem.lag[op] for op in first]
        self.amount = [problem.amount[op] for op in first]
        self.rank_of = [problem.rank[op] for op in first]
        self.streams: list[list[int]] = [[] for _ in problem.chunks]
        for stream, rank in enumerate(self.rank_of):
            self.streams[rank].append(stream)
        self.source = dict(problem.sources())
        self.room = [room // problem.amount[0] for room in problem.room]
        self.offset: list[Time] = [0] * len(problem.chunks)
        if problem.objective == "span":
            self._set_first_starts()

    def _set_first_starts(self) -> None:
        now: Time = 0
        for stage in range(self.problem.stages):
            now += self.lag[stage]
            rank = self.rank_of[stage]
            if stage == self.problem.chunks[rank][0]:
                self.offset[rank] = now
            now += self.duration[stage]

    def run(self, width: int) -> Order | None:
        m, ranks = self.problem.microbatches, len(self.streams)
        work: list[Time] = [
            m * sum(self.duration[stream] for stream in row) for row in self.streams
        ]
        nothing: list[list[Time]] = [[] for _ in self.rank_of]
        states = [_State([0] * len(self.rank_of), nothing, [0] * ranks, [0] * ranks, work)]
        for _ in range(self.problem.size):
            children: dict[tuple[tuple[int, ...], tuple[Time, ...]], _State] = {}
            for state in states:
                for start, stream in self._branches(state):
                    child = self._child(state, start, stream)
                    key = (tuple(child.done), tuple(child.free))
                    if key not in children or child.score < children[key].score:
                        children[key] = child
            states = nsmallest(width, children.values(), key=lambda state: state.score)
        return self._order(states[0]) if states else None

    def _branches(self, state: _State) -> Options:
        """Return the operations with which a state can be continued, each with its start."""
        by_rank = [self._options(state, rank) for rank in range(len(self.streams))]
        branches: Options = []
        while True:
            earliest = min(
                (
                    (start + self.duration[stream], stream)
                    for options in by_rank
                    for start, stream in options
                ),
                default=None,
            )
            if earliest is None:
                return branches
            end, stream = earliest
            rank = self.rank_of[stream]
            if stream >= self.problem.stages:
                return branches + [option for option in by_rank[rank] if option[0] < end]
            branches += by_rank[rank]
            if len(by_rank[rank]) > 1:
                return branches
            by_rank[rank] = []

    def _options(self, state: _State, rank: int) -> Options:
        """Return a rank's possible next operations, with their starts. Of several weight gradients,
        only the oldest is possible."""
        problem, done, free = self.problem, state.done, state.free[rank]
        stages, m = problem.stages, problem.microbatches
        options: Options = []
        weight: tuple[Time, int] | None = None
        full = state.held[rank] + problem.amount[0] > problem.room[rank]
        for stream in self.streams[rank]:
            count = done[stream]
            if count == m:
                continue
            if stream >= 2 * stages:
                if count < done[stream - stages]:
                    ready = (state.ends[stream - stages][count], stream)
                    weight = ready if weight is None else min(weight, ready)
                continue
            arrival: Time = 0
            if stream > 0:
                sent = state.ends[self.source[stream]]
                if count >= len(sent):
                    continue
                arrival = sent[count] + self.lag[stream]
            if stream < stages and (
                full or not leaves_room(problem.chunks[rank], done, stream, self.room[rank])
            ):
                continue
            options.append((max(arrival, free), stream))
        if weight is not None:
            options.append((free, weight[1]))
        return options

    def _child(self, state: _State, start: Time, stream: int) -> _State:
        rank, end = self.rank_of[stream], start + self.duration[stream]
        done, ends, free = state.done[:], state.ends[:], state.free[:]
        held, left = state.held[:], state.left[:]
        done[stream] += 1
        ends[stream] = [*ends[stream], end]
        free[rank] = end
        held[rank] += self.amount[stream]
        left[rank] -= self.duration[stream]
        least = [at + work for at, work in zip(free, left, strict=True)]
        worst = max(at - offset for at, offset in zip(least, self.offset, strict=True))
        score = worst + AVERAGE * float(sum(least)) / len(least)
        return _State(done, ends, free, held, left, score, stream, state)

    def _order(self, state: _State | None) -> Order:
        order: Order = [[] for _ in self.streams]
        while state is not None and state.last != NEVER:
            op = state.last * self.problem.microbatches + state.done[state.last] - 1
            order[self.rank_of[state.last]].append(op)
            state = state.before
        for ops in order:
            ops.reverse()
        return order
