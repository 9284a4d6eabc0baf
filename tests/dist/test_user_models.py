"""User-defined models give, in every layout, what their modules give in one process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megapipe.schedule.generators import names
from tests.parity.cases import Case
from tests.parity.registry_cases import smallest
from tests.parity.tiers import in_parts, one_of
from tests.parity.user_models import Own, check_in_worlds, check_own, run_own, settle


def check_all(all_of_them: Sequence[Own]) -> None:
    """Train and check the models of one world size in one world."""
    check_in_worlds(all_of_them, run_own, check_own)


MODELS = (
    *("plain", "split", "tied", "tuples", "functions", "tied_functions", "parallel", "shared"),
)


@in_parts("model", MODELS, default=["functions"], full=["tuples"])
def test_one_process(model: str) -> None:
    check_all([Own(model, Case(masked=0.3), 5)])


LAYOUTS = [
    Case(pp=2, schedule="zb_h1", m=4),
    Case(pp=2, in_process=True, m=3),
    Case(pp=3, m=3),
    Case(dp=2, pp=2, chunks=2, schedule="interleaved_1f1b", m=4, zero=3),
]
FURTHER = [
    Case(dp=2, masked=0.3),
    Case(pp=2, m=3, activations="stage", debug=True),
    *(Case(dp=2, pp=2, m=3, zero=zero, masked=0.3) for zero in range(4)),
]


@pytest.mark.full
@pytest.mark.parametrize(
    "model",
    [pytest.param(model, marks=[] if model == "tied" else pytest.mark.slow) for model in MODELS],
)
def test_replicas_stages_and_shards(model: str) -> None:
    check_all([Own(model, case, 6) for case in LAYOUTS])


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_way_to_shard(model: str) -> None:
    check_all([Own(model, case, 6) for case in FURTHER])


@one_of(3)
def test_layers_without_parameters_or_gradients(some: slice) -> None:
    """Alone on a stage, and with others."""
    cases = [
        Case(masked=0.3),
        Case(pp=5, m=3, masked=0.3),
        Case(pp=5, m=3, in_process=True),
        Case(pp=5, m=4, schedule="zb_h1", debug=True),
        Case(pp=2, m=3, dp=2, zero=2),
        Case(pp=2, m=3, dp=2, zero=3),
    ]
    check_all([Own("severed", case, 5) for case in cases[some]])


@pytest.mark.slow
def test_tensor_parallel_layers() -> None:
    cases = [
        Case(tp=2, masked=0.3),
        Case(tp=4),
        Case(tp=2, dp=2, zero=3),
        Case(tp=2, pp=2, schedule="zb_h1", m=4),
        Case(tp=2, pp=2, scatter="on", m=3),
        Case(tp=2, pp=2, zero=2, activations="stage", dp=2),
    ]
    check_all([Own("parallel", case, 5) for case in cases])


@pytest.mark.parametrize(
    "pp", [pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_every_registered_schedule_of_whole_sequences(pp: int) -> None:
    cases = [case for name in names() for case in smallest(name, pp) if (case.slices or 1) == 1]
    by_name = {case.schedule: case for case in cases if not is_sliced(case)}
    assert len(by_name) >= 20
    check_all(
        [
            Own(("tuples", "split", "tied", "plain")[i % 4], case, 13)
            for i, case in enumerate(by_name.values())
        ]
    )


def is_sliced(case: Case) -> bool:
    from tests.parity.registry_cases import schedule_of

    return schedule_of(case).slices > 1


def test_the_partition_is_by_measured_work() -> None:
    """An embedding computes nothing, so the first of two stages gets more layers."""
    _, layout = settle(Own("plain", Case(pp=2), 7))
    assert [len(spec.layers) for spec in layout.stage_layers] == [5, 2]
