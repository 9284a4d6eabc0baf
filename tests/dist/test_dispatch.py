"""Forms of dispatch to experts on other ranks: each computes what all-to-alls of all rows do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from torch import Tensor

from megapipe import TrainStep
from megapipe.distributed.axis import Axis
from megapipe.layers.moe import transfer
from megapipe.layers.moe.dispatch import Dispatcher
from megapipe.layers.moe.dispatchers import all_gather, fetch
from megapipe.layers.moe.dispatchers.all_gather import AllGatherDispatcher
from megapipe.layers.moe.dispatchers.all_to_all import AllToAllDispatcher, HierarchicalDispatcher
from megapipe.layers.moe.dispatchers.fetch import FetchDispatcher
from megapipe.layers.moe.experts import RoutedExperts
from megapipe.plan.traffic import operation_transfers
from megapipe.plan.unit import OPERATIONS
from megapipe.plan.units import Units
from megapipe.testing import World, run_world
from tests.parity.bitwise import check_groups
from tests.parity.cases import Rows
from tests.parity.dispatch_faults import FAULTS
from tests.parity.faults import outcomes_of_faults
from tests.parity.forced_routing import chosen, evenly
from tests.parity.moved_experts import layers_of
from tests.parity.outcome import Outcome
from tests.parity.ranks import Case, check_case, configure, run_case
from tests.parity.stopped_runs import STEPS, Play, assert_continues, run
from tests.parity.tiers import in_parts, one_of, selected

DATA = Case(dp=2, ep=2, moe="capacity, choice", masked=0.3, layers=2)
TENSOR = Case(tp=2, sequence_parallel=True, ep=2, moe="groups", model="llama", layers=2, m=3)
CONTEXT = Case(cp=2, ep=2, moe="top 2", model="llama", activations="full", layers=2)
INNER = Case(dp=2, etp=2, moe="shared, gated", layers=2, zero=3)
SPLIT = Case(pp=2, dp=2, ep=2, moe="shared, gated", schedule="zb_h1", m=3, masked=0.3, zero=2)
FOLDED = Case(dp=2, tp=2, sequence_parallel=True, ep=4, moe="top 2", layers=2)
BOTH = replace(FOLDED, ep=2, etp=2, moe="capacity, choice", zero=2)
LONG = Case(cp=2, tp=2, sequence_parallel=True, ep=4, moe="shared, gated", activations="stage")
EVEN = replace(FOLDED, model="llama")
GATHERED = {"dispatch": "all_gather"}
FETCHED = {"dispatch": "fetch"}
TWO_HOPS: dict[str, Any] = {"dispatch": "hierarchical", "node": 2}
GROUPS = [
    [DATA, replace(DATA, **GATHERED), replace(DATA, expert_chunks=3)],
    [TENSOR, replace(TENSOR, **GATHERED)],
    [CONTEXT, replace(CONTEXT, **GATHERED)],
    [INNER, replace(INNER, **GATHERED, expert_chunks=3), replace(INNER, expert_chunks=4)],
    [SPLIT, replace(SPLIT, **GATHERED, expert_chunks=2), replace(SPLIT, expert_chunks=2)],
    [FOLDED, replace(FOLDED, **GATHERED), replace(FOLDED, **TWO_HOPS)],
    [
        BOTH,
        replace(BOTH, **GATHERED),
        *(replace(BOTH, **TWO_HOPS, expert_chunks=n) for n in (1, 3)),
    ],
    [LONG, replace(LONG, **GATHERED), replace(LONG, **TWO_HOPS)],
]
"""Groups of a case and other forms of it that have the same bits. With chunks, the inner width is a
multiple of what a processor computes at a time: the last values of an activation, which are
computed one by one, may be rounded otherwise, and without chunks they are in other rows."""
CLOSE = [replace(TENSOR, expert_chunks=3), replace(DATA, **FETCHED)]
"""Forms whose sums differ in their last bits: experts that are sent have other rows."""


def of_world(world: int) -> list[list[Case]]:
    return [group for group in GROUPS if group[0].world == world]


def test_no_form_changes_a_bit() -> None:
    """Neither the form of dispatch nor chunks of it change a bit."""
    check_groups(of_world(2)[::3])


@pytest.mark.parametrize("world", [2, 4])
@one_of(4)
def test_no_form_changes_a_bit_in_more_layouts(world: int, some: slice) -> None:
    """On four ranks two hops have the bits of one (Tutel)."""
    check_groups(of_world(world)[some])


def test_others_compute_what_the_reference_does() -> None:
    """Among the cases are experts that are sent in the place of rows (Janus)."""
    check_groups([[case] for case in CLOSE])


class Exchange(NamedTuple):
    """A collective about tokens that a rank has begun."""

    ranks: tuple[int, ...]
    what: str
    bytes: int
    """Bytes of the whole tensor, sent or gathered."""
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()


@contextmanager
def exchanged(found: list[Exchange]) -> Iterator[None]:
    """Record what is dispatched to experts and combined."""
    gathering, all_to_all = fetch.start_all_gather_new, transfer.start_all_to_all
    adding = fetch.reduce_scatter

    def gathers(piece: Tensor, axis: Axis) -> Any:
        found.append(Exchange(axis.ranks, "all_gather", piece.nbytes * axis.size))
        return gathering(piece, axis)

    def swaps(tensor: Tensor, axis: Axis, sends: list[int], receives: list[int]) -> Any:
        lengths = tuple(sends), tuple(receives)
        found.append(Exchange(axis.ranks, "all_to_all", tensor.nbytes, *lengths))
        return all_to_all(tensor, axis, sends, receives)

    def adds(whole: Tensor, axis: Axis) -> Any:
        found.append(Exchange(axis.ranks, "reduce_scatter", whole.nbytes))
        return adding(whole, axis)

    with (
        mock.patch.object(all_gather, "start_all_gather_new", gathers),
        mock.patch.object(fetch, "start_all_gather_new", gathers),
        mock.patch.object(fetch, "reduce_scatter", adds),
        mock.patch.object(transfer, "start_all_to_all", swaps),
    ):
        yield


PADDED = replace(EVEN, moe="pyramid, biased", pad=True, layers=4)
FORMS = [
    replace(EVEN, **GATHERED),
    replace(EVEN, **TWO_HOPS),
    replace(EVEN, ep=2, expert_chunks=2, activations="full"),
    replace(EVEN, ep=2, etp=2, **TWO_HOPS, expert_chunks=2),
    replace(EVEN, ep=2, **GATHERED, expert_chunks=2, activations="full"),
    replace(EVEN, ep=2, codec="int8", expert_chunks=2),
    replace(EVEN, ep=2, etp=2, codec="int8", dtype="bf16", **TWO_HOPS),
    replace(EVEN, codec="bf16", dtype="fp32", **GATHERED),
    replace(EVEN, **FETCHED),
    *(replace(PADDED, **form) for form in (GATHERED, TWO_HOPS, FETCHED)),
    replace(PADDED, ep=2, etp=2, expert_chunks=2, activations="full"),
    replace(PADDED, ep=2, codec="int8", activations="experts again"),
    replace(EVEN, moe="shared, gated", expert_chunks=1, activations="experts again"),
    replace(EVEN, ep=2, **FETCHED, expert_chunks=2, activations="experts again"),
    replace(EVEN, model="gpt2", ep=2, etp=2, **FETCHED, expert_chunks=2, activations="full"),
]


CHOOSING = {"evenly": evenly, "experts of the first ranks": partial(chosen, ((1, 0),))}
"""How tokens choose; in the second way, other ranks' experts have no rows."""


