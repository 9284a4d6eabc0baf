"""What a planner's choice means for the trainer, and how it is told."""

from dataclasses import replace

import pytest

from megapipe.errors import ConfigError
from megapipe.plan.algorithms.compare import choose, keys_of, microbatch_counts, obstacle, words
from megapipe.plan.algorithms.judge import judge
from megapipe.plan.algorithms.pipeline import PlannedPipeline, PlannedStage, UnitChoice, stage
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.registry import Algorithm, algorithm, algorithms
from megapipe.schedule.generators import build
from tests.unit.plan.algorithms.random_chains import random_units


def model(**given: object) -> Problem:
    """Make a problem of an embedding, four layers of two halves each, and a head."""
    units = random_units(10, 1, (1, 2))
    return Problem(units, 4, 8, samples=4, cuts=(1, 3, 5, 7, 9), **given)  # type: ignore[arg-type]


EVEN = PlannedPipeline(
    (stage(0, 5, [0, 1], recompute={1, 2, 3}), stage(5, 10, [2, 3])),
    8,
)


def test_keys_of_a_plan_that_the_trainer_runs() -> None:
    assert obstacle(model(), EVEN) is None
    assert keys_of(model(), EVEN) == {
        "parallel.dp": 2,
        "parallel.tp": 1,
        "parallel.pp": 2,
        "parallel.sequence_parallel": False,
        "train.microbatch": 2,
        "pipeline.schedule": "1f1b",
        "pipeline.stage_layout": "E L*2|L*2 H",
        "activations.policy": "full",
        "activations.num_blocks": [2, 0],
    }
    said = "2 x 5 units, dp 2, tp 1, recompute 3,0, 8 micro-batches, 1f1b"
    assert words(model(), EVEN) == said


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        ((stage(0, 4, [0, 1]), stage(4, 10, [2, 3])), "within a layer"),
        ((stage(0, 5, [0, 1], tp=2), stage(5, 10, [2, 3])), "tp differs by stage"),
        ((stage(0, 5, [0]), stage(5, 10, [1, 2, 3])), "replicas differ by stage"),
        ((stage(0, 5, [2, 3]), stage(5, 10, [0, 1])), "order of ranks"),
        ((PlannedStage(0, (UnitChoice(1), *[UnitChoice(2)] * 9), (0, 1)),), "within a stage"),
    ],
)
def test_what_the_trainer_cannot_run_is_named(
    stages: tuple[PlannedStage, ...], reason: str
) -> None:
    found = obstacle(model(), PlannedPipeline(stages, 8))
    assert found is not None
    assert reason in found


def test_an_order_of_its_own_is_not_registered() -> None:
    known = build("gpipe", ranks=2, microbatches=8)
    plan = PlannedPipeline(EVEN.stages, 8, known)
    assert obstacle(model(), plan) is None
    assert keys_of(model(), plan)["pipeline.schedule"] == "gpipe"
    plan = PlannedPipeline(EVEN.stages, 8, replace(known, name="1f1b"))
    assert obstacle(model(), plan) == "its order of operations is not a registered schedule"


def test_the_fastest_number_of_micro_batches_that_fits_is_chosen() -> None:
    given = model(whole_samples=True, memory=90.0)
    counts = microbatch_counts(given)
    assert len(counts) > 1

    def whole(problem: Problem) -> PlannedPipeline:
        devices = range(problem.replica_counts[-1])
        return PlannedPipeline((stage(0, 10, devices),), problem.microbatches)

    found = choose(Algorithm("whole", "", "", whole), given)
    every = [judge(given, whole(given.with_microbatches(count))) for count in counts]
    fitting = [each.seconds for each in every if each.fits]
    assert found.seconds == min(fitting, default=float("inf"))


def test_every_published_planner_is_registered() -> None:
    ours = (
        "adapipe alpa autopipe dapple dawnpiper efftra hypar mcap merak one_weird_trick optcnn "
        "pipe_torch pipedream piper"
    )
    assert set(ours.split()) <= set(algorithms())
    assert all(each.source and each.objective for each in algorithms().values())
    with pytest.raises(ConfigError, match="did you mean 'pipedream'"):
        algorithm("pipedrem")
