"""Where a rank's program reduces gradients and gathers weights."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedule.data_parallel import add_data_parallel_actions, operations
from megapipe.schedule.generators import build, names
from megapipe.schedule.ir import Kind, Schedule
from megapipe.schedule.lower import lower
from megapipe.schedule.program import Action, ActionKind, Program
from megapipe.schedule.shared_reductions import SharedReduction, shared_reductions
from tests.parity.tiers import in_parts
from tests.unit.schedule.schedule_cases import all_small, of, schedules

BREADTH_FIRST = "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"
DEPTH_FIRST = "0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1"
SPLIT = "0F0 0F1 0I0 0W0 0I1 0W1"


def program_of(text: str) -> Program:
    """Lower the schedule of one rank."""
    return lower(of(text, 1 + max(int(cell[-1]) for cell in text.split())))[0]


def shown(program: Program) -> str:
    """Write operations as in a schedule's text, everything else as ``what:stage``."""
    return " ".join(
        f"{action.stage}{action.kind.name}{action.microbatch}"
        if action.do == ActionKind.COMPUTE
        else f"{action.do.name.lower()}:{action.stage}"
        for action in program.actions
    )


def of_text(text: str, *, in_runs: bool = False, prefetch: int | None = None, **kwargs) -> str:
    return shown(
        add_data_parallel_actions(program_of(text), in_runs=in_runs, prefetch=prefetch, **kwargs)
    )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            BREADTH_FIRST,
            "wait_weights:0 0F0 0F1 wait_weights:1 1F0 1F1 1B0 1B1 reduce:1 0B0 0B1 reduce:0",
        ),
        (
            DEPTH_FIRST,
            "wait_weights:0 0F0 wait_weights:1 1F0 0F1 1F1 1B0 0B0 1B1 reduce:1 0B1 reduce:0",
        ),
        (SPLIT, "wait_weights:0 0F0 0F1 0I0 0W0 0I1 0W1 reduce:0"),
        ("0F0 0F1 0I0 0I1 0W1 0W0", "wait_weights:0 0F0 0F1 0I0 0I1 0W1 0W0 reduce:0"),
    ],
)
def test_a_stage_is_reduced_once_and_after_its_last_weight_gradient(text: str, wanted: str) -> None:
    assert of_text(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            BREADTH_FIRST,
            (
                "wait_weights:0 0F0 0F1 wait_weights:1 1F0 1F1 alloc_grads:1 1B0 1B1 reduce:1 "
                "alloc_grads:0 0B0 0B1 reduce:0"
            ),
        ),
        (
            DEPTH_FIRST,
            (
                "wait_weights:0 0F0 wait_weights:1 1F0 0F1 1F1 "
                "alloc_grads:1 1B0 reduce:1 alloc_grads:0 0B0 reduce:0 "
                "alloc_grads:1 1B1 reduce:1 alloc_grads:0 0B1 reduce:0"
            ),
        ),
        # an I between two W of a stage ends no run: it adds nothing
        (SPLIT, "wait_weights:0 0F0 0F1 0I0 alloc_grads:0 0W0 0I1 0W1 reduce:0"),
    ],
)
def test_in_runs_a_stage_is_opened_before_and_reduced_after_each(text: str, wanted: str) -> None:
    assert of_text(text, in_runs=True) == wanted


def test_a_stage_that_is_not_split_adds_within_its_input_gradient_too() -> None:
    text = "0F0 1F0 1I0 0I0 0W0 1W0"
    assert of_text(text, in_runs=True).endswith(
        "1I0 0I0 alloc_grads:0 0W0 reduce:0 alloc_grads:1 1W0 reduce:1"
    )
    assert of_text(text, in_runs=True, unsplit=[1]).endswith(
        "alloc_grads:1 1I0 reduce:1 0I0 alloc_grads:0 0W0 reduce:0 alloc_grads:1 1W0 reduce:1"
    )


@pytest.mark.parametrize("in_runs", [False, True])
def test_shared_stages_are_reduced_where_their_holders_meet(in_runs: bool) -> None:
    text = of_text(BREADTH_FIRST, in_runs=in_runs, shared=[SharedReduction(7, 1)])
    assert text.endswith("0B0 reduce:1 0B1 reduce:0")
    assert text.count("reduce:1") == 1
    assert "alloc_grads:1" not in text
    assert "wait_weights:1" in text, "their weights are as those of others"
    last = of_text(
        BREADTH_FIRST, in_runs=in_runs, shared=[SharedReduction(8, 1), SharedReduction(8, 0)]
    )
    assert last.endswith("0B0 0B1 reduce:1 reduce:0"), "in the order in which they are given"
    assert of_text("0F0 0B0", shared=[SharedReduction(0, 1)]).startswith("reduce:1 wait_weights:0")