def run_forms(world: World, forms: Sequence[Case]) -> list[dict[str, list[Exchange]]]:
    """Return what each form exchanges in a step in which tokens choose evenly, and in one in which
    they choose experts of the first ranks alone. If there is room for all rows, tokens choose
    freely."""
    results: list[dict[str, list[Exchange]]] = []
    for case in forms:
        config, layout = configure(case)
        step = TrainStep(config, layout, world.mesh(case.grid))
        results.append({})
        for i, (name, choosing) in enumerate(CHOOSING.items()):
            found: list[Exchange] = []
            results[-1][name] = found
            with nullcontext() if case.pad else choosing(), exchanged(found):
                step.train(i, Rows(case))
    return results


Exchanges = list[tuple[Case, tuple[dict[str, list[Exchange]], ...]]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(slice(None, None, 3), marks=pytest.mark.full, id="some"),
        pytest.param(slice(None), marks=pytest.mark.slow, id="all"),
    ],
)
def exchanges(request: pytest.FixtureRequest) -> Exchanges:
    """Return what each rank exchanges in each form."""
    forms = FORMS[request.param]
    return list(zip(forms, zip(*run_world(4, run_forms, forms), strict=True), strict=True))


def test_bytes_are_those_of_the_plan_where_experts_are_chosen_evenly(exchanges: Exchanges) -> None:
    for case, of_ranks in exchanges:
        config, layout = configure(case)
        counts: Counter[Any] = Counter()
        amounts: Counter[Any] = Counter()
        units = Units(config, layout)
        for op in layout.schedule.rank_ops(0):
            for each in operation_transfers(units, op.stage, OPERATIONS[op.kind]):
                if each.axis.startswith("ep") and each.dtype != "int64":  # those are counts
                    counts[each.kind, each.members] += 1
                    amounts[each.kind, each.members] += each.bytes
        if case.dispatch == "hierarchical":
            assert {members for _, members in counts} == {2}, "two hops over two ranks each"
        for found in (rank["evenly"] for rank in of_ranks):
            assert Counter((e.what, len(e.ranks)) for e in found) == counts, case.name
            sizes: Counter[Any] = Counter()
            for e in found:
                sizes[e.what, len(e.ranks)] += e.bytes
            assert sizes == amounts, case.name


