"""Real jobs that are watched: profiles of steps, what is left when memory is used up, garbage."""

from __future__ import annotations

import gc
import gzip
import json
import weakref
from pathlib import Path

import pytest
import torch

from megapipe import TrainStep
from megapipe.distributed.mesh import Grid
from megapipe.engine.profiler_names import name_of
from megapipe.observe.profile import merge
from megapipe.schedule.generators import build
from megapipe.schedule.lower import lower
from megapipe.schedule.program import ActionKind
from megapipe.testing import World, run_world
from megapipe.train.gc_control import GCControl
from tests.parity.jobs import ROOT, arguments, tiny
from tests.parity.launches import run_forked
from tests.parity.ranks import Case, Rows, configure

BROKEN = """
import os, sys
sys.path.insert(0, {root!r})
import torch
from megapipe.train.main import main
from megapipe import TrainStep
whole = TrainStep.train
def run_out(self, step, *args, **options):
    if step == 1 and os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")
    return whole(self, step, *args, **options)
TrainStep.train = run_out
main(sys.argv[1:])
"""


@pytest.mark.full
def test_the_profile_of_a_step_has_every_operation_of_every_rank(tmp_path: Path) -> None:
    """With a timeline of the same step."""
    watched = {"log.profile": "[2]", "log.timeline": "[2]", "parallel.pp": "2"}
    outcome = run_forked(tmp_path, 2, *arguments({**tiny(tmp_path), **watched}))
    assert outcome.codes == [0, 0], outcome.text
    assert "USDT" not in outcome.text
    (line,) = [line for line in outcome.text.splitlines() if "profile of step 2" in line]
    folder = tmp_path / "runs/run/profile/step_000002"
    assert str(folder) in line
    assert len(list((tmp_path / "runs/run/timeline").iterdir())) == 2
    schedule = build("1f1b", ranks=2, microbatches=4)
    for program in lower(schedule):
        path = folder / f"rank_{program.rank:04d}.json.gz"
        trace = json.loads(gzip.decompress(path.read_bytes()))
        events = sorted(trace["traceEvents"], key=lambda event: event["ts"])
        seen = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        wanted = [name_of(action) for action in program.actions]
        assert [name for name in seen if name in wanted] == wanted
        assert f"reduce stage {program.rank}" in seen
        assert trace["megapipe"]["place"] == f"pp {program.rank} dp 0 tp 0"
        assert sum(action.do == ActionKind.COMPUTE for action in program.actions) == 8
    assert merge(folder).exists()
    assert {path.name for path in folder.parent.iterdir()} == {folder.name}, "that step alone"


@pytest.mark.slow
def test_a_device_without_memory_leaves_the_plan_and_one_line(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(root=str(ROOT)))
    given = arguments({**tiny(tmp_path), "parallel.pp": "2"})
    outcome = run_forked(tmp_path, 2, *given, script=str(script))
    folder = tmp_path / "runs/run/out_of_memory"
    words = (
        "rank 1 is out of memory: CUDA out of memory. Tried to allocate 2.00 GiB: the plan counts ",
        str(folder),
        "no memory snapshot",
    )
    outcome.assert_one_line(7, *words)
    assert [path.name for path in folder.iterdir()] == ["plan.txt"]
    assert (folder / "plan.txt").read_text().startswith("plan of run")


def tensors_in_cycles(world: World, case: Case) -> list[str]:
    """Return the shapes of what only Python's garbage collector would free after a step."""
    config, layout = configure(case)
    step = TrainStep(config, layout, world.mesh(Grid(pp=case.pp, dp=case.dp, tp=case.tp)))
    rows = Rows(case)
    step.train(0, rows)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        step.train(1, rows)
        step.settle()
        gc.collect()
        return [str(item.shape) for item in gc.garbage if isinstance(item, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_no_tensor_waits_for_the_garbage_collector() -> None:
    cases = [Case(pp=2, m=4), Case(tp=2, sequence_parallel=True, m=2, activations="selective")]
    for case in cases:
        assert run_world(2, tensors_in_cycles, case) == [[], []], case


def test_garbage_is_collected_at_its_steps_and_at_no_other_time() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    freed = []
    with GCControl(3) as garbage:
        assert not gc.isenabled()
        for step in range(1, 8):
            weakref.finalize(Cycle(), freed.append, step)
            garbage.after(step)
            assert freed == list(range(1, step // 3 * 3 + 1))
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    hidden = Cycle()
    gc.freeze()  # as a process does before it forks
    with GCControl(3):
        assert not any(each is hidden for each in gc.get_objects())
    assert not any(each is hidden for each in gc.get_objects())
    gc.unfreeze()
    with GCControl(0) as garbage:
        assert gc.isenabled()
        garbage.after(5)
