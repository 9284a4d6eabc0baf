"""Gradients of a stage that are reduced in pieces: the same bits, and sooner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from megapipe import TrainStep
from megapipe.distributed.mesh import Grid
from megapipe.optim.shard import Shard
from megapipe.schedule.program import Action, ActionKind
from megapipe.testing import World, run_world
from tests.parity import reference
from tests.parity.collective_recorder import recording
from tests.parity.forced_routing import chosen, evenly
from tests.parity.outcome import Outcome, assemble
from tests.parity.ranks import Case, Rows, configure, run_cases
from tests.parity.tiers import in_parts

SMALL = 1e-6
"""MiB of a chunk, by which every matrix is a piece."""
BLOCK = 0.02
"""MiB of gradients in fp32: more than those of a block's matrices."""
DATA = Case(dp=2, m=2, dtype="fp32", layers=4)
EXPERTS = replace(DATA, ep=2, moe="shared, gated")
CASES = [
    DATA,
    replace(DATA, tied=False),
    replace(DATA, zero=0, model="llama", tied=False),
    replace(DATA, pp=2, chunks=2, schedule="interleaved_1f1b", zero=2, layers=6),
    replace(DATA, pp=2, schedule="zb_h1", zero=3, tied=False, layers=6),
    replace(
        DATA, pp=2, schedule="1f1b", layers=5, uneven=True, dtype="bf16", rounding="stochastic"
    ),
    replace(DATA, tp=2, sequence_parallel=True, activations="full, two together"),
    replace(DATA, tp=2, rule="muon", loss_chunk=0),
    replace(DATA, pp=2, schedule="seq1f1b", slices=2, model="mixed", tied=False),
    replace(DATA, dtype="bf16", state_dtype="bf16", master="none", clip=None),
    replace(DATA, dp=4, shard_size=2, zero=3),
    replace(DATA, dp=4, shard_size=2, reduce_dtype="bf16", rule="lamb"),
    replace(DATA, pp=2, schedule="chimera", tied=False, layers=6),
    replace(DATA, pp=2, in_process=True, schedule="zb_h1", layers=6, zero=2),
    replace(DATA, dp=3, post_validation=True, pp=2, schedule="zb_h2", layers=6),
    EXPERTS,
    replace(EXPERTS, dp=4, zero=2, expert_chunks=2, moe="top 2"),
]


def gradients(case: Case, outcomes: list[Outcome], step: int) -> dict[str, Tensor]:
    shapes = reference.shapes(configure(case)[0].model)
    like = {name: torch.empty(shape) for name, shape in shapes.items()}
    return assemble([outcome.grads[step] for outcome in outcomes], like)


def assert_same(case: Case, plain: list[Outcome], other: list[Outcome]) -> None:
    """Compare bits of all but the norm, which adds up the squares of other shards, in fp64."""
    for one, two in zip(plain, other, strict=True):
        assert one.losses == two.losses, case.name
        assert one.norms == pytest.approx(two.norms, rel=1e-15)
        for mine, theirs in zip(one.copies, two.copies, strict=True):
            for (name, box, values), (name_, box_, values_) in zip(mine, theirs, strict=True):
                assert (name, box) == (name_, box_)
                assert np.array_equal(values, values_), f"{case.name}: copy of {name}"
    for i in range(case.steps):
        others = gradients(case, other, i)
        for name, grad in gradients(case, plain, i).items():
            assert grad.equal(others[name]), f"{case.name}: gradient of {name} in step {i}"


@in_parts(("world", "every"), [(2, 1), (2, 3), (4, 1), (6, 1)], full=[(2, 3)])
def test_pieces_change_no_bit(world: int, every: int) -> None:
    """Losses, gradients and weights, of experts too, are bitwise those of gradients reduced whole
    (Lina)."""
    here = [case for case in CASES if case.world == world][::every]
    cut = [replace(case, reduce_chunk_mib=mib) for case in here for mib in (None, SMALL, BLOCK)]
    ranks = run_world(world, run_cases, cut)
    outcomes = {case: [each[i] for each in ranks] for i, case in enumerate(cut)}
    for case in here:
        for mib in (SMALL, BLOCK):
            assert_same(case, outcomes[case], outcomes[replace(case, reduce_chunk_mib=mib)])


