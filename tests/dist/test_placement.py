"""Expert replicas on other ranks, in training: all that is computed is that of one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from megapipe import TrainStep
from megapipe.distributed import collectives
from megapipe.distributed.axis import Axis
from megapipe.experts.map import ExpertMap
from megapipe.layers.moe import replicas, transfer
from megapipe.layers.moe.replicas import ExpertReplicas
from megapipe.plan.memory import model_memory
from megapipe.plan.moe.placement import Policy
from megapipe.plan.traffic import REPLICA_TRAFFIC, step_traffic
from megapipe.plan.units import Units
from megapipe.testing import World, run_world
from megapipe.train.moe import expert_rebalancing
from megapipe.train.moe.expert_rebalancing import ExpertRebalancer
from tests.parity.cases import LR, SLOW, Rows, validation_rows, validation_samples
from tests.parity.collective_recorder import recording
from tests.parity.faults import outcomes_of_faults
from tests.parity.outcome import Parts, own_values
from tests.parity.placement_faults import COPIED, FAULTS
from tests.parity.ranks import Case, Outcome, check_case, configure, run_case
from tests.parity.reference import assert_weights_close
from tests.parity.stopped_runs import STEPS, Play, assert_continues, run
from tests.parity.tiers import in_parts, one_of, selected

Copies = tuple[tuple[int, ...], ...]
FAST = 1e9
"""TFLOP/s of devices that complete any row at once."""
TENSOR = replace(COPIED, dp=1, tp=2, sequence_parallel=True, moe="groups", m=3)
CONTEXT = replace(COPIED, dp=1, cp=2, activations="full", placement="one slot", expert_chunks=2)
COPIES_OF_COPIES = replace(COPIED, dp=4)
BOTH = replace(
    COPIES_OF_COPIES,
    dp=2,
    tp=2,
    etp=2,
    sequence_parallel=True,
    moe="capacity, choice",
    dispatch="hierarchical",
    node=2,
    expert_chunks=2,
)
SPLIT = Case(
    pp=2,
    dp=2,
    ep=2,
    moe="shared, gated",
    schedule="zb_h1",
    m=3,
    zero=2,
    placement="changing",
    steps=3,
)
SMALL = [
    COPIED,
    replace(COPIED, placement="shadows", dispatch="all_gather", expert_chunks=2, model="gpt2"),
    TENSOR,
    CONTEXT,
    replace(COPIED, zero=0, placement="every second step", look_ahead=2, steps=4),
    replace(COPIED, zero=2, activations="experts again", codec="int8", moe="step, first"),
    replace(COPIED, pp=2, in_process=True, schedule="interleaved_1f1b", chunks=2, layers=4),
    replace(COPIED, dtype="bf16"),
]
LARGE = [
    *(replace(COPIES_OF_COPIES, zero=zero) for zero in (0, 1, 2)),
    replace(COPIES_OF_COPIES, zero=2, shard_size=1, clip=None),
    replace(COPIES_OF_COPIES, ep=4, placement="shadows", dispatch="hierarchical", node=2),
    replace(COPIES_OF_COPIES, ep=4, moe="pyramid, biased", layers=3, model="gpt2"),
    BOTH,
    SPLIT,
    replace(SPLIT, schedule="chimera", m=4, tied=False, zero=1),
    replace(SPLIT, schedule="interleaved_1f1b", chunks=2, m=2, expert_chunks=2, layers=4),
]


def run_watched(world: World, cases: list[Case]) -> list[tuple[Outcome, list[Copies]]]:
    """Return each case's outcome on this rank, and the replicas of all maps that it has taken
    over."""
    found = []
    for case in cases:
        taken: list[Copies] = []
        with watching(taken):
            found.append((run_case(world, case), taken))
    return found


@contextmanager
def watching(taken: list[Copies]) -> Iterator[None]:
    take = ExpertReplicas.set_map

    def spy(self: ExpertReplicas, after: ExpertMap) -> None:
        taken.append(after.replicas)
        take(self, after)

    with mock.patch.object(ExpertReplicas, "set_map", spy):
        yield


def check(cases: list[Case]) -> None:
    """Check all against the reference, and that there were replicas, not always the same."""
    results = run_world(cases[0].world, run_watched, cases, timeout_s=60 + 15 * len(cases))
    for case, ranks in zip(cases, zip(*results, strict=True), strict=True):
        try:
            check_case(case, [outcome for outcome, _ in ranks])
        except AssertionError as error:
            raise AssertionError(f"{case.name}: {error}") from None
        for _, taken in ranks:
            assert any(any(copies) for copies in taken), f"{case.name}: no copies"
        assert len({copies for _, taken in ranks for copies in taken}) > 1 or (
            case.placement == "shadows"
        ), f"{case.name}: always the same"


@pytest.mark.full
def test_copies_change_no_result() -> None:
    """Shadows are exact, in chunks too (FasterMoE)."""
    check(SMALL[:2])


@one_of(6)
@pytest.mark.parametrize("cases", [SMALL[2:], LARGE], ids=["2", "4"])
def test_copies_change_no_result_in_more_layouts(cases: list[Case], some: slice) -> None:
    check(cases[some])


GIVEN = [[3], [], [0, 1], []]
"""Replicas of four experts on four ranks, two of which have none."""


def given(node: int) -> Policy:
    """Return a policy of the replicas GIVEN on four ranks; on two ranks, of one expert on each."""
    return lambda present, rows, totals: present.with_replicas(
        GIVEN if present.ranks == 4 else [[2], [0]]
    )


@contextmanager
def copies_given() -> Iterator[None]:
    with mock.patch.object(expert_rebalancing, "by_balance", given):
        yield


def run_given(world: World, case: Case) -> Outcome:
    with copies_given():
        return run_case(world, case)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(COPIED, id="two ranks"),
        pytest.param(replace(COPIED, dp=4, ep=4), id="some without", marks=pytest.mark.slow),
    ],
)
def test_an_expert_on_two_ranks_equals_one(case: Case) -> None:
    """The reference has each expert once, and computes the same."""
    check_case(case, run_world(case.world, run_given, case))


def decided(world: World, speeds: list[tuple[float, ...]]) -> list[list[ExpertMap]]:
    """Return maps by shadows, for each of these TFLOP/s that a rank takes its own device to
    have."""
    case, found = replace(COPIED, placement="shadows"), []
    for of_ranks in speeds:
        config, layout = configure(case)
        plan = config.plan.model_copy(update={"peak_tflops": of_ranks[world.rank]})
        config = config.model_copy(update={"plan": plan})
        step = TrainStep(config, layout, world.mesh(case.grid))
        told = [0.0, 0.0, 0.0, 0.0, *(20.0 / (1 + e) for e in range(config.model.moe.num_experts))]
        step.maps.after_update(0, told * case.layers)
        found.append([places.map for places in step.maps.replicas.values()])
    return found


def test_the_speed_of_the_first_rank_s_device_decides() -> None:
    """On all ranks, whatever each takes its own to be: shadows are the same everywhere."""
    first, second = run_world(2, decided, [(SLOW, FAST), (SLOW, SLOW), (FAST, FAST)])
    assert first == second
    mixed, slow, fast = first
    assert mixed == slow != fast


class Unread(NamedTuple):
    """A run, none of whose weights were read before its end."""

    losses: list[float]
    validation: list[float]
    """Validation losses after each step but the first."""
    weights: Parts


@contextmanager
def arriving_late() -> Iterator[None]:
    """Make weights that are sent to replicas NaN until they are waited for."""
    begin = collectives.start_all_to_all

    def late(*given: Any) -> tuple[Tensor, collectives.Wait]:
        coming, wait = begin(*given)
        received = torch.full_like(coming, torch.nan)

        def arrive() -> None:
            wait()
            received.copy_(coming)

        return received, arrive

    with mock.patch.object(replicas, "start_all_to_all", late):
        yield


def run_unread(world: World, cases: list[Case]) -> list[Unread]:
    found = []
    for case in cases:
        config, layout = configure(case)
        step = TrainStep(config, layout, world.mesh(case.grid))
        losses, validation = [], []
        with arriving_late():
            for number in range(case.steps):
                (result,) = step.train(number, Rows(case))
                losses.append(result.loss)
                if number:
                    held_out = validation_rows(case), validation_samples(case)
                    validation.append(step.evaluate(*held_out).loss)
        assert any(any(each.map.replicas) for each in step.maps.replicas.values()) == (
            case.placement != "static"
        )
        found.append(Unread(losses, validation, own_values(step.optimizer)["model"]))
    return found


def unread(like: Case) -> list[Case]:
    """Return cases with replicas that change after each step, that stay for two steps, and without
    any."""
    placements = "changing", "every second step", "static"
    return [replace(like, placement=placement, steps=4) for placement in placements]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(COPIED, id="whole"),
        pytest.param(replace(COPIED, dp=4, zero=1), id="gathered first", marks=pytest.mark.full),
    ],
)
def test_weights_of_copies_are_awaited_where_nobody_reads_them_in_between(case: Case) -> None:
    """They are, as in a run, in flight from the update into the next step, or its validation."""
    for *copied, static in run_world(case.world, run_unread, unread(case)):
        wanted = {(name, box): torch.from_numpy(values) for name, box, values in static.weights}
        for each in copied:
            assert each.losses == pytest.approx(static.losses, rel=1e-12)
            assert each.validation == pytest.approx(static.validation, rel=1e-12)
            for name, box, values in each.weights:
                like = {name: wanted[name, box]}
                assert_weights_close({name: torch.from_numpy(values)}, like, LR)


class Exchange(NamedTuple):
    ranks: tuple[int, ...]
    what: str
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    bytes: int
    """Bytes sent."""


@contextmanager
def exchanged(found: list[Exchange]) -> Iterator[None]:
    """Record all-to-alls: of rows, and of replicas."""
    begin = collectives.start_all_to_all

    def spied(what: str) -> Any:
        def spy(tensor: Tensor, axis: Axis, sends: list[int], receives: list[int]) -> Any:
            lengths = tuple(sends), tuple(receives)
            found.append(Exchange(axis.ranks, what, *lengths, tensor.nbytes))
            return begin(tensor, axis, sends, receives)

        return spy

    with (
        mock.patch.object(transfer, "start_all_to_all", spied("rows")),
        mock.patch.object(replicas, "start_all_to_all", spied("copies")),
    ):
        yield


@contextmanager
def silent(maps: ExpertRebalancer) -> Iterator[None]:
    """Have replicas chosen without any message between ranks."""
    decide, chosen = maps.after_update, []

    def spied(step: int, told: Sequence[float]) -> str | None:
        with recording() as recorder:
            line = decide(step, told)
        chosen.append(step)
        assert not recorder.calls
        return line

    with mock.patch.object(maps, "after_update", spied):
        yield
    assert chosen


def run_exchanges(world: World, case: Case) -> tuple[list[Exchange], int]:
    """Return the exchanges of the second step, which has replicas, and the bytes of allocated
    weights."""
    config, layout = configure(case)
    with copies_given():
        step = TrainStep(config, layout, world.mesh(case.grid))
        step.train(0, Rows(case))
        found: list[Exchange] = []
        with exchanged(found), silent(step.maps):
            step.train(1, Rows(case))
    held = sum(shard.bucket.weights.nbytes for shard in step.optimizer.shards)
    for places in step.maps.replicas.values():
        held += sum(weights.nbytes for weights in places._weights.values())
    return found, held


@in_parts("etp", [1, 2], full=[1])
def test_all_members_of_a_group_exchange_in_one_order_also_without_copies(etp: int) -> None:
    case = replace(COPIED, dp=2, tp=2, sequence_parallel=True, ep=4 // etp, etp=etp, zero=1)
    of_ranks = [found for found, _ in run_world(4, run_exchanges, case)]
    for together in zip(*of_ranks, strict=True):
        assert len({(e.ranks, e.what) for e in together}) == 1
        received = [e.receives for e in together]
        assert list(zip(*(e.sends for e in together), strict=True)) == received
    of_copies = [[e for e in found if e.what == "copies"] for found in of_ranks]
    assert {len(found) for found in of_copies} == {2 * case.layers}, "weights and gradients"
    if etp == 1:
        nothing = [e for e in of_copies[1] if not any(e.receives)]
        assert len(nothing) == case.layers, "a rank without copies gets gradients alone"


STAYING = {"placement": "every second step", "steps": 4}
"""Settings by which replicas are chosen after the second step, and are the same in the third and
the fourth."""
WHOLE = [COPIED, replace(COPIED, **STAYING), SPLIT, replace(COPIES_OF_COPIES, zero=0, **STAYING)]
"""Cases in which owners have the whole weights when the update is done."""
GATHERED = [COPIES_OF_COPIES, replace(COPIES_OF_COPIES, zero=2, **STAYING)]
"""Cases in which each of two ranks has a half of what it has updated."""


def run_in_order(world: World, cases: list[Case]) -> list[list[list[str]]]:
    """Return the order of exchanges of rows, those of the replicas of all local layers, and the
    update, for each step of each case."""
    results = []
    for case in cases:
        config, layout = configure(case)
        with copies_given():
            step = TrainStep(config, layout, world.mesh(case.grid))
            results.append([phases_of(step, number, case) for number in range(case.steps)])
    return results


def phases_of(step: TrainStep, number: int, case: Case) -> list[str]:
    found: list[Exchange] = []
    update = step.optimizer.update

    def spied(lr: float, factor: float) -> None:
        found.append(Exchange((), "update", (), (), 0))
        update(lr, factor)

    with exchanged(found), mock.patch.object(step.optimizer, "update", spied):
        step.train(number, Rows(case))
    phases = [(what, len([*own])) for what, own in itertools.groupby(e.what for e in found)]
    layers = len(step.maps.replicas)
    assert all(count == layers for what, count in phases if what == "copies")
    return [what for what, _ in phases]


@in_parts("world", [2, 4], full=[4])
def test_weights_of_copies_leave_before_all_rows(world: int) -> None:
    """They leave right after the update, or at the beginning of a step where owners gather them
    first; also for replicas that stay the same. Gradients return in between, when all rows are back
    (Prophet)."""
    cases = [case for case in (*WHOLE, *GATHERED) if case.world == world]
    of_ranks = run_world(world, run_in_order, cases, timeout_s=60 + 15 * len(cases))
    for case, steps in itertools.chain(*(zip(cases, found, strict=True) for found in of_ranks)):
        before, after = ([], ["copies"]) if case in WHOLE else (["copies"], [])
        first = 2 if case.placement == "every second step" else 1
        wanted = [["rows", "update"]] * (first - 1)
        wanted.append(["rows", "update", *after])
        wanted += [[*before, "rows", "copies", "update", *after]] * (case.steps - first)
        assert steps == wanted, case.name


@pytest.mark.full
def test_bytes_of_copies_are_those_of_the_plan_where_slots_are_full() -> None:
    """Two ranks with one slot each, which both fill with an expert of the other."""
    case = replace(COPIED, placement="one slot")
    config, layout = configure(case)
    planned = [e for e in step_traffic(Units(config, layout), 0) if e.what in REPLICA_TRAFFIC]
    assert [(e.axis, e.members, e.count) for e in planned] == [("ep", 2, 2)] * 2
    every = [e for e in step_traffic(Units(config, layout), 0) if e.collective == "all_to_all"]
    rows = [e for e in every if e not in planned]
    for found, held in run_world(2, run_exchanges, case):
        of_copies = [e for e in found if e.what == "copies"]
        assert sum(e.bytes for e in of_copies) == sum(e.bytes for e in planned)
        assert sum(e.wire for e in planned) == sum(e.bytes for e in planned)
        assert len(found) - len(of_copies) == sum(e.count for e in rows)
        assert held == model_memory(config, layout, 0).parameters


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["all_to_all", "hierarchical"])
def test_a_resumed_run_has_the_copies_of_the_one_that_was_stopped(
    tmp_path: Path, dispatch: str
) -> None:
    """Bitwise, also where copies were chosen steps before the checkpoint; the step says when."""
    base = {
        "model.layers": "2",
        "model.moe.num_experts": "8",
        "parallel.dp": "4",
        "parallel.ep": "4",
        "experts.dispatch": dispatch,
        "experts.rebalance": "balance",
        "experts.replica_slots": "2",
        "experts.rebalance_every": "3",
        "checkpoint.every": "2",
    }
    if dispatch == "hierarchical":
        base |= {"experts.ranks_per_node": "2", "model.moe.aux_loss_scope": "step"}
        base |= {"model.moe.aux_loss_choices": "first"}
    plays = [Play("part", base, stop_after=stop) for stop in (4, 6, None)]
    whole, *resumed = run(tmp_path, Play("whole", base), *plays)
    assert [part[0]["first_step"] for part in resumed] == [0, 4, 6]
    assert sorted(resumed[-1][0]["steps"]) == list(range(7, STEPS + 1))
    assert_continues(resumed[-1], whole)
    notes = {step: result.note for step, result in whole[0]["steps"].items() if result.note}
    assert list(notes) == [3, 6]
    assert notes[3].startswith("step 3: experts with replicas: ")
    static = {key: value for key, value in base.items() if not key.startswith("experts.")}
    (without,) = run(tmp_path, Play("without", static))
    for step, result in without[0]["steps"].items():
        assert result.loss == pytest.approx(whole[0]["steps"][step].loss, rel=1e-5)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return outcomes_of_faults(selected(request, "fault", FAULTS))


@in_parts("fault", FAULTS, full=6, ids=lambda fault: fault.__name__)
def test_parity_notices(fault: Any, outcomes: dict[str, list[Any]]) -> None:
    with pytest.raises(AssertionError, match=r"difference is|two ranks own it"):
        check_case(FAULTS[fault], outcomes[fault.__name__])
