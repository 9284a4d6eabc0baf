"""Layers with experts in layouts, schedules and recomputation, beside the parity matrix."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megapipe import TrainStep
from megapipe.layers.moe import routing
from megapipe.layers.weight_grad import WeightGradQueue, WeightGradTask
from megapipe.schedule.generators import accepts, names
from megapipe.testing import World, run_world
from tests.parity import moe_faults, reference
from tests.parity.bitwise import assert_bitwise, outcomes_of
from tests.parity.cases import Rows, settings
from tests.parity.faults import outcomes_of_faults
from tests.parity.moe_faults import FAULTS
from tests.parity.pair_runs import check_cases
from tests.parity.ranks import Case, Outcome, check_case, configure, run_case
from tests.parity.registry_cases import smallest
from tests.parity.stopped_runs import (
    HALF,
    STEPS,
    Play,
    assert_continues,
    assert_same_files,
    checkpoint,
    run,
)
from tests.parity.tiers import in_parts, one_of, selected

PIPELINE = Case(pp=2, m=3, moe="top 2", masked=0.3)
ALONE = Case(moe="top 2", model="llama")
TENSOR = replace(ALONE, tp=2, sequence_parallel=True)
SPLIT = replace(PIPELINE, schedule="zb_h1", in_process=True, m=4, moe="capacity, choice")
DATA = replace(ALONE, dp=2)
UNMASKED = [
    Case(moe="capacity, choice", masked=1.0, clip=None),
    replace(TENSOR, moe="shared, gated", activations="stage", zero=2, clip=None, masked=1.0),
]
PYRAMID = [
    replace(DATA, ep=2, moe="pyramid", zero=3, masked=0.3, activations="full"),
    replace(PIPELINE, moe="pyramid", schedule="zb_h1", layers=3),
]


@pytest.mark.full
def test_a_batch_without_an_unmasked_token() -> None:
    """All other values of experts beside those of layouts: the parity matrix."""
    check_cases(UNMASKED)


def test_a_pyramid() -> None:
    """The model is PR-MoE's, with a shared MLP and softmax over both (DeepSpeed-MoE)."""
    check_cases(PYRAMID)


GSHARD = Case(m=4, batch=1, moe="gshard", layers=2, masked=0.3)