START = Shard.start_reduce


def sent(world: World, cases: list[Case]) -> list[list[tuple[int, int, bool]]]:
    """Return, for each case, the reductions of a step: (stage, length, within an operation of that
    stage?)."""
    found = []
    for case in cases:
        config, layout = configure(case)
        step = TrainStep(config, layout, world.mesh(Grid(pp=case.pp, dp=case.dp, tp=case.tp)))
        executor = step.stepper.executors.plain[0]
        running: list[Action] = []
        left: list[tuple[int, int, bool]] = []

        def noting(action: Action, call: Callable[[], None], running: Any = running) -> None:
            running.append(action)
            call()
            running.pop()

        executor._calls = [
            partial(noting, action, call)
            for action, call in zip(executor.program.actions, executor._calls, strict=True)
        ]
        executor._parts = executor._cut()

        def spy(self: Shard, running: Any = running, left: Any = left) -> None:
            left.append(
                (self.bucket.index, self.bucket.numel, running[-1].do == ActionKind.COMPUTE)
            )
            START(self)

        with mock.patch.object(Shard, "start_reduce", spy):
            step.train(0, Rows(case))
        found.append(left)
    return found


LATEST = replace(DATA, tied=False, reduce_chunk_mib=BLOCK, pp=1)


@in_parts(
    "case",
    [
        LATEST,
        replace(LATEST, loss_chunk=0),
        replace(LATEST, schedule="zb_h1", loss_chunk=0),
        replace(LATEST, schedule="zb_h1"),
    ],
    default=4,
    full=2,
    ids=lambda case: case.name,
)
def test_pieces_leave_within_the_last_operation(case: Case) -> None:
    """Four blocks are four pieces and a head or so; all but the last two leave before its end: the
    first matrices', which nothing follows, and what is no matrix."""
    for (left,) in run_world(case.world, sent, [case]):
        assert len(left) > 4
        assert [within for _, _, within in left] == [True] * (len(left) - 2) + [False] * 2


def begun(world: World) -> list[list[tuple[str, int]]]:
    """Return the collectives of a step whose tokens go to experts of both ranks, and of one whose
    tokens go to one rank's: rows to experts and back, and reductions with their length."""
    case = replace(EXPERTS, m=1, tied=False, reduce_chunk_mib=SMALL)
    config, layout = configure(case)
    step = TrainStep(config, layout, world.mesh(case.grid))
    found = []
    for number, choosing in enumerate((evenly(), chosen([[1, 0]]))):
        with choosing, recording() as recorder:
            step.train(number, Rows(case))
        kinds = ("all_to_all", "reduce_scatter")
        calls = [call for call in recorder.calls if call.name in kinds]
        found.append([(c.name, 0 if c.lengths else c.elements) for c in calls])
    return found


@pytest.mark.full
def test_pieces_leave_between_exchanges_of_rows_at_a_fixed_place() -> None:
    """Pieces that are complete leave before rows of the next layer of the backward are sent;
    experts have no replicas here."""
    (even, one), *others = run_world(2, begun)
    assert even == one, "whatever is chosen"
    assert others == [[even, one]], "on every rank"
    after = "".join(name[0] for name, _ in even).lstrip("a")
    assert even.count(("all_to_all", 0)) > 4 * EXPERTS.layers
    assert after.count("ra") == EXPERTS.layers, after


def test_a_stage_with_several_holders_leaves_as_a_whole() -> None:
    case = replace(DATA, pp=2, schedule="chimera", tied=False, reduce_chunk_mib=SMALL)
    for (left,) in run_world(case.world, sent, [case]):
        assert [(stage, within) for stage, _, within in left].count((0, False)) == 1
        assert len(left) == 2