def test_members_of_a_group_exchange_in_one_order_also_without_rows(exchanges: Exchanges) -> None:
    for case, both in exchanges:
        of_ranks = [rank["experts of the first ranks"] for rank in both]
        groups = {e.ranks for found in of_ranks for e in found}
        assert len(groups) == (4 if case.node else 4 // (case.ep * case.etp)), case.name
        for ranks in groups:
            lines = [[e for e in of_ranks[rank] if e.ranks == ranks] for rank in ranks]
            for together in zip(*lines, strict=True):
                assert len({(e.what, len(e.sends)) for e in together}) == 1
                if together[0].what != "all_to_all":
                    assert len({e.bytes for e in together}) == 1
                    continue
                received = [e.receives for e in together]
                assert list(zip(*(e.sends for e in together), strict=True)) == received
        if case.dispatch != "fetch" and not case.pad:
            sent = [sum(e.sends) for found in of_ranks for e in found if e.sends]
            assert 0 in sent, "a rank without rows has no results to send"


ONE_LAYER = replace(DATA, expert_chunks=3, layers=1, m=1)


def run_one_layer(world: World) -> list[str]:
    """Record exchanges and products of experts in a step of a layer, in order, each with its
    number."""
    config, layout = configure(ONE_LAYER)
    step = TrainStep(config, layout, world.mesh(ONE_LAYER.grid))
    seen: list[str] = []

    def note(what: str, number: int | None = None) -> int:
        count = sum(line.startswith(what) for line in seen) if number is None else number
        seen.append(f"{what} {count}")
        return count

    all_to_all = transfer.start_all_to_all

    def starts(*given: Any) -> Any:
        tensor, wait = all_to_all(*given)
        number = note("begin")

        def waits() -> None:
            note("wait", number)
            wait()

        return tensor, waits

    def computes(name: str, noted: str) -> Any:
        product = getattr(RoutedExperts, name)

        def computed(*given: Any) -> Any:
            note(noted)
            return product(*given)

        return mock.patch.object(RoutedExperts, name, computed)

    with (
        mock.patch.object(transfer, "start_all_to_all", starts),
        computes("down_projection", "narrow"),
        computes("input_grads", "input_grads"),
    ):
        step.train(0, Rows(ONE_LAYER))
    return seen


def test_a_chunk_is_computed_while_the_next_and_results_travel() -> None:
    """In F, tokens and weights go to the experts; in I, gradients do, and both come back."""
    forward = (
        "begin 0, begin 1, begin 2, begin 3, wait 0, wait 1, narrow 0, begin 4, "
        "begin 5, begin 6, wait 2, wait 3, narrow 1, begin 7, wait 5, wait 6, narrow 2, begin 8, "
        "wait 4, wait 7, wait 8"
    )
    backward = (
        "begin 9, begin 10, wait 9, input_grads 0, begin 11, begin 12, "
        "begin 13, wait 10, input_grads 1, begin 14, begin 15, wait 13, input_grads 2, begin 16, "
        "begin 17, wait 11, wait 14, wait 16, wait 12, wait 15, wait 17"
    )
    for seen in run_world(2, run_one_layer):
        assert ", ".join(seen) == f"{forward}, {backward}"


CHANGING = replace(
    FOLDED,
    moe="sixteen",
    dispatch="hierarchical",
    node=2,
    steps=5,
    batch=1,
    masked=0.3,
    activations="experts again",
)


def another_each_step(first: HierarchicalDispatcher) -> list[Dispatcher]:
    """Return a dispatcher for each step."""
    ep, etp = first.ep, first.etp
    return [
        FetchDispatcher(ep, etp, chunks=3),
        AllGatherDispatcher(ep, etp),
        replace(first, chunks=2),
        AllToAllDispatcher(ep, etp, chunks=3),
        AllToAllDispatcher(ep, etp),
    ]


def run_changing(world: World) -> Outcome:
    """Change the dispatcher in each step; weights and states are those that the step before has
    left."""
    train = TrainStep.train
    found: list[HierarchicalDispatcher] = []

    def changing(self: TrainStep, number: int, rows: Any) -> Any:
        for layer in layers_of(self):
            if not found:
                assert isinstance(layer.dispatcher, HierarchicalDispatcher)
                found.append(layer.dispatcher)
            layer.dispatcher = another_each_step(found[0])[number]
        return train(self, number, rows)

    with mock.patch.object(TrainStep, "train", changing):
        outcome = run_case(world, CHANGING)
    assert found
    return outcome


@pytest.mark.full
def test_another_form_at_each_step_leaves_the_trajectory() -> None:
    """The trajectory is that of one process, and no weights move (Tutel)."""
    check_case(CHANGING, run_world(4, run_changing))


@pytest.mark.slow
def test_another_form_at_each_resume_leaves_the_trajectory(tmp_path: Path) -> None:
    base = {
        "model.layers": "2",
        "model.moe.num_experts": "8",
        "model.moe.bias_update_rate": "0.01",
        "parallel.dp": "4",
        "parallel.ep": "4",
        "optimizer.zero": "2",
        "checkpoint.every": "2",
    }
    forms: list[dict[str, str]] = [
        {"experts.dispatch": "all_gather"},
        {"experts.dispatch": "hierarchical", "experts.ranks_per_node": "2"},
        {
            "experts.dispatch": "hierarchical",
            "experts.ranks_per_node": "2",
            "experts.overlap_chunks": "2",
        },
        {"experts.overlap_chunks": "2"},
    ]
    stops = [2, 4, 6, None]
    parts = [
        Play("part", {**base, **form}, stop_after=stop)
        for form, stop in zip(forms, stops, strict=True)
    ]
    whole, *resumed = run(tmp_path, Play("whole", base), *parts)
    assert [part[0]["first_step"] for part in resumed] == [0, 2, 4, 6]
    assert sorted(resumed[-1][0]["steps"]) == list(range(7, STEPS + 1))
    assert_continues(resumed[-1], whole)
    _, ((fetched, *_)) = run(
        tmp_path,
        Play("fetched", {**base, "experts.dispatch": "fetch"}, stop_after=4),
        Play("fetched", {**base, "experts.dispatch": "fetch", "experts.overlap_chunks": "2"}),
    )
    for step, result in fetched["steps"].items():
        assert result.loss == pytest.approx(whole[0]["steps"][step].loss, rel=1e-5)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return outcomes_of_faults(selected(request, "fault", FAULTS))


@in_parts("fault", FAULTS, full=2, ids=lambda fault: fault.__name__)
def test_parity_notices(fault: Any, outcomes: dict[str, list[Any]]) -> None:
    with pytest.raises(AssertionError, match=r"difference is|two ranks own it"):
        check_case(FAULTS[fault], outcomes[fault.__name__])
