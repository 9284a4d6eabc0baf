"""Experts on several ranks: uneven counts, a rank without rows, groups and bytes as planned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from megapipe import TrainStep
from megapipe.distributed import collectives
from megapipe.optim.state_store import MASTER
from megapipe.plan.memory import model_memory
from megapipe.plan.traffic import step_traffic
from megapipe.plan.units import Units
from megapipe.testing import World, run_world
from tests.parity import mixture
from tests.parity.cases import Rows
from tests.parity.collective_recorder import recording
from tests.parity.forced_routing import chosen, evenly
from tests.parity.outcome import Outcome, local_copies
from tests.parity.ranks import Case, check_case, configure, run_case

SKEWED = Case(dp=2, ep=2, moe="top 2", vocab=301, m=2, zero=3)
EVEN = Case(dp=2, tp=2, sequence_parallel=True, ep=4, moe="top 2", model="llama", layers=2)

Exchange = tuple[tuple[int, ...], int, int]
"""An all-to-all: its ranks, and the bytes that this one sends and receives."""


@contextmanager
def exchanged(found: list[Exchange]) -> Iterator[None]:
    """Record all-to-alls."""
    begin = collectives.dist.all_to_all_single

    def spy(received: Tensor, sent: Tensor, *lengths: Any, group: Any, async_op: bool) -> Any:
        ranks = tuple(collectives.dist.get_process_group_ranks(group))
        found.append((ranks, sent.nbytes, received.nbytes))
        return begin(received, sent, *lengths, group=group, async_op=async_op)

    with mock.patch.object(collectives.dist, "all_to_all_single", spy):
        yield


def run_skewed(world: World) -> tuple[Outcome, list[Exchange]]:
    found: list[Exchange] = []
    with chosen([[1, 0]]), exchanged(found):
        outcome = run_case(world, SKEWED)
    return outcome, found


def test_all_tokens_choose_experts_of_one_rank() -> None:
    """The other rank's experts have no rows and no gradient; it exchanges as often, and as much."""
    results = run_world(2, run_skewed)
    with mock.patch.object(mixture, "choose", return_value=[1, 0]):
        check_case(SKEWED, [outcome for outcome, _ in results])
    first, second = (found for _, found in results)
    assert [ranks for ranks, _, _ in first] == [ranks for ranks, _, _ in second]
    assert first
    for (_, sent, received), (_, others, of_others) in zip(first, second, strict=True):
        assert sent + others == received + of_others
        assert 0 in (others, of_others), "the second rank computes no rows"
    for outcome, _ in results:
        for name, place, values in outcome.grads[0]:
            if ".moe.up." in name or ".moe.down." in name:
                assert values.any() == (place.offsets[0] < 2)


def run_even(world: World) -> tuple[list[Exchange], int]:
    config, layout = configure(EVEN)
    step = TrainStep(config, layout, world.mesh(EVEN.grid))
    found: list[Exchange] = []
    with evenly(), exchanged(found):
        step.train(0, Rows(EVEN))
    held = sum(shard.bucket.weights.nbytes for shard in step.optimizer.shards)
    return found, held


@pytest.mark.slow
def test_bytes_are_those_of_the_plan_where_experts_are_chosen_evenly() -> None:
    config, layout = configure(EVEN)
    planned = [e for e in step_traffic(Units(config, layout), 0) if e.collective == "all_to_all"]
    assert {(e.axis, e.members) for e in planned} == {("ep", 4)}
    for found, held in run_world(4, run_even):
        assert {ranks for ranks, _, _ in found} == {(0, 1, 2, 3)}
        assert len(found) == sum(e.count for e in planned)
        for sizes in ([sent for _, sent, _ in found], [received for *_, received in found]):
            assert sum(sizes) == sum(e.bytes for e in planned)
        assert held == model_memory(config, layout, 0).parameters


HELD = [
    replace(EVEN, ep=ep, zero=zero, dtype=dtype)
    for zero in (1, 2, 3)
    for ep, dtype in ((4, "bf16"), (2, "bf16"), (2, "fp64"))
]
"""Cases with one instance of each expert, or two."""


def lasting(step: TrainStep) -> int:
    """Return the bytes of weights, main gradients, master weights and states; a storage counts
    once."""
    tensors: list[Tensor] = []
    for shard in step.optimizer.shards:
        bucket, store = shard.bucket, shard.store
        tensors += [bucket.weights, shard.weights, *bucket.grads, *bucket.early_grads]
        tensors += [store.read(name, 0, 0) for name in (MASTER, *store.states)]
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def run_held(world: World) -> list[int]:
    """Return the bytes that each case holds after a step."""
    found = []
    for case in HELD:
        config, layout = configure(case)
        step = TrainStep(config, layout, world.mesh(case.grid))
        step.train(0, Rows(case))
        step.settle()
        found.append(lasting(step))
    return found


@pytest.mark.full
def test_memory_of_experts_is_that_of_the_plan() -> None:
    """Their gradients, masters and states too, by the ZeRO stage of the ranks that have the same
    ones."""
    planned = [model_memory(*configure(case), 0).persistent for case in HELD]
    for rank in run_world(4, run_held):
        for case, found, wanted in zip(HELD, rank, planned, strict=True):
            assert found == wanted, case.name


