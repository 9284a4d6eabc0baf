"""Reductions and gathers of a step, counted."""

from __future__ import annotations

import pytest

from megapipe.cli import parse
from megapipe.layout.resolve import resolve
from megapipe.plan.dp_actions import gathers_of, reductions_of, replica_actions
from megapipe.schedule.ir import Kind
from megapipe.schedule.program import Action, ActionKind

SMALL = (
    "model.layers=4",
    "model.hidden=32",
    "model.vocab_size=500",
    "train.sequence_length=16",
    "parallel.dp=2",
    "train.global_batch=8",
)


def actions(text: str) -> list[Action]:
    """Parse actions from ``unshard:0 reduce:0 ..``."""
    pairs = (word.split(":") for word in text.split())
    return [Action(ActionKind[what.upper()], Kind.W, int(stage), -1) for what, stage in pairs]


def test_a_bucket_of_two_stages_is_gathered_when_neither_has_it() -> None:
    turns = actions("unshard:0 wait_weights:0 reshard:0 unshard:3 reshard:3")
    overlap = actions("unshard:0 unshard:3 reshard:0 unshard:0 reshard:3 reshard:0 unshard:1")
    assert gathers_of([turns], (0, 3)) == 2
    assert gathers_of([overlap], (0, 3)) == 1
    assert gathers_of([overlap], (0,)) == 2
    assert gathers_of([turns, overlap], (0, 3)) == 3


def test_reductions_are_those_of_the_stage() -> None:
    runs = actions("alloc_grads:0 reduce:0 alloc_grads:1 reduce:1 alloc_grads:0 reduce:0")
    assert [reductions_of([runs, runs], stage) for stage in (0, 1, 2)] == [4, 2, 0]


@pytest.mark.parametrize(
    ("channels", "zero", "programs"),
    [("process_group", 2, 1), ("process_group", 3, 1), ("in_process", 3, 2)],
)
def test_they_are_those_of_the_ranks_that_a_process_runs(
    channels: str, zero: int, programs: int
) -> None:
    keys = (f"pipeline.transport={channels}", f"optimizer.zero={zero}", "parallel.pp=2")
    _, layout = resolve(parse([*SMALL, *keys]).config, None, None)
    found = replica_actions(layout, 1)
    assert len(found) == programs
    gathered = zero == 3
    for rank, own in zip(range(2) if programs == 2 else [1], found, strict=True):
        assert {action.stage for action in own} == {rank}
        assert reductions_of([own], rank) == 1
        assert gathers_of([own], (rank,)) == gathered


@pytest.mark.parametrize(("prefetch", "own", "tied"), [(0, [2, 1], 3), (1, [1, 1], 1)])
def test_a_tied_bucket_stays_while_either_stage_needs_it(
    prefetch: int, own: list[int], tied: int
) -> None:
    """One rank, breadth-first: 0, then 1 forward and back, then 0 again."""
    keys = (
        "pipeline.schedule=breadth_first",
        "pipeline.chunks=2",
        "optimizer.zero=3",
        f"optimizer.weight_prefetch={prefetch}",
    )
    found = replica_actions(resolve(parse([*SMALL, *keys]).config, None, None)[1], 0)
    assert [gathers_of(found, (stage,)) for stage in (0, 1)] == own
    assert gathers_of(found, (0, 1)) == tied
