"""A process makes the communicators that the plan counts, and at most eight."""

from __future__ import annotations

from typing import Any

from megapipe import TrainStep
from megapipe.plan.communicators import communicators
from tests.fake_cuda.world import faults_of, observe
from tests.parity.cases import Case, Rows, configure
from tests.parity.tiers import in_parts

LOOP = {"schedule": "interleaved_1f1b", "chunks": 2, "m": 4}
CASES = [
    Case(dp=2, tp=2),
    Case(pp=4, m=4, layers=4),
    Case(dp=2, pp=2, zero=0),
    Case(dp=2, pp=2, zero=3, layers=4, **LOOP),
    Case(pp=4, m=4, schedule="chimera", layers=4),
    Case(dp=2, tp=2, pp=2, layers=4, **LOOP),
    Case(dp=4, pp=2, shard_size=2, layers=4, **LOOP),
    Case(cp=2, dp=2, zero=3),
    Case(cp=2, context="ulysses", pp=2),
    Case(cp=4, context="usp", sequence=16),
    Case(cp=4, context="usp", pp=2, sequence=16, shard_size=2, layers=4, **LOOP),
    Case(dp=2, tp=2, sequence_parallel=True, ep=4, moe="top 2"),
    Case(dp=2, pp=2, ep=2, zero=2, moe="top 2"),
    Case(dp=4, ep=2, etp=2, moe="top 2", rule="muon", zero=2),
    Case(dp=4, ep=4, moe="top 2", layers=2, dispatch="hierarchical", node=2),
]


def train(world: Any, case: Case) -> int:
    """Make a step; return the index on the pipeline axis."""
    config, layout = configure(case)
    mesh = world.mesh(case.grid)
    step = TrainStep(config, layout, mesh)
    step.train(0, Rows(case))
    step.settle()
    return int(mesh.pp.index)


@in_parts("case", CASES, full=3, ids=lambda case: case.name)
def test_as_planned(case: Case) -> None:
    places, reports = observe(case.world, train, case)
    assert not faults_of(reports)
    for place, report in zip(places, reports, strict=True):
        planned = communicators(*configure(case), place).number
        assert report.ledger.communicators == planned <= 8