@pytest.mark.full
def test_gshard_is_the_same_on_any_number_of_ranks() -> None:
    """Second experts are random, there is a capacity, choices are dropped by choice, and the
    auxiliary loss counts first choices. The same choices are dropped, and some are."""
    found = []
    for ranks in (1, 2, 4):
        case = replace(GSHARD, dp=ranks, ep=ranks, m=GSHARD.m // ranks)
        outcomes = run_world(ranks, run_case, case)
        check_case(case, outcomes)
        found.append([outcomes[0].losses, *outcomes[0].routing])
    one, *others = found
    for numbers, *same in zip(one, *others, strict=True):
        for of_ranks in same:
            assert of_ranks == pytest.approx(numbers, rel=1e-12)
    for dropped in (told[3 :: 4 + 4] for told in one[1:]):
        assert len(dropped) == GSHARD.layers
        assert min(dropped) > 0


CROWDED = Case(
    dp=2, ep=2, moe="pyramid", layers=2, expert_chunks=2, masked=0.3, zero=2, batch=1, vocab=302
)


@contextmanager
def all_on_one_expert(number: int) -> Iterator[None]:
    """Have the router of the last layer send every token to one expert, by a case's initial
    weights."""
    begin = reference.init_random

    def crowding(model: Any, **given: Any) -> reference.Params:
        params = begin(model, **given)
        params["layers.1.mlp_norm.bias"] += 2
        params["layers.1.moe.router.weight"][number] += 1
        return params

    with mock.patch.object(reference, "init_random", crowding):
        yield


def run_crowded(world: World) -> Outcome:
    with all_on_one_expert(6):
        return run_case(world, CROWDED)


def test_all_choices_on_one_expert_of_a_layer() -> None:
    """Nothing is dropped, and all is as in the loop over tokens (MegaBlocks)."""
    outcomes = run_world(2, run_crowded)
    with all_on_one_expert(6):
        check_case(CROWDED, outcomes)
    tokens = CROWDED.dp * CROWDED.m * CROWDED.sequence
    for told in outcomes[0].routing:
        first, last = told[:8], told[8:]
        assert list(last[4:]) == [tokens * (expert == 6) for expert in range(8)]
        assert max(first[4:]) < tokens
        assert first[3] == last[3] == 0


def of_every_schedule(least: int = 1) -> Iterator[Case]:
    """Yield cases of `least` micro-batches or a few more. Slices fill an expert's capacity by
    position."""
    for name in names():
        moe = "capacity, position" if "slices" in accepts(name) else "capacity, choice"
        for case in smallest(name, 2, least):
            yield replace(case, moe=moe, in_process=True, masked=0.3)


@pytest.mark.slow
def test_every_schedule() -> None:
    check_cases(list(of_every_schedule()))


@one_of(10)
def test_every_schedule_with_experts_on_two_ranks(some: slice) -> None:
    check_cases([replace(case, dp=2, ep=2) for case in of_every_schedule()][some])


@one_of(12)
def test_every_schedule_between_processes_with_experts_on_two_ranks(some: slice) -> None:
    """Rows travel to experts beside the messages of a pipeline."""
    cases = list(of_every_schedule(least=3))[some]
    check_cases([replace(case, dp=2, ep=2, in_process=False) for case in cases])


@pytest.mark.full
@in_parts("moe", ["top 2", "groups", "capacity, score", "random"], default=["capacity, score"])
def test_choices_in_a_narrow_type_are_those_of_the_scores(moe: str) -> None:
    """Other ones are noticed: another expert, one that is dropped, one that is not."""
    case = Case(moe=moe, dtype="bf16")
    (outcome,) = run_world(1, run_case, case)
    check_case(case, [outcome])
    layer, numbers, choices = outcome.chosen[1][0]
    experts = settings(case).model.moe.num_experts
    unlike = np.where(choices < 0, ~choices, choices)
    free = [next(e for e in range(experts) if e not in row) for row in unlike]
    changes = [np.where(np.arange(choices.shape[1]) == 0, np.array(free)[:, None], choices)]
    changes.append(np.where(np.arange(len(choices))[:, None] == 0, ~choices, choices))
    for changed in changes:
        outcome.chosen[1][0] = layer, numbers, changed.astype(choices.dtype)
        with pytest.raises(AssertionError, match=r"layer \d+: .*(are not the choices|are dropped)"):
            check_case(case, [outcome])


def test_which_choices_are_dropped_is_compared() -> None:
    """In fp64, where the reference chooses by itself: as many others are noticed."""
    case = Case(moe="capacity, score", layers=2)
    (outcome,) = run_world(1, run_case, case)
    check_case(case, [outcome])
    *_, choices = outcome.chosen[1][0]
    (one, *_), (other, *_) = np.argwhere(choices < 0), np.argwhere(choices >= 0)
    for token, number in (one, other):
        choices[token, number] = ~choices[token, number]
    with pytest.raises(AssertionError, match="are dropped or are not"):
        check_case(case, [outcome])


def queued(world: World, names: Sequence[str | None]) -> list[Counter[str]]:
    """Count the tasks that wait for ``W`` in a step of one micro-batch, by setting."""
    put = WeightGradQueue.put
    found: list[Counter[str]] = []

    def counted(self: WeightGradQueue, *tasks: WeightGradTask, later: bool = False) -> None:
        found[-1].update(type(task).__name__ for task in tasks)
        put(self, *tasks, later=later)

    for moe in names:
        case = Case(moe=moe, layers=4, m=1, schedule="zb_h1")
        config, layout = configure(case)
        step = TrainStep(config, layout, world.mesh(case.grid))
        found.append(Counter())
        with mock.patch.object(WeightGradQueue, "put", counted):
            step.train(0, Rows(case))
    return found


def test_what_waits_for_W() -> None:
    """In an MoE layer, two products of the experts and the router's one wait. The MLP's two are
    replaced by those of a shared MLP and its gate, or by none."""
    ((dense, plain, shared, half),) = run_world(
        1, queued, [None, "top 2", "shared, gated", "every second"]
    )
    for found, layers, beside in ((plain, 4, 0), (shared, 4, 3), (half, 2, 2)):
        assert found.pop("ExpertsTask") == 2 * layers
        assert found.pop("RouterTask") == layers
        found["LinearTask"] += (2 - beside) * layers
        assert found == dense


IN_CI = [
    moe_faults.gradient_through_the_weights_dropped,
    moe_faults.places_counted_per_rank,
    moe_faults.counted_again_where_it_is_run_again,
    moe_faults.biases_of_experts_not_weighted,
    moe_faults.experts_reduced_over_the_dense_group,
    moe_faults.gradients_of_experts_divided_by_ep,
    moe_faults.gradient_of_an_expert_without_rows_stays,
    moe_faults.rows_come_back_in_the_order_of_experts,
    moe_faults.experts_of_other_tp_ranks_left_out_of_the_norm,
    moe_faults.router_gradient_of_one_shard_only,
    moe_faults.balance_counts_not_summed_over_cp,
]
"""Faults: one of each kind that users of other systems have met, and others."""


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return outcomes_of_faults(selected(request, "fault", FAULTS))


@in_parts("fault", FAULTS, default=IN_CI[::6], full=IN_CI, ids=lambda fault: fault.__name__)
def test_parity_notices(fault: Any, outcomes: dict[str, list[Any]]) -> None:
    with pytest.raises(AssertionError, match=r"difference is|two ranks own it"):
        check_case(FAULTS[fault], outcomes[fault.__name__])


@pytest.mark.full
def test_the_cases_of_faults_pass_without() -> None:
    check_cases(list(dict.fromkeys(FAULTS[fault] for fault in IN_CI)))


@pytest.mark.full
def test_bitwise_where_schedules_and_recomputation_differ() -> None:
    """Split backward or not, on the same placement; in recomputation the same products."""
    kept = replace(ALONE, model="gpt2", moe="residual", m=3)
    cases = [
        *(SPLIT, replace(SPLIT, swap=True)),
        *(
            replace(kept, activations=a)
            for a in ("keep", "full", "stage", "selective", "experts again")
        ),
    ]
    one, other, *others = outcomes_of(cases)
    assert_bitwise(other, one)
    assert [o.routing for o in other] == [o.routing for o in one]
    for again in others[1:]:
        assert_bitwise(again, others[0])


@pytest.mark.full
def test_bitwise_where_schedules_differ_with_experts_on_two_ranks() -> None:
    """Whole experts on each, or a half of each."""
    split = replace(SPLIT, dp=2)
    kinds = replace(split, ep=2), replace(split, etp=2)
    found = outcomes_of([replace(case, swap=swap) for case in kinds for swap in (False, True)])
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert_bitwise(other, one)
        assert [o.routing for o in other] == [o.routing for o in one]


def choices_made(world: World, case: Case) -> int:
    with mock.patch.object(routing, "route_tokens", side_effect=routing.route_tokens) as chosen:
        run_case(world, case, validate=False)
    return chosen.call_count


@in_parts(
    "activations",
    ["keep", "full", "stage", "selective", "experts again"],
    default=["experts again"],
    full=["full"],
)
def test_a_choice_is_made_once(activations: str) -> None:
    """In each layer, micro-batch and step, however often it is run."""
    case = replace(ALONE, activations=activations, layers=2, m=3)
    assert run_world(1, choices_made, case) == [2 * 3 * case.steps]


def balances(routing: Sequence[float], choices: Sequence[int]) -> list[float]:
    """Return the auxiliary loss of each layer; `choices` has the layers' numbers of choice
    counts."""
    starts = itertools.accumulate([0, *(4 + count for count in choices[:-1])])
    return [routing[start + 1] / routing[start] for start in starts]


@pytest.mark.full
def test_resumed_bitwise_and_loaded_in_another_layout(tmp_path: Path) -> None:
    base = {
        "model.layers": "3",
        "model.moe.num_experts": "[4,8]",
        "model.moe.first_dense_layers": "1",
        "model.moe.shared_ffn_hidden": "8",
        "model.moe.top_k": "2",
        "model.moe.jitter": "0.3",
        "model.moe.second_expert": "random",
        "model.moe.capacity_factor": "1.0",
        "model.moe.bias_update_rate": "0.01",
        "model.moe.aux_loss_scope": "step",
        "model.moe.aux_loss_choices": "first",
        "parallel.dp": "2",
        "parallel.pp": "2",
        "parallel.ep": "2",
        "optimizer.zero": "2",
    }
    other = {**base, "parallel.dp": "4", "parallel.pp": "1", "optimizer.zero": "3"}
    whole, _, resumed = run(
        tmp_path,
        Play("whole", base),
        Play("part", base, stop_after=HALF),
        Play("part", base),
    )
    assert_continues(resumed, whole)
    assert_same_files(checkpoint(tmp_path, "part", STEPS), checkpoint(tmp_path, "whole", STEPS))
    other["checkpoint.load"] = str(checkpoint(tmp_path, "whole", HALF))
    other["train.stop_after"] = str(HALF + 1)
    (first, *_), (changed, *_) = run(
        tmp_path,
        Play("moved", other),
        Play("changed", {**other, "model.moe.aux_loss_choices": "all"}),
    )
    assert first["error"] is changed["error"] is None
    (mine,) = first["steps"].values()
    theirs = whole[0]["steps"][HALF + 1]
    assert mine.routing == pytest.approx(theirs.routing, rel=1e-6)
    assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
    (anew,) = changed["steps"].values()
    assert balances(anew.routing, [4, 8]) == pytest.approx([1, 1], rel=1e-6)
    assert 1 not in [round(each, 6) for each in balances(mine.routing, [2 * 4, 2 * 8])]
    text = (tmp_path / "runs/changed/log.jsonl").read_text()
    assert "model.moe.aux_loss_choices was first and is all" in text
