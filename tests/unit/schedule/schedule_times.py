"""What the tests of generators measure: exact idle times, and every small size of a schedule."""

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import build
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.timing.simulate import simulate


def timeline(schedule, **times):
    """Simulate a schedule. Times are those of a full rank."""
    return simulate(schedule, Cost.full_rank(schedule.placement, **times))


def idle(schedule, **times):
    """Return the idle time within the makespan, which must be the same on every rank."""
    measured = timeline(schedule, **times)
    (each,) = {measured.makespan - busy for busy in measured.busy}
    return each


def lines(schedule):
    return [" ".join(map(str, schedule.rank_ops(rank))) for rank in range(len(schedule.ops))]


def check_all_sizes(name, legal, ranks=6, **options):
    """Assert that every m <= 3p+2 at every legal p is valid, in order, and as large as promised."""
    for p in range(1, ranks + 1):
        for m in range(1, 3 * p + 3):
            if not legal(p):
                try:
                    build(name, ranks=p, microbatches=m, **options)
                except ScheduleError:
                    continue
                raise AssertionError(f"{name}: {p} ranks should be refused")
            schedule = build(name, ranks=p, microbatches=m, **options)
            report = validate(schedule)
            assert schedule.name == name
            assert schedule.whole_microbatches == m
            assert report.bitwise_order
            assert report.peak_held == schedule.activation_bound
