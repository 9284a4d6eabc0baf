"""Orders made in one pass through time: a free rank runs the operation that its rule prefers.

No rule gets stuck, however little memory a rank has. The oldest micro-batch that still has forwards
on a rank needs memory for all of them; a rank admits another forward only if this memory remains.
So the oldest micro-batch of all can always continue.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product

from megapipe.schedule.cost import Time
from megapipe.schedule.search.problem import NEVER, Order, Problem

_NOTHING: tuple[int, Time] = NEVER, -NEVER
MANY = 1 << 30


@dataclass(frozen=True)
class GreedyRule:
    """Rule by which a free rank chooses its next operation."""

    ahead: tuple[int, ...]
    """Maximum number of chunk activations between F and I, per rank; one for each stage of the rank
    is always allowed."""
    keep: tuple[int, ...]
    """Maximum number of weight gradients that are deferred while forwards run, per rank."""
    overrun: float = 0.0
    """Maximum time by which an operation may delay one of higher priority, as a share of its own
    duration."""
    forward_first: bool = False
    """Whether forwards have priority over input gradients."""
    deep: bool = True
    """Whether, of several forwards, the one of the highest stage goes first, and of several input
    gradients the one of the lowest stage; otherwise the opposite."""


def rules(problem: Problem) -> Iterator[GreedyRule]:
    """Yield the rules to try; rules that differ most from each other come first."""
    ranks = problem.placement.ranks
    chunks = problem.stages // ranks
    up = range(ranks)
    aheads = (
        (MANY,) * ranks,
        tuple(chunks * (ranks - rank) for rank in up),
        (chunks * ranks,) * ranks,
        tuple(2 * chunks * (ranks - rank) - chunks for rank in up),
        tuple(chunks * (2 * ranks - rank) // 2 for rank in up),
    )
    keeps = ((MANY,) * ranks, (0,) * ranks, tuple(chunks * rank for rank in up))
    orders = (True, False) if chunks > 1 else (True,)
    for deep, overrun, forward_first in product(orders, (0.5, 0.0, 1.0), (False, True)):
        for keep, ahead in product(keeps[:1] if problem.fused else keeps, aheads):
            yield GreedyRule(ahead, keep, overrun, forward_first, deep)


def greedy(problem: Problem, rule: GreedyRule) -> Order:
    """Return the order that a rule makes."""
    duration, feeds, lag_after = problem.duration, problem.feeds, problem.lag_after
    rank_of = problem.rank
    ends: list[Time] = [NEVER] * problem.size
    ends.append(0)
    ranks = [_Rank(problem, rule, rank, ends) for rank in range(problem.placement.ranks)]
    free: list[Time] = [0] * len(ranks)
    events: list[tuple[Time, int]] = [(0, rank) for rank in range(len(ranks))]
    while events:
        now, rank = heappop(events)
        if free[rank] > now:
            continue
        op = ranks[rank].choose(now)
        if op == NEVER:
            continue
        ranks[rank].take(op)
        free[rank] = ends[op] = end = now + duration[op]
        heappush(events, (end, rank))
        after = feeds[op]
        if after < problem.size and rank_of[after] != rank:
            heappush(events, (end + lag_after[op], rank_of[after]))
    return [rank.ops for rank in ranks]


def leaves_room(
    chunks: Sequence[int], done: Mapping[int, int] | Sequence[int], stage: int, room: int
) -> bool:
    """Whether, after one more F at `stage`, a rank still has memory for the oldest micro-batch to
    pass all its chunks forward.

    Args:
        chunks: stages of the rank, ascending.
        done: number of forwards done, by stage.
        room: maximum number of chunk activations on the rank.
    """
    oldest = done[chunks[-1]] + (stage == chunks[-1])
    younger = 0
    for chunk in chunks:
        begun = done[chunk] + (chunk == stage) - oldest - 1
        if begun > 0:
            younger += begun
    return len(chunks) + younger <= room


class _Rank:
    """Streams and memory of one rank while its order is made."""

    def __init__(self, problem: Problem, rule: GreedyRule, rank: int, ends: list[Time]) -> None:
        self.problem, self.rule, self.ends = problem, rule, ends
        self.chunks = problem.chunks[rank]
        stages = sorted(self.chunks, reverse=rule.deep)
        self.forwards = dict.fromkeys(stages, 0)
        self.backwards = dict.fromkeys(reversed(stages), 0)
        self.weights: deque[int] = deque()
        self.grain, self.room = problem.amount[0], problem.room[rank]
        self.ahead = min(max(rule.ahead[rank], len(self.chunks)), self.room // self.grain)
        self.keep = rule.keep[rank]
        self.flying = self.held = 0
        self.ops: list[int] = []

    def choose(self, now: Time) -> int:
        """Return the operation to begin at time `now`; NEVER: wait until the next input arrives."""
        duration, m, row = self.problem.duration, self.problem.microbatches, self.problem.row
        back, next_back = self._arrivals(
            now, (row + stage * m + done for stage, done in self.backwards.items() if done < m)
        )
        forward, next_forward = _NOTHING
        if self.flying < self.ahead:
            forward, next_forward = self._arrivals(
                now,
                (
                    stage * m + done
                    for stage, done in self.forwards.items()
                    if done < m and leaves_room(self.chunks, self.forwards, stage, self.ahead)
                ),
            )
        full = forward != NEVER and self.held + self.grain > self.room
        if full:
            forward = NEVER
        choice, other, soon = back, forward, next_back
        if self.rule.forward_first:
            choice, other, soon = forward, back, next_forward
        in_time = 1 - self.rule.overrun
        if choice == NEVER and other != NEVER and now + in_time * duration[other] <= soon:
            choice = other
        if not self.weights or choice >= row:
            return choice
        weight = self.weights[0]
        if choice != NEVER:
            return weight if len(self.weights) > self.keep else choice
        soon = min(next_back, next_forward)
        return weight if full or now + in_time * duration[weight] <= soon else NEVER

    def _arrivals(self, now: Time, ops: Iterable[int]) -> tuple[int, Time]:
        """Return the first of `ops` that has its input at time `now` (NEVER if none), and the time
        at which the next known input arrives."""
        needs, lag, ends = self.problem.needs, self.problem.lag, self.ends
        found, soon = _NOTHING
        for op in ops:
            end = ends[needs[op]]
            if end == NEVER:
                continue
            at = end + lag[op]
            if at > now:
                soon = min(soon, at)
            elif found == NEVER:
                found = op
        return found, soon

    def take(self, op: int) -> None:
        """Append an operation to the rank's order, and update memory and progress."""
        self.ops.append(op)
        self.held += self.problem.amount[op]
        kind, number = divmod(op, self.problem.row)
        stage = number // self.problem.microbatches
        if kind == 0:
            self.forwards[stage] += 1
            self.flying += 1
        elif kind == 1:
            self.backwards[stage] += 1
            self.flying -= 1
            if not self.problem.fused:
                self.weights.append(op + self.problem.row)
        else:
            self.weights.popleft()
