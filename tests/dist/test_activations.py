"""The executor's peak of live activations is the generator's promise.

Measured from what is really alive: every storage that autograd saves in a forward, and every
storage that a queued weight gradient holds, with a finaliser on it. A micro-batch counts on a
stage from its F until the last of them is gone.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megapipe import TrainStep
from megapipe.distributed.mesh import Grid
from megapipe.engine.executor import Executor
from megapipe.engine.stage import Stage
from megapipe.layers.weight_grad import WeightGradQueue
from megapipe.schedule.generators import names
from megapipe.schedule.ir import Kind, Op, Schedule, pack, packed
from megapipe.schedule.program import Action, ActionKind
from megapipe.schedule.proof.validate import validate
from megapipe.testing import World, run_world
from tests.parity import registry_cases
from tests.parity.ranks import Case, Rows, configure
from tests.parity.tiers import in_parts

Key = tuple[int, int, int]  # stage, micro-batch, slice
SETTLE_S = 0.02
"""Seconds to wait: gloo's thread frees a collective's tensors a moment after it is done."""


class Ledger:
    """Live bytes per (stage, micro-batch, slice), by storage."""

    def __init__(self, step: TrainStep) -> None:
        self.live: dict[Key, dict[int, int]] = defaultdict(dict)
        self.constant: set[int] = set()
        """Storages that are no activations: weights, rotary tables, the batch itself."""
        for shard in step.optimizer.shards:
            self.exclude(shard.bucket.weights)
        for module in step.modules.values():
            self.exclude(*module.constants())
        self.key: Key | None = None

    def exclude(self, *tensors: Tensor | None) -> None:
        self.constant |= {t.untyped_storage().data_ptr() for t in tensors if t is not None}

    def watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        known = any(id(storage) in storages for storages in self.live.values())
        if storage.data_ptr() in self.constant or known or self.key is None:
            return
        storages, name = self.live[self.key], id(storage)
        storages[name] = storage.nbytes()
        weakref.finalize(storage, storages.pop, name, None)

    def bytes_of(self, key: Key) -> int:
        return sum(self.live[key].values())

    def alive(self) -> list[Key]:
        return [key for key, storages in self.live.items() if storages]


def key_of(op: Op | Action) -> Key:
    return op.stage, op.microbatch, op.slice


@contextmanager
def measured(step: TrainStep, schedule: Schedule, after_op: Any) -> Iterator[Ledger]:
    """Have `step` run `schedule` under a ledger; call `after_op(ledger, rank, action)` after each
    operation."""
    ledger = Ledger(step)
    is_local = step.mesh.world == 1
    build, put, bind = Stage._build, WeightGradQueue.put, Executor._bind

    def note_saved(tensor: Tensor) -> Tensor:
        ledger.watch(tensor)
        return tensor.detach()

    def watched_build(self: Stage, key: Any, x: Any, mb: Any, **options: Any) -> Any:
        ledger.exclude(mb.tokens, mb.labels, mb.mask)
        if x is not None:
            ledger.watch(x)
        with torch.autograd.graph.saved_tensors_hooks(note_saved, lambda tensor: tensor):
            return build(self, key, x, mb, **options)

    def watched_put(self: WeightGradQueue, task: Any, *, later: bool = False) -> None:
        for tensor in task.tensors():
            ledger.watch(tensor)
        put(self, task, later=later)

    def watched_bind(self: Executor, action: Action) -> Any:
        call = bind(self, action)
        if action.do != ActionKind.COMPUTE:
            return call

        def watched() -> None:
            ledger.key = key_of(action)
            call()
            ledger.key = None
            if not is_local:
                time.sleep(SETTLE_S)
            after_op(ledger, self.program.rank, action)

        return watched

    with (
        mock.patch.object(Stage, "_build", watched_build),
        mock.patch.object(WeightGradQueue, "put", watched_put),
        mock.patch.object(Executor, "_bind", watched_bind),
    ):
        step.data.schedule = schedule
        step.stepper.use_schedule(schedule)
        yield ledger


def make_step(world: World, case: Case) -> TrainStep:
    config, layout = configure(case)
    grid = Grid(pp=1 if case.in_process else case.pp, dp=case.dp, tp=case.tp)
    step = TrainStep(config, layout, world.mesh(grid))
    step.evaluate(Rows(case), case.batch * case.dp)  # makes the rotary tables
    return step


def lone(like: Schedule) -> Schedule:
    """Make a schedule of one micro-batch on the same placement: all that a stage does, split, one
    operation at a time."""
    stages, slices = like.placement.stages, range(like.slices)
    lists: list[list[int]] = [[] for _ in range(like.placement.ranks)]
    home = like.placement.table[0]
    for stage, part in itertools.product(range(stages), slices):
        lists[home[stage]].append(pack(Kind.F, stage, 0, part))
    for stage, part in itertools.product(reversed(range(stages)), reversed(slices)):
        kinds = [Kind.R] * (stage in like.recompute) + [Kind.I, Kind.W]
        lists[home[stage]].extend(pack(kind, stage, 0, part) for kind in kinds)
    ops = tuple(map(packed, lists))
    return Schedule("lone", like.placement, 1, ops, slices=like.slices, recompute=like.recompute)


def bytes_after(step: TrainStep, case: Case) -> dict[tuple[int, Kind, int], int]:
    """Return the live bytes of one lone whole micro-batch after each operation of each (stage,
    slice)."""
    after: dict[tuple[int, Kind, int], int] = {}

    def note(ledger: Ledger, rank: int, action: Action) -> None:
        after[action.stage, action.kind, action.slice] = ledger.bytes_of(key_of(action))

    schedule = step.schedule
    with measured(step, lone(schedule), note):
        step.train(0, Rows(case))
    step.data.schedule = schedule
    for (stage, kind, part), size in list(after.items()):
        if kind == Kind.W:
            after[stage, Kind.B, part] = size
    return after


def measure(world: World, case: Case) -> list[tuple[int, int, int, Fraction]]:
    """Return, per pipeline rank of this process, measured peaks of live activations and of their
    bytes, then the promised count, then the bytes that the schedule's operations add up to."""
    step = make_step(world, case)
    schedule = step.schedule
    after = bytes_after(step, case)
    own = {rank: {key_of(op) for op in schedule.rank_ops(rank)} for rank in step.pipeline.ranks}
    peaks: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))

    def sample(ledger: Ledger, rank: int, action: Action) -> None:
        keys = [key for key in ledger.alive() if key in own[rank]]
        count, size = peaks[rank]
        peaks[rank] = (
            max(count, len(keys)),
            max(size, sum(ledger.bytes_of(key) for key in keys)),
        )

    with measured(step, schedule, sample) as ledger:
        step.train(0, Rows(case))
    assert not ledger.alive(), "something outlived its W"
    assert any(after[s, Kind.F, 0] for s in step.stages if s not in schedule.recompute) or any(
        after[s, Kind.R, 0] for s in step.stages if s in schedule.recompute
    )
    promise = validate(schedule).peak_held
    if schedule.activation_bound is not None:
        assert promise == schedule.activation_bound
    result = []
    for rank in step.pipeline.ranks:
        predicted = Fraction(0)
        held: dict[Key, Fraction] = {}
        for op in schedule.rank_ops(rank):
            size = after[op.stage, op.kind, op.slice] * schedule.size_of(op.microbatch)
            held[key_of(op)] = size
            predicted = max(predicted, sum(held.values(), start=Fraction(0)))
        result.append((*peaks[rank], promise[rank], predicted))
    return result


