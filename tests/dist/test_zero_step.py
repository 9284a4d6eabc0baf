"""ZeRO 0 to 3 within a step: what a process holds and when, what it says and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest

from megapipe import TrainStep
from megapipe.distributed.mesh import Grid
from megapipe.optim import reduction, shard
from megapipe.schedule.ir import Kind
from megapipe.schedule.program import Action, ActionKind
from megapipe.testing import World, run_world
from tests.parity.ranks import Case, Rows, configure

CHUNKS = Case(dp=2, m=4, chunks=3, layers=3, schedule="breadth_first", dtype="fp32")
"""One pipeline rank with three stages."""


class Moment(NamedTuple):
    """Buckets, by index, that have memory after an action of the program."""

    action: Action
    grads: frozenset[int]
    weights: frozenset[int]


class Seen(NamedTuple):
    """One rank's step."""

    moments: list[Moment]
    buckets: dict[int, int]
    """Length of each bucket, by index."""
    said: Counter[tuple[str, int, int]]
    """Collectives of the optimizer: (name, bytes, actions of the program that had run)."""
    left: Moment
    """Buckets that have memory after the step."""


def watch(world: World, case: Case) -> Seen:
    """Watch the second step of a case, action by action; sizes are those of the storages."""
    config, layout = configure(case)
    step = TrainStep(config, layout, world.mesh(Grid(pp=case.pp, dp=case.dp, tp=case.tp)))
    rows = Rows(case)
    step.train(0, rows)
    buckets = [shard.bucket for shard in step.optimizer.shards]

    def moment(action: Action) -> Moment:
        for bucket in buckets:
            for flat in (*bucket.grads, bucket.weights):
                size = flat.untyped_storage().nbytes()
                assert size in (0, flat.numel() * flat.element_size())
        return Moment(
            action,
            frozenset(b.index for b in buckets if b.grads[0].untyped_storage().nbytes()),
            frozenset(b.index for b in buckets if b.weights.untyped_storage().nbytes()),
        )

    moments: list[Moment] = []
    executor = step.stepper.executors.plain[0]

    def noting(action: Action, call: Callable[[], None]) -> None:
        call()
        moments.append(moment(action))

    executor._calls = [
        partial(noting, action, call)
        for action, call in zip(executor.program.actions, executor._calls, strict=True)
    ]
    executor._parts = executor._cut()
    said: Counter[tuple[str, int, int]] = Counter()

    def counted(module: Any, name: str, argument: int = 0) -> Any:
        real = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            if args[-1].group is not None:
                said[name, args[argument].nbytes, len(moments)] += 1
            return real(*args, **options)

        return mock.patch.object(module, name, call)

    with (
        counted(reduction, "start_reduce_scatter"),
        counted(reduction, "start_all_reduce"),
        counted(reduction, "start_all_to_all"),
        counted(reduction, "all_gather"),
        counted(shard, "start_all_gather"),
    ):
        step.train(1, rows)
    lengths = {bucket.index: bucket.numel for bucket in buckets}
    return Seen(moments, lengths, said, moment(Action(ActionKind.COMPUTE, Kind.W, -1, -1)))


def watch_all(world: World, cases: list[Case]) -> list[Seen]:
    return [watch(world, case) for case in cases]


def seen(*cases: Case) -> list[list[Seen]]:
    """Return what each rank saw in each case."""
    ranks = run_world(cases[0].world, watch_all, list(cases))
    return [list(each) for each in zip(*ranks, strict=True)]


DEPTH_FIRST = replace(CHUNKS, schedule="interleaved_1f1b", group=2)
MEMORY = [
    replace(case, zero=zero, tied=tied, prefetch=prefetch)
    for case, zero, tied, prefetch in (
        (CHUNKS, 1, True, 1),
        (CHUNKS, 2, False, 1),
        (DEPTH_FIRST, 2, True, 1),
        (CHUNKS, 3, False, 0),
        (DEPTH_FIRST, 3, True, 1),
        (
            replace(DEPTH_FIRST, schedule="zb_v", pp=1, chunks=None, group=None, layers=2),
            3,
            True,
            0,
        ),
    )
]


@pytest.fixture(scope="module")
def memory() -> dict[str, list[Seen]]:
    return {case.name: ranks for case, ranks in zip(MEMORY, seen(*MEMORY), strict=True)}


@pytest.mark.parametrize("case", MEMORY, ids=lambda case: case.name)
def test_gradients_have_memory_while_they_are_added_to_or_reduced(
    case: Case, memory: dict[str, list[Seen]]
) -> None:
    stages = frozenset(range(case.layers))
    tied = frozenset({case.layers} if case.tied else ())
    for rank in memory[case.name]:
        everything = frozenset(rank.buckets)
        assert everything == stages | tied
        if case.zero == 1:
            assert all(moment.grads == everything for moment in (*rank.moments, rank.left))
            continue
        opened: set[int] = set()
        reducing: list[int] = []
        for action, grads, _ in rank.moments:
            if action.do == ActionKind.ALLOC_GRADS:
                while len(reducing) > 1 or action.stage in reducing:
                    reducing.pop(0)
                opened.add(action.stage)
            elif action.do == ActionKind.REDUCE:
                opened.remove(action.stage)
                reducing.append(action.stage)
            assert len(grads - tied) <= 2
            assert tied <= grads, "which is complete at the end of the step only"
            assert grads - tied == opened.union(reducing)
        assert rank.left.grads == tied


