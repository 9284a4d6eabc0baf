"""Names of actions, and that they are given to all actions or to none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megapipe.engine.channels import InProcessChannels
from megapipe.engine.executor import Executor, run_together
from megapipe.engine.profiler_names import name_of, named
from megapipe.schedule.generators import build
from megapipe.schedule.ir import Kind
from megapipe.schedule.lower import lower
from megapipe.schedule.program import Action, ActionKind
from tests.unit.engine.fake_stages import FakeStage, microbatches_of, scalar


@pytest.mark.parametrize(
    ("action", "name"),
    [
        (Action(ActionKind.COMPUTE, Kind.F, 1, 3), "F stage 1 micro-batch 3"),
        (Action(ActionKind.COMPUTE, Kind.W, 0, 2, 1), "W stage 0 micro-batch 2 slice 1"),
        (
            Action(ActionKind.SEND, Kind.I, 2, 0, peer=1),
            "send I of stage 2 micro-batch 0 to rank 1",
        ),
        (
            Action(ActionKind.RECV, Kind.F, 1, 0, peer=0),
            "receive F of stage 1 micro-batch 0 from rank 0",
        ),
        (Action(ActionKind.REDUCE, Kind.F, 4, 0), "reduce stage 4"),
        (Action(ActionKind.WAIT_WEIGHTS, Kind.F, 4, 0), "wait_weights stage 4"),
    ],
)
def test_a_name_tells_stage_micro_batch_and_kind(action: Action, name: str) -> None:
    assert name_of(action) == name


def test_a_trace_has_what_a_rank_does_in_order() -> None:
    schedule = build("zb_h1", ranks=2, microbatches=2)
    programs = lower(schedule)
    executors = []
    for program, ends in zip(programs, InProcessChannels.connect(2), strict=True):
        stages = {s: FakeStage(s, 2, []) for s in schedule.placement.stages_of(program.rank)}
        wrap = partial(named, device=torch.device("cpu"))
        executors.append(
            Executor(program, stages, ends, shape=scalar, train=True, wrap=wrap)  # type: ignore[arg-type]
        )
    with profile(activities=[ProfilerActivity.CPU]) as watch:
        run_together(executors, microbatches_of(schedule))
    events = watch.events()
    assert events is not None
    seen = [event.name for event in sorted(events, key=lambda event: event.time_range.start)]
    for program in programs:
        wanted = [name_of(action) for action in program.actions]
        assert len(set(wanted)) == len(wanted)
        assert [name for name in seen if name in wanted] == wanted


def test_on_a_gpu_they_are_ranges_of_nvtx_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    @contextmanager
    def nvtx(name: str) -> Iterator[None]:
        seen.append(f"begin {name}")
        yield
        seen.append("end")

    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx)
    action = Action(ActionKind.COMPUTE, Kind.F, 1, 3)
    named(action, lambda: seen.append("run"), torch.device("cuda"))()
    assert seen == ["begin F stage 1 micro-batch 3", "run", "end"]
    named(action, lambda: None, torch.device("cpu"))()
    assert len(seen) == 3
