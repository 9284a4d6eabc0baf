"""The executor's peak of live activations is the generator's promise.

Measured from what is really alive: every storage that autograd saves in a forward, and every
storage that a queued weight gradient holds, with a finaliser on it. A micro-batch counts on a
stage from its F until the last of them is gone.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from parity import Case, Rows, configure
from torch import Tensor

from megapipe.engine.executor import Executor
from megapipe.engine.stage import Stage
from megapipe.engine.weight_grad import WeightGradQueue
from megapipe.mesh import Grid
from megapipe.schedule.ir import Kind, Op
from megapipe.schedule.lower import Action
from megapipe.schedule.validate import validate
from megapipe.testing import World, run_world
from megapipe.train.step import TrainStep

Key = tuple[int, int]  # stage, micro-batch
SETTLE_S = 0.02
"""gloo's thread lets go of a collective's tensors a moment after the collective is done."""


class Ledger:
    """Live bytes per (stage, micro-batch), by storage."""

    def __init__(self, step: TrainStep) -> None:
        self.live: dict[Key, dict[int, int]] = defaultdict(dict)
        self.constant: set[int] = set()
        """Storages that are no activations: weights, rotary tables, the batch itself."""
        for shard in step.optimizer.shards:
            self.exclude(shard.bucket.weights)
        for module in step.modules.values():
            if module._rotary is not None:
                self.exclude(*module._rotary[1])
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

    def alive(self, stages: Any) -> list[Key]:
        return [key for key, storages in self.live.items() if storages and key[0] in stages]


@contextmanager
def measured(step: TrainStep, after_op: Any) -> Iterator[Ledger]:
    """Run the executors of `step` under a ledger; `after_op(ledger, executor, action)`."""
    ledger = Ledger(step)
    is_local = step.mesh.world == 1
    forward, put, compute = Stage.forward, WeightGradQueue.put, Executor._compute

    def pack(tensor: Tensor) -> Tensor:
        ledger.watch(tensor)
        return tensor.detach()

    def watched_forward(self: Stage, microbatch: int, x: Any, mb: Any) -> Any:
        ledger.exclude(mb.tokens, mb.labels, mb.mask)
        if x is not None:
            ledger.watch(x)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(self, microbatch, x, mb)

    def watched_put(self: WeightGradQueue, task: Any) -> None:
        for tensor in task.tensors():
            ledger.watch(tensor)
        put(self, task)

    def watched_compute(self: Executor, action: Action) -> None:
        ledger.key = action.stage, action.microbatch
        compute(self, action)
        ledger.key = None
        if not is_local:
            time.sleep(SETTLE_S)
        after_op(ledger, self, action)

    with (
        mock.patch.object(Stage, "forward", watched_forward),
        mock.patch.object(WeightGradQueue, "put", watched_put),
        mock.patch.object(Executor, "_compute", watched_compute),
    ):
        yield ledger


def make_step(world: World, case: Case) -> TrainStep:
    config, layout = configure(case)
    grid = Grid(pp=1 if case.in_process else case.pp, dp=case.dp, tp=case.tp)
    step = TrainStep(config, layout, world.mesh(grid))
    step.evaluate(Rows(case), case.batch * case.dp)  # makes the rotary tables
    return step


def bytes_after(world: World, case: Case) -> dict[tuple[int, Kind], int]:
    """Live bytes of one lone micro-batch after each op of each stage."""
    step = make_step(world, replace(case, m=1))
    after: dict[tuple[int, Kind], int] = {}

    def note(ledger: Ledger, executor: Executor, action: Action) -> None:
        after[action.stage, action.kind] = ledger.bytes_of((action.stage, action.microbatch))

    with measured(step, note):
        step.train(0, Rows(replace(case, m=1)))
    return after


def measure(world: World, case: Case) -> list[tuple[int, int, int, int]]:
    """Per pipeline rank of this process: peaks of live activations and of their bytes, measured,
    then the promised count, then the bytes that the schedule's ops add up to."""
    after = bytes_after(world, replace(case, group=None))
    step = make_step(world, case)
    peaks: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))

    def sample(ledger: Ledger, executor: Executor, action: Action) -> None:
        keys = ledger.alive(executor.stages)
        rank = executor.program.rank
        count, size = peaks[rank]
        peaks[rank] = (
            max(count, len(keys)),
            max(size, sum(ledger.bytes_of(key) for key in keys)),
        )

    with measured(step, sample) as ledger:
        step.train(0, Rows(case))
    assert not ledger.alive(step.stages), "something outlived its W"
    assert any(after[s, Kind.F] for s in step.stages)
    promise = validate(step.schedule).peak_held
    if step.schedule.held_limit is not None:
        assert promise == step.schedule.held_limit
    result = []
    for rank in step.pipeline_ranks:
        live = predicted = 0
        held: dict[Key, int] = {}
        for op in step.schedule.rank_ops(rank):
            held[op.stage, op.microbatch] = after[op.stage, op.kind]
            live = sum(held.values())
            predicted = max(predicted, live)
        result.append((*peaks[rank], promise[rank], predicted))
    return result