PYRAMID = Case(dp=4, ep=2, moe="pyramid", layers=3, tied=False, vocab=512)
"""Case with layers of four, eight and twelve experts, half of which are on a rank."""
WHOLE = replace(PYRAMID, dp=2, tp=2, ep=4, sequence_parallel=True)
"""Case in which a rank's experts are nowhere else."""


def run_recorded(world: World, case: Case) -> list[tuple[str, tuple[int, ...], int]]:
    """Return the collectives of a step by their groups, with the values of the whole tensor."""
    config, layout = configure(case)
    step = TrainStep(config, layout, world.mesh(case.grid))
    with recording() as recorder:
        step.train(0, Rows(case))
    local_copies(step)  # weights in flight to other ranks: one that ends loses them
    step.mesh.barrier()
    return [(call.name, call.ranks, call.elements) for call in recorder.calls]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(PYRAMID, id="two copies"),
        pytest.param(WHOLE, id="one copy", marks=pytest.mark.slow),
    ],
)
def test_experts_and_other_weights_are_summed_over_their_groups(case: Case) -> None:
    """Each is summed once a step, experts over the ranks that have the same ones, as planned."""
    config, layout = configure(case)
    planned = step_traffic(Units(config, layout), 0)
    numel = {True: 0, False: 0}
    for spec in layout.model.parameters(layout.model.whole):
        part = case.ep if spec.over_ep else case.tp if spec.split else 1
        numel[spec.over_ep] += prod(spec.shape) // part
    for rank, calls in enumerate(run_world(4, run_recorded, case)):
        others = tuple(r for r in range(4) if r % case.tp == rank % case.tp)
        copies = tuple(r for r in range(4) if r % case.ep == rank % case.ep)
        shards = tuple(r for r in range(4) if r // case.tp == rank // case.tp)
        found = [
            (ranks, values)
            for name, ranks, values in calls
            if name == "reduce_scatter" and ranks != shards  # of a sequence
        ]
        sums = dict(found)
        assert len(found) == len(sums)
        wanted = {others: numel[False]} | ({copies: numel[True]} if len(copies) > 1 else {})
        assert sums.keys() == wanted.keys()
        for ranks, values in sums.items():
            assert wanted[ranks] <= values < wanted[ranks] * 1.01, "padding is small"
        of_plan = [e for e in planned if e.what == "gradients"]
        assert sorted((e.members, e.bytes) for e in of_plan) == sorted(
            (len(ranks), 8 * values) for ranks, values in sums.items()
        )


STAGES = Case(
    pp=2, in_process=True, schedule="interleaved_1f1b", chunks=2, dp=4, ep=2, moe="top 2", layers=4
)


@pytest.mark.full
def test_experts_are_summed_when_their_stage_is_through_and_beside_others() -> None:
    """So exchanges of other stages of a rank may have to wait for them, and of their own none."""
    for case in (PYRAMID, STAGES):
        _, layout = configure(case)
        stages = sum(bool(spec.layers) for spec in layout.stage_layers)
        assert (stages > 1) == (case is STAGES)
        for rank, calls in enumerate(run_world(4, run_recorded, case)):
            copies = tuple(r for r in range(4) if r % 2 == rank % 2)
            order = [
                "sum" if ranks == copies else name
                for name, ranks, _ in calls
                if name == "all_to_all" or (name == "reduce_scatter" and ranks == copies)
            ]
            assert order.count("sum") == stages
            assert order[-1] == "sum"
            assert ("all_to_all" in order[order.index("sum") :]) == (stages > 1)


FIRST = Case(dp=2, moe="step, first", layers=2)


@pytest.mark.full
def test_first_choices_are_told_as_planned() -> None:
    """Beside all, in the totals of a step; nothing else is told for the balance term."""
    config, layout = configure(FIRST)
    planned = step_traffic(Units(config, layout), 0)
    assert {e.axis for e in planned if e.what in "FB"} == set()
    (totals,) = (e.bytes // 8 for e in planned if e.what == "totals")
    config, layout = configure(replace(FIRST, moe="groups", layers=3))  # two layers of as many
    (of_all,) = (e.bytes // 8 for e in step_traffic(Units(config, layout), 0) if e.what == "totals")
    assert totals - of_all == FIRST.dp * FIRST.layers * 6
    for calls in run_world(2, run_recorded, FIRST):
        assert ("all_gather", (0, 1), totals) in calls
        assert {values for name, _, values in calls if name == "all_gather" and values < 100} == {
            FIRST.dp,  # unmasked tokens
            totals,
        }


@pytest.mark.slow
def test_choices_are_told_as_planned_where_layers_have_other_numbers_of_experts() -> None:
    """Rows for each expert over ep, and the totals of a step."""
    config, layout = configure(PYRAMID)
    planned = step_traffic(Units(config, layout), 0)
    (told,) = (e for e in planned if (e.axis, e.collective) == ("ep", "all_gather"))
    assert told.bytes == PYRAMID.ep * (4 + 8 + 12) * 8 * PYRAMID.m
    (totals,) = (e for e in planned if e.what == "totals")
    for calls in run_world(4, run_recorded, PYRAMID):
        gathered = [(len(ranks), values) for name, ranks, values in calls if name == "all_gather"]
        of_layers = [values for members, values in gathered if members == PYRAMID.ep]
        assert [n for n in of_layers if n in (8, 16, 24)] == [8, 16, 24] * PYRAMID.m
        assert (totals.members, totals.bytes // 8) in gathered