@pytest.mark.parametrize("case", MEMORY, ids=lambda case: case.name)
def test_weights_have_memory_while_they_are_among_the_next(
    case: Case, memory: dict[str, list[Seen]]
) -> None:
    tied = frozenset({case.layers} if case.tied else ())
    for rank in memory[case.name]:
        if case.zero < 3:
            assert all(moment.weights == frozenset(rank.buckets) for moment in rank.moments)
            continue
        gathered: set[int] = set()
        for action, _, weights in rank.moments:
            if action.do == ActionKind.UNSHARD:
                gathered.add(action.stage)
            elif action.do == ActionKind.RESHARD:
                gathered.remove(action.stage)
            assert weights - tied == gathered
            assert len(gathered) <= 1 + case.prefetch
            if tied:
                assert (tied <= weights) == bool(gathered & {0, case.layers - 1})
        assert rank.left.weights == frozenset()


COUNTED = [
    replace(case, zero=zero, shard_size=size, reduce_dtype=dtype)
    for case in (CHUNKS, DEPTH_FIRST)
    for zero, size, dtype in ((0, None, None), (1, None, None), (2, None, None), (1, 1, "bf16"))
]


def test_gradients_are_reduced_once_per_stage_or_run_and_never_per_micro_batch() -> None:
    for case, ranks in zip(COUNTED, seen(*COUNTED), strict=True):
        runs = 1
        if case.zero == 2 and case.schedule == "interleaved_1f1b":
            runs = case.m // (case.group or 1)
            assert 1 < runs < case.m
        for rank in ranks:
            wanted: Counter[tuple[str, int]] = Counter()
            for index, length in rank.buckets.items():
                times = 1 if index == case.layers else runs
                if case.reduce_dtype == "bf16":
                    wanted["start_all_to_all", 2 * length] += 1
                    wanted["all_gather", 2 * length // 2] += 1
                elif case.zero == 0:
                    wanted["start_all_reduce", 4 * length] += 1
                else:
                    wanted["start_reduce_scatter", 4 * length] += times
                if case.zero > 0 and case.shard_size is None:
                    wanted["start_all_gather", 4 * length] += 1
            got: Counter[tuple[str, int]] = Counter()
            for (name, size, _), count in rank.said.items():
                got[name, size] += count
            assert got == wanted, case.name


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_reductions_begin_long_before_the_step_ends(zero: int) -> None:
    """The last of three chunks begins its reduction with two thirds of the backward to come;
    computation goes on before anyone waits for it."""
    log, _ = run_world(2, order, replace(CHUNKS, zero=zero))
    operations, starts, ends = (
        [i for i, what in enumerate(log) if what == kind] for kind in ("op", "start", "wait")
    )
    assert len(starts) == len(ends) == 4, "three stages and the tied embedding"
    assert sum(i > starts[0] for i in operations) == 2 * CHUNKS.m
    assert sum(starts[0] < i < ends[0] for i in operations) >= CHUNKS.m, "of the next chunk"
    assert sum(i > starts[1] for i in operations) == CHUNKS.m


def test_sums_between_shard_groups_begin_with_the_reduction_of_the_next_stage() -> None:
    cases = [replace(CHUNKS, dp=4, shard_size=2, zero=zero) for zero in (1, 2, 3)]
    for case, ranks in zip(cases, seen(*cases), strict=True):
        for rank in ranks:
            reduced = [
                (i, moment.action.stage)
                for i, moment in enumerate(rank.moments)
                if moment.action.do == ActionKind.REDUCE
            ]
            assert [stage for _, stage in reduced] == [2, 1, 0]
            said = {(when, size) for name, size, when in rank.said if name == "start_all_reduce"}
            end = len(rank.moments)
            slices = {index: 4 * length // 2 for index, length in rank.buckets.items()}
            wanted = {(reduced[1][0], slices[2]), (reduced[2][0], slices[1]), (end, slices[0])}
            assert said == wanted | {(end, slices[case.layers])}, case.name


def order(world: World, case: Case) -> list[str]:
    """Return operations, and the starts and waits of reductions, in their order."""
    config, layout = configure(case)
    step = TrainStep(config, layout, world.mesh(Grid(dp=case.dp)))
    log: list[str] = []
    executor = step.stepper.executors.plain[0]

    def noting(action: Action, call: Callable[[], None]) -> None:
        call()
        if action.do == ActionKind.COMPUTE:
            log.append("op")

    executor._calls = [
        partial(noting, action, call)
        for action, call in zip(executor.program.actions, executor._calls, strict=True)
    ]
    executor._parts = executor._cut()
    real = reduction.Reduction

    class Noted(real):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            log.append("start")

        def wait(self) -> Any:
            log.append("wait")
            return super().wait()

    with mock.patch.object(shard, "Reduction", Noted):
        step.train(0, Rows(case))
    return log