CASES = [
    Case(pp=4, m=6, schedule="gpipe", in_process=True),
    Case(pp=4, m=6, schedule="1f1b", in_process=True),
    Case(pp=4, m=6, schedule="zb_h1", in_process=True, model="llama", tied=False),
    Case(pp=2, m=6, schedule="interleaved_1f1b", chunks=2, in_process=True),
    Case(pp=2, m=5, schedule="interleaved_1f1b", chunks=2, group=3, in_process=True),
    Case(pp=2, m=4, schedule="zb_h1", dropout=0.1),
    Case(pp=2, tp=2, m=6, schedule="zb_h1", sequence_parallel=True),
    Case(pp=2, tp=2, m=3, schedule="interleaved_1f1b", chunks=2, sequence_parallel=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_peak_of_live_activations_is_the_promise(case: Case) -> None:
    for ranks in run_world(case.world, measure, case):
        for count, size, promised, predicted in ranks:
            assert count == promised
            assert size == predicted


def split(world: World, case: Case) -> tuple[int, int, int]:
    """Bytes of a middle stage after F, after I and after W."""
    after = bytes_after(world, case)
    return after[1, Kind.F], after[1, Kind.I], after[1, Kind.W]


def test_input_gradient_frees_what_the_weight_gradient_does_not_need() -> None:
    case = Case(pp=4, schedule="zb_h1", in_process=True)
    ((forward, between, end),) = run_world(1, split, case)
    assert 0 < between < forward
    assert end == 0


def test_outputs_are_not_kept() -> None:
    """Of a stage's output nothing stays once it is sent: only its edge in the graph does."""
    ((alive, sent),) = run_world(1, outputs, Case(pp=2, m=4, schedule="gpipe", in_process=True))
    assert sent == 4
    assert alive == 0


def outputs(world: World, case: Case) -> tuple[int, int]:
    """Outputs of the first stage alive after the last forward, and how many there were."""
    step = make_step(world, case)
    refs: list[weakref.ref[Any]] = []
    alive = 0
    forward = Stage.forward

    def watched(self: Stage, microbatch: int, x: Any, mb: Any) -> Any:
        y = forward(self, microbatch, x, mb)
        if self.is_first:
            # the second stage gets a copy, as over a wire
            refs.append(weakref.ref(y.untyped_storage()))
            return y.clone()
        return y

    compute = Executor._compute

    def count(self: Executor, action: Action) -> None:
        nonlocal alive
        if Op(action.kind, action.stage, action.microbatch) == Op(Kind.B, 0, 0):
            alive = sum(ref() is not None for ref in refs)
        compute(self, action)

    with mock.patch.object(Stage, "forward", watched), mock.patch.object(
        Executor, "_compute", count
    ):
        step.train(0, Rows(case))
    return alive, len(refs)