@pytest.mark.parametrize(
    ("prefetch", "wanted"),
    [
        (
            0,
            (
                "unshard:0 wait_weights:0 0F0 reshard:0 unshard:1 wait_weights:1 1F0 1B0 reduce:1 "
                "reshard:1 unshard:0 wait_weights:0 0B0 reduce:0 reshard:0"
            ),
        ),
        (
            1,
            (
                "unshard:0 unshard:1 wait_weights:0 0F0 wait_weights:1 1F0 1B0 reduce:1 "
                "reshard:1 0B0 reduce:0 reshard:0"
            ),
        ),
    ],
)
def test_weights_on_demand(prefetch: int, wanted: str) -> None:
    assert of_text("0F0 1F0 1B0 0B0", prefetch=prefetch) == wanted


def test_the_next_stages_are_on_their_way_while_one_computes() -> None:
    text = of_text("0F0 1F0 2F0 2B0 1B0 0B0", prefetch=1)
    assert text == (
        "unshard:0 unshard:1 wait_weights:0 0F0 reshard:0 unshard:2 wait_weights:1 1F0 "
        "wait_weights:2 2F0 2B0 reduce:2 reshard:2 unshard:0 1B0 reduce:1 reshard:1 "
        "wait_weights:0 0B0 reduce:0 reshard:0"
    )


def test_gathers_begin_before_the_rank_waits_for_a_message() -> None:
    """They begin before memory for gradients is taken, too."""
    first, _ = lower(of("0F0 2F0 2B0 0B0/1F0 3F0 3B0 1B0"))
    assert shown(add_data_parallel_actions(first, in_runs=True, prefetch=0)) == (
        "unshard:0 wait_weights:0 0F0 send:0 reshard:0 unshard:2 recv:1 wait_weights:2 2F0 send:2 "
        "recv:3 alloc_grads:2 2B0 send:2 reduce:2 reshard:2 unshard:0 recv:1 alloc_grads:0 "
        "wait_weights:0 0B0 reduce:0 reshard:0"
    )


def test_recomputation_needs_weights() -> None:
    schedule = of("0F0 1F0 0R0 1B0 0B0", recompute=frozenset({0}))
    text = shown(add_data_parallel_actions(lower(schedule)[0], in_runs=False, prefetch=0))
    assert "reshard:1 unshard:0 wait_weights:0 0R0 reshard:0 unshard:1 wait_weights:1 1B0" in text


def plain(program: Program) -> list[Action]:
    return [
        a for a in program.actions if a.do in (ActionKind.COMPUTE, ActionKind.SEND, ActionKind.RECV)
    ]


def adds(action: Action) -> bool:
    return action.do == ActionKind.COMPUTE and action.kind in (Kind.B, Kind.W)


def uses(action: Action) -> bool:
    return action.do == ActionKind.COMPUTE and action.kind in (Kind.F, Kind.B, Kind.I, Kind.R)


def check_gradients(program: Program, shared: Sequence[SharedReduction], *, in_runs: bool) -> None:
    """Assert that a reduction of its stage follows every weight gradient, in the longest runs."""
    opened: int | None = None
    reductions: list[int] = []
    pending: set[int] = set()
    met: list[SharedReduction] = []
    done, others = 0, {stage for _, stage in shared}
    for action in program.actions:
        done += action.do == ActionKind.COMPUTE
        if action.do == ActionKind.REDUCE and action.stage in others:
            met.append(SharedReduction(done, action.stage))
            continue
        if action.do == ActionKind.ALLOC_GRADS:
            assert in_runs
            assert opened is None, "one run at a time"
            opened = action.stage
        elif adds(action) and action.stage not in others:
            assert not in_runs or opened == action.stage
            pending.add(action.stage)
        elif action.do == ActionKind.REDUCE:
            assert action.stage in pending, "there is something to reduce"
            pending.remove(action.stage)
            reductions.append(action.stage)
            opened = None
    assert not pending
    assert opened is None
    assert met == list(shared)
    order = [action.stage for action in program.actions if adds(action)]
    if in_runs:
        runs = [stage for stage, _ in itertools.groupby(order)]
        assert reductions == [stage for stage in runs if stage not in others]
    else:
        last = [stage for i, stage in enumerate(order) if stage not in order[i + 1 :]]
        assert reductions == [stage for stage in last if stage not in others]


