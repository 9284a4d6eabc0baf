"""Lower bound of the makespan or longest span, which no order of operations can beat."""

from dataclasses import replace

from megapipe.schedule.cost import Cost, Time
from megapipe.schedule.search.problem import Problem


def least(problem: Problem) -> Time:
    """Return the lower bound: the maximum over ranks of a rank's work plus unavoidable idle time.

    Until its first input gradient can begin, a rank can run only the forwards that its memory
    allows. For the objective "makespan" the rank also waits for its first forward. After its last
    input gradient, the backward of the last micro-batch continues through all lower stages;
    meanwhile the rank can run only as many weight gradients as its memory allowed it to defer.
    """
    return max(_of_rank(problem, rank) for rank in range(len(problem.chunks)))


def cheapest(cost: Cost, stages: int) -> Cost:
    """Return costs for a lower bound: I costs min(I, B), and I + W together min(I + W, B)."""
    forward, fused, back, weight = cost.table(stages)[:4]
    first = tuple(map(min, back, fused))
    whole = [min(i + w, b) for i, w, b in zip(back, weight, fused, strict=True)]
    rest = tuple(both - i for both, i in zip(whole, first, strict=True))
    return replace(cost, F=forward, I=first, W=rest)


def _of_rank(problem: Problem, rank: int) -> Time:
    m, stages, chunks = problem.microbatches, problem.stages, problem.chunks[rank]
    lowest, highest = chunks[0], chunks[-1]
    times, lags = problem.duration[::m], problem.lag[::m]
    forward, back, weight = times[:stages], times[stages : 2 * stages], times[2 * stages :]
    forward_lag, back_lag = lags[:stages], lags[stages : 2 * stages]
    arrival = sum(forward[:lowest]) + sum(forward_lag[: lowest + 1])
    turn = sum(forward[lowest:]) + sum(forward_lag[lowest + 1 :])
    turn += sum(back[highest + 1 :]) + sum(back_lag[highest:])
    room = problem.room[rank] // problem.amount[0]
    idle = max(0, turn - _largest([forward[stage] for stage in chunks], m, room))
    work = m * sum(forward[stage] + back[stage] for stage in chunks)
    if weight:
        work += m * sum(weight[stage] for stage in chunks)
    if problem.objective == "span":
        return idle + work
    ending = sum(back[:lowest]) + sum(back_lag[:lowest]) + (weight[0] if weight else 0)
    late: Time = 0
    if weight:
        waits = -problem.amount[-1]
        kept = problem.room[rank] // waits if waits else m * len(chunks)
        late = _largest([weight[stage] for stage in chunks], m, kept)
    return arrival + idle + work + max(0, ending - late)


def _largest(times: list[Time], microbatches: int, count: int) -> Time:
    """Return the longest total time of `count` operations, at most `microbatches` per stage."""
    total: Time = 0
    for time in sorted(times, reverse=True):
        taken = min(count, microbatches)
        total += taken * time
        count -= taken
    return total