CASES = [
    Case(pp=4, m=6, schedule="zb_h1", in_process=True, model="llama", tied=False, loss_chunk=0),
    Case(pp=2, m=5, schedule="interleaved_1f1b", chunks=2, group=3, in_process=True),
    Case(pp=2, m=4, schedule="zb_h1", dropout=0.1),
    Case(pp=2, tp=2, m=6, schedule="zb_h1", sequence_parallel=True),
    Case(pp=2, tp=2, m=3, schedule="interleaved_1f1b", chunks=2, sequence_parallel=True),
]


def measure_all(world: World, cases: list[Case]) -> list[list[tuple[int, int, int, Fraction]]]:
    return [measure(world, case) for case in cases]


@in_parts("name", names(), default=12, full=6)
def test_every_schedule_keeps_its_promise(name: str) -> None:
    # a loss in chunks leaves no weight gradient to W: a last stage without layers would hold less
    settings = registry_cases.settings(name)
    cases = [replace(case, in_process=True, loss_chunk=0) for case in settings]
    (results,) = run_world(1, measure_all, cases)
    for case, ranks in zip(cases, results, strict=True):
        for count, size, promised, predicted in ranks:
            assert count == promised, case.name
            assert size == predicted, case.name


@in_parts("case", CASES, full=2, ids=lambda case: case.name)
def test_peak_of_live_activations_is_the_promise(case: Case) -> None:
    for ranks in run_world(case.world, measure, case):
        for count, size, promised, predicted in ranks:
            assert count == promised
            assert size == predicted


def split(world: World, case: Case) -> tuple[int, int, int]:
    """Return the bytes of a middle stage after F, after I and after W."""
    after = bytes_after(make_step(world, case), case)
    return after[1, Kind.F, 0], after[1, Kind.I, 0], after[1, Kind.W, 0]


def test_input_gradient_frees_what_the_weight_gradient_does_not_need() -> None:
    case = Case(pp=4, schedule="zb_h1", in_process=True)
    ((forward, between, end),) = run_world(1, split, case)
    assert 0 < between < forward
    assert end == 0


def test_outputs_are_not_kept() -> None:
    """Nothing of a stage's output stays once it is sent, except its edge in the graph."""
    ((alive, sent),) = run_world(1, outputs, Case(pp=2, m=4, schedule="gpipe", in_process=True))
    assert sent == 4
    assert alive == 0


def outputs(world: World, case: Case) -> tuple[int, int]:
    """Return how many outputs of the first stage are alive after the last forward, and how many
    were sent."""
    step = make_step(world, case)
    refs: list[weakref.ref[Any]] = []
    alive = 0
    forward = Stage.forward

    def watched(self: Stage, key: Any, x: Any, mb: Any) -> Any:
        y = forward(self, key, x, mb)
        if self.is_first:
            # the second stage gets a copy, as over a wire
            refs.append(weakref.ref(y.untyped_storage()))
            return y.clone()
        return y

    bind = Executor._bind

    def counted(self: Executor, action: Action) -> Any:
        call = bind(self, action)

        def count() -> None:
            nonlocal alive
            if (action.kind, action.stage, action.microbatch) == (Kind.B, 0, 0):
                alive = sum(ref() is not None for ref in refs)
            call()

        return count

    with (
        mock.patch.object(Stage, "forward", watched),
        mock.patch.object(Executor, "_bind", counted),
    ):
        step.stepper.use_schedule(step.schedule)
        step.train(0, Rows(case))
    return alive, len(refs)