def check_reductions_are_direct(program: Program, shared: Sequence[SharedReduction]) -> None:
    """Assert that reductions follow directly the operation that completes the gradients."""
    others = {stage for _, stage in shared}
    unsent = [
        action
        for action in program.actions
        if action.do != ActionKind.SEND
        and not (action.do == ActionKind.REDUCE and action.stage in others)
    ]
    for before, action in itertools.pairwise(unsent):
        if action.do == ActionKind.REDUCE:
            assert adds(before)
            assert before.stage == action.stage
    for action, after in itertools.pairwise(program.actions):
        assert (action.do, after.do) != (ActionKind.REDUCE, ActionKind.SEND)


def check_weights(program: Program, prefetch: int) -> None:
    """Assert that weights are used only while gathered, and never more than 1 + prefetch are."""
    state: dict[int, str] = {}
    for action in program.actions:
        stage = action.stage
        if action.do == ActionKind.UNSHARD:
            assert stage not in state
            state[stage] = "on its way"
            assert len(state) <= 1 + prefetch
        elif action.do == ActionKind.WAIT_WEIGHTS:
            assert state[stage] == "on its way"
            state[stage] = "there"
        elif action.do == ActionKind.RESHARD:
            del state[stage]
        elif uses(action):
            assert state.get(stage) == "there"
    assert not state


def check(schedule: Schedule, prefetch: int, *, in_runs: bool) -> None:
    where = shared_reductions(schedule)
    for program in lower(schedule):
        shared = where[program.rank]
        options = {"shared": shared, "in_runs": in_runs}
        alone = operations(schedule, program.rank)
        for ahead in (None, prefetch):
            silent = [
                action[:5]
                for action in add_data_parallel_actions(program, prefetch=ahead, **options).actions
                if action.do not in (ActionKind.SEND, ActionKind.RECV)
            ]
            without = add_data_parallel_actions(alone, prefetch=ahead, **options).actions
            assert silent == [action[:5] for action in without], "messages make no difference"
        kept = add_data_parallel_actions(program, prefetch=None, **options)
        gathered = add_data_parallel_actions(program, prefetch=prefetch, **options)
        for each in (kept, gathered):
            assert plain(each) == list(program.actions), "what was there stays, in its order"
            check_gradients(each, shared, in_runs=in_runs)
            check_reductions_are_direct(each, shared)
        check_weights(gathered, prefetch)
        awaited: list[int] = []
        for action in kept.actions:
            assert action.do not in (ActionKind.UNSHARD, ActionKind.RESHARD)
            if action.do == ActionKind.WAIT_WEIGHTS:
                awaited.append(action.stage)
            assert not uses(action) or action.stage in awaited
        assert len(set(awaited)) == len(awaited), "each stage is awaited once"


@in_parts("name", names(), default=4, full=1)
def test_registered_schedules(name: str) -> None:
    for i, schedule in enumerate(all_small(name, ranks=4, microbatches=3)):
        check(schedule, i % 3, in_runs=i % 2 == 0)


@settings(max_examples=60)
@given(schedules(), st.integers(0, 5), st.booleans())
def test_any_schedule(schedule: Schedule, prefetch: int, in_runs: bool) -> None:
    check(schedule, prefetch, in_runs=in_runs)


def test_with_many_ahead_all_are_gathered_once() -> None:
    schedule = build("interleaved_1f1b", ranks=2, microbatches=4, chunks=3)
    for program in lower(schedule):
        actions = add_data_parallel_actions(program, in_runs=True, prefetch=5).actions
        gathers = [action.stage for action in actions if action.do == ActionKind.UNSHARD]
        assert sorted(gathers) == sorted(schedule.placement.stages_of(program.rank))


@pytest.mark.parametrize("chunks", [2, 3])
def test_breadth_first_has_one_run_per_chunk(chunks: int) -> None:
    """It gathers as seldom as can be: each chunk once in the forward, and in the backward but for
    the last."""
    schedule = build("breadth_first", ranks=2, microbatches=6, chunks=chunks)
    for program in lower(schedule):
        actions = add_data_parallel_actions(program, in_runs=True, prefetch=0).actions
        reduced = [action.stage for action in actions if action.do == ActionKind.REDUCE]
        assert sorted(reduced) == sorted(schedule.placement.stages_of(program.rank))
        assert sum(action.do == ActionKind.UNSHARD for action in actions) == 2 * chunks - 1


def test_input_gradients_that_come_with_weight_gradients_need_the_memory_too() -> None:
    text = "0F0 0F1 0I0 0I1 0W0 0W1"
    assert (
        of_text(text, in_runs=True)
        == "wait_weights:0 0F0 0F1 0I0 0I1 alloc_grads:0 0W0 0W1 reduce:0"
    )
    unsplit = of_text(text, in_runs=True, unsplit=[0])
    assert unsplit == "wait_weights:0 0F0 0F1 alloc_grads:0 0I0 0I1 0W0 0W1 reduce:0"
    assert of_text(text, unsplit=[0]) == of_text(text)
