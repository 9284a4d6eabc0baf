"""Any costs, and any policy of replicas, for property tests."""

from fractions import Fraction

from hypothesis import strategies as st

from megapipe.schedule.cost import Cost, GradBucket
from megapipe.schedule.data_parallel import ReplicaPolicy


@st.composite
def leaving(draw) -> tuple[GradBucket, ...]:
    """Draw the pieces of a stage's reduction."""
    parts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    times = sorted(draw(st.tuples(*[st.fractions(0, 1, max_denominator=6)] * (len(parts) - 1))))
    shares = [Fraction(part, sum(parts)) for part in parts]
    return tuple(map(GradBucket, [*times, 1], shares))


@st.composite
def costs(draw, schedule) -> Cost:
    """Draw any cost that a schedule can have."""
    stages, ranks = schedule.placement.stages, schedule.placement.ranks
    times = st.integers(0, 5) if draw(st.booleans()) else st.fractions(0, 5, max_denominator=5)
    per_stage = times | st.tuples(*[times] * stages)
    pairs = st.tuples(st.integers(0, ranks - 1), st.integers(0, ranks - 1))
    shares = st.tuples(*[times] * schedule.slices)
    buckets = st.tuples(*[leaving()] * stages)
    return Cost(
        F=draw(per_stage),
        I=draw(per_stage),
        W=draw(per_stage),
        B=draw(st.none() | per_stage),
        R=draw(st.none() | per_stage),
        overlap_factor=draw(st.sampled_from([1, Fraction(3, 4)])),
        latency=draw(times | st.dictionaries(pairs, times)),
        bandwidth=draw(st.none() | st.sampled_from([1, 2, Fraction(2, 3)])),
        message=draw(times),
        overlap=draw(st.booleans()),
        slices=draw(st.none() | shares),
        reduce=draw(st.just(0) | per_stage),
        buckets=draw(st.just(()) | buckets),
        gather=draw(st.just(0) | per_stage),
    )


POLICIES = st.builds(ReplicaPolicy, st.integers(0, 3), st.integers(0, 3), st.booleans())
