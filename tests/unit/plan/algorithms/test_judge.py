"""The judge of plans: by hand for small pipelines."""

import pytest

from megapipe.plan.algorithms.judge import judge, resharding_seconds
from megapipe.plan.algorithms.pipeline import PlannedPipeline, PlannedStage, UnitChoice, stage
from megapipe.plan.algorithms.problem import ChainUnit, Links, Problem, UnitCost
from megapipe.schedule.generators import build


def problem(units: int = 4, devices: int = 2, microbatches: int = 4, **given: object) -> Problem:
    """Make a problem of equal units, at tensor-parallel degrees 1 and 2."""
    costs = {
        (tp, 4): UnitCost(
            *(1 / tp, 1 / tp, 1 / tp, 1 / tp),
            weights=10 / tp,
            states=20 / tp,
            gradients=8 / tp,
            saved=6 / tp,
            saved_recompute=2 / tp,
            message=3.0,
        )
        for tp in (1, 2)
    }
    chain = tuple(ChainUnit(f"unit {n}", costs) for n in range(units))
    return Problem(chain, devices, microbatches, samples=4, **given)  # type: ignore[arg-type]


def test_equal_stages_take_the_published_time_and_memory() -> None:
    plan = PlannedPipeline((stage(0, 2, [0]), stage(2, 4, [1])), 4)
    judged = judge(problem(memory=85), plan)
    assert judged.seconds == (4 + 2 - 1) * 2 * 3
    assert judged.peaks == (2 * 30 + 2 * 12, 2 * 30 + 12)
    assert judged.fits
    assert not judge(problem(memory=83), plan).fits


def test_recomputation_takes_time_and_saves_memory() -> None:
    plan = PlannedPipeline((stage(0, 2, [0], recompute={1}), stage(2, 4, [1])), 4)
    judged = judge(problem(), plan)
    assert judged.seconds > (4 + 2 - 1) * 2 * 3
    assert judged.peaks[0] == 2 * 30 + 2 * (6 + 2) + 4  # one unit is rebuilt at a time


def test_replicas_share_micro_batches_and_reduce_gradients() -> None:
    plan = PlannedPipeline((stage(0, 4, [0, 1]),), 4)
    judged = judge(problem(links=Links(inside=2.0, latency=0.5)), plan)
    assert judged.seconds == pytest.approx(4 * 4 * 3 / 2 + 4 * 8 / 2 + 0.5)
    assert judged.peaks == (4 * (10 + 20 / 2 + 6 / 2),)


def test_messages_count_between_devices() -> None:
    plan = PlannedPipeline((stage(0, 2, [0]), stage(2, 4, [1])), 1)
    given = problem(microbatches=1, links=Links(inside=2.0))
    assert judge(given, plan).seconds == 2 * 2 * 3 + 2 * 3 / 2


def test_units_of_different_degrees_gather_samples() -> None:
    given = problem(2, links=Links(inside=1.0))
    both = PlannedStage(0, (UnitChoice(1), UnitChoice(2)), (0, 1))
    assert resharding_seconds(given, both, 0) == (3.0 / 2, 0.0)
    back = PlannedStage(0, (UnitChoice(2), UnitChoice(1)), (0, 1))
    assert resharding_seconds(given, back, 0) == (0.0, 3.0 / 2)


def test_chunks_and_schedules_of_their_own() -> None:
    chunks = tuple(stage(n, n + 1, [n % 2]) for n in range(4))
    judged = judge(problem(), PlannedPipeline(chunks, 4, "interleaved_1f1b"))
    assert judged.seconds == 4 * 2 * 3 + 3  # the bubble is half of that without chunks
    own = build("gpipe", ranks=2, microbatches=4)
    halves = (stage(0, 2, [0]), stage(2, 4, [1]))
    assert judge(problem(), PlannedPipeline(halves, 4, own)).peaks == (60 + 4 * 12, 60 + 4 * 12)


def test_a_plan_with_other_micro_batches_has_the_same_batch() -> None:
    plan = PlannedPipeline((stage(0, 4, [0]),), 2)
    assert judge(problem(devices=1), plan).seconds == 4 * 4 * 3


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        ((stage(0, 2, [0]), stage(3, 4, [1])), "instead of 0 to 3"),
        ((stage(0, 2, [0]), stage(2, 4, [0, 1])), "share devices"),
        ((stage(0, 4, [0, 1], tp=4),), "cannot be split over 4"),
    ],
)
def test_mistakes_are_named(stages: tuple[PlannedStage, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        judge(problem(), PlannedPipeline(stages, 4))


def test_replicas_have_whole_samples() -> None:
    given = problem(devices=3, whole_samples=True)
    assert given.replica_counts == (1, 2)
    with pytest.raises(ValueError, match="3 replicas"):
        judge(given, PlannedPipeline((stage(0, 4, [0, 1, 2]),), 4))
