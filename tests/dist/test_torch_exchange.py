"""Schedules exchanged with torch.distributed.pipelining: ours in its runtime, its orders here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from megapipe.errors import ScheduleError
from megapipe.schedule.generators import build, forward_only, names
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import Placement, loop
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.text import from_csv, to_torch_csv
from megapipe.schedule.timing.simulate import simulate
from megapipe.testing import World, run_world

WIDTH, ROWS = 5, 3
"""Number of features, and of samples of a micro-batch."""

Gradients = dict[str, list[float]]
"""Gradients by stage and name; not tensors, which do not outlive the process that sends them."""


def layers(stages: int) -> list[nn.Module]:
    """Make one module per stage, the same on every rank."""
    torch.manual_seed(7)
    return [
        nn.Sequential(
            nn.Linear(WIDTH, WIDTH + 1),
            nn.Tanh(),
            nn.LayerNorm(WIDTH + 1),
            nn.Linear(WIDTH + 1, WIDTH),
        ).double()
        for _ in range(stages)
    ]


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    shape = (2, ROWS * microbatches, WIDTH)
    inputs, targets = torch.randn(shape, dtype=torch.float64, generator=generator)
    return inputs, targets


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def gradients(modules: dict[int, nn.Module]) -> Gradients:
    return {
        f"{stage}.{name}": parameter.grad.flatten().tolist()
        for stage, module in modules.items()
        for name, parameter in module.named_parameters()
    }


def plain(stages: int, microbatches: int) -> tuple[float, Gradients]:
    """Return loss and gradients of the whole model in one process."""
    modules = layers(stages)
    hidden, target = batch(microbatches)
    for module in modules:
        hidden = module(hidden)
    loss = loss_of(hidden, target)
    loss.backward()
    return loss.item(), gradients(dict(enumerate(modules)))


def torch_step(
    world: World, path: str, placement: Placement, microbatches: int
) -> tuple[float, Gradients]:
    """Run one step of torch's runtime over the schedule in a file; return this rank's loss and
    gradients."""
    last = placement.stages - 1
    whole = layers(placement.stages)
    modules = {stage: whole[stage] for stage in placement.stages_of(world.rank)}
    stages = [
        PipelineStage(module, stage, placement.stages, torch.device("cpu"))
        for stage, module in modules.items()
    ]
    runtime = _PipelineScheduleRuntime(stages, microbatches, loss_of, scale_grads=False)
    runtime._load_csv(path)
    inputs, target = batch(microbatches)
    losses: list[Tensor] = []
    runtime.step(
        *([inputs] if 0 in modules else []),
        target=target if last in modules else None,
        losses=losses,
    )
    return sum(loss.item() for loss in losses), gradients(modules)


def torch_steps(
    world: World, cases: list[tuple[str, Placement, int]]
) -> list[tuple[float, Gradients]]:
    return [torch_step(world, *case) for case in cases]


OURS = (
    ("interleaved_1f1b", 4, {"chunks": 2}),
    ("interleaved_1f1b", 5, {"chunks": 3, "microbatch_group_size": 3}),
    ("zb_h1", 4, {}),
    ("zb_v", 5, {}),
    ("dualpipe_v", 5, {}),
    ("gpipe", 3, {"chunks": 2}),
)


@pytest.mark.skipif(torch.__version__ < "2.11", reason="its runtime closes a connection of gloo")
def test_our_schedules_in_torchs_runtime(tmp_path: Path) -> None:
    """Loss and every gradient are those of one process."""
    schedules = [build(name, ranks=2, microbatches=m, **options) for name, m, options in OURS]
    cases = []
    for index, schedule in enumerate(schedules):
        path = tmp_path / f"{index}.csv"
        path.write_text(to_torch_csv(schedule))
        cases.append((str(path), schedule.placement, schedule.microbatches))
    by_rank = run_world(2, torch_steps, cases)
    for index, schedule in enumerate(schedules):
        loss, expected = plain(schedule.placement.stages, schedule.microbatches)
        got: Gradients = {}
        for results in by_rank:
            got |= results[index][1]
        assert sum(results[index][0] for results in by_rank) == pytest.approx(loss, rel=1e-12)
        assert got.keys() == expected.keys()
        for name, gradient in expected.items():
            assert got[name] == pytest.approx(gradient, rel=1e-11, abs=1e-12), schedule.name


def test_a_loss_or_an_order_that_is_wrong_would_be_seen() -> None:
    """The comparison above has substance: every parameter has a gradient, all different."""
    loss, gradients = plain(4, 3)
    values = [value for gradient in gradients.values() for value in gradient]
    assert len(gradients) == 4 * 6
    assert len(set(values)) == len(values)
    assert min(map(abs, values)) > 1e-9
    assert plain(4, 4)[0] != loss


def torch_order(name: str, ranks: int, chunks: int, microbatches: int, path: Path) -> Schedule:
    """Return the order that torch's class of that name generates, through its CSV."""
    stages = [
        SimpleNamespace(
            num_stages=ranks * chunks,
            group_size=ranks,
            group_rank=0,
            stage_index=chunk * ranks,
            is_last=False,
            has_backward=True,
            submod=nn.Identity(),
        )
        for chunk in range(chunks)
    ]
    generated = get_schedule_class(name)(stages, microbatches, loss_fn=loss_of)
    generated._dump_csv(str(path), format="compute_only")
    return from_csv(path.read_text(), name=name)


@pytest.mark.parametrize(
    ("theirs", "ours", "chunks", "sizes"),
    [
        ("Interleaved1F1B", "interleaved_1f1b", 2, [(2, 4), (3, 9), (4, 8), (2, 1)]),
        ("Interleaved1F1B", "interleaved_1f1b", 3, [(2, 4), (4, 4)]),
        ("InterleavedZeroBubble", "zb_h1", 1, [(2, 4), (3, 9), (4, 3), (4, 8)]),
        ("ZBVZeroBubble", "zb_v", 2, [(1, 2), (2, 4), (2, 5), (3, 6), (4, 8)]),
        ("DualPipeV", "dualpipe_v", 2, [(1, 2), (2, 4), (2, 5), (3, 7), (4, 10)]),
    ],
)
def test_orders_that_are_ours(
    theirs: str, ours: str, chunks: int, sizes: list[tuple[int, int]], tmp_path: Path
) -> None:
    """Read from torch's CSV, operation by operation."""
    for ranks, microbatches in sizes:
        read = torch_order(theirs, ranks, chunks, microbatches, tmp_path / "order.csv")
        own = {"chunks": chunks} if ours == "interleaved_1f1b" else {}
        made = build(ours, ranks=ranks, microbatches=microbatches, **own)
        assert (read.ops, read.placement) == (made.ops, made.placement)
        assert validate(read).bitwise_order


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "microbatches", "in_order", "peak", "makespan"),
    [
        ("Interleaved1F1B", 4, 1, 8, True, (7, 5, 3, 1), 33),
        ("LoopedBFS", 2, 2, 4, False, (8, 8), 27),
        ("LoopedBFS", 4, 1, 8, False, (8, 8, 8, 8), 33),
        ("LoopedBFS", 2, 2, 1, True, (2, 2), 12),
        ("InterleavedZeroBubble", 4, 2, 8, True, (8, 8, 8, 8), 51),
        ("ZBVZeroBubble", 2, 2, 4, True, (4, 4), 25),
        ("ZBVZeroBubble", 4, 2, 8, True, (8, 8, 8, 8), 51),
        ("ZBVZeroBubble", 4, 2, 3, True, (4, 5, 6, 6), 26),
        ("DualPipeV", 4, 2, 8, True, (9, 9, 9, 9), 54),
    ],
)
def test_orders_of_torch_are_proved_and_timed_here(
    name: str,
    ranks: int,
    chunks: int,
    microbatches: int,
    in_order: bool,
    peak: tuple[int, ...],
    makespan: int,
    tmp_path: Path,
) -> None:
    """Reversed micro-batches (LoopedBFS) are not in bitwise order."""
    schedule = torch_order(name, ranks, chunks, microbatches, tmp_path / "order.csv")
    report = validate(schedule)
    assert (report.bitwise_order, report.peak_held) == (in_order, peak)
    assert simulate(schedule).makespan == makespan


@pytest.mark.parametrize("name", names())
def test_whatever_torch_can_run_is_what_it_reads(name: str, tmp_path: Path) -> None:
    """torch's parser reads every cell that is written for it, and its runtime accepts the lists."""
    schedule = build(name, ranks=4, microbatches=8)
    try:
        text = to_torch_csv(schedule)
    except ScheduleError:
        beyond = len(schedule.placement.table) > 1 or schedule.slices > 1
        assert beyond or schedule.sizes or schedule.recompute
        return
    path = tmp_path / "order.csv"
    path.write_text(text)
    placement = schedule.placement
    stages = [
        SimpleNamespace(
            num_stages=placement.stages,
            group_size=4,
            group_rank=0,
            stage_index=stage,
            is_last=False,
        )
        for stage in placement.stages_of(0)
    ]
    runtime = _PipelineScheduleRuntime(stages, 8, loss_of)
    runtime._load_csv(str(path))
    assert runtime.stage_index_to_group_rank == dict(enumerate(placement.table[0]))
    rows = [",".join(map(str, runtime.pipeline_order[rank])) for rank in range(4)]
    assert rows == text.splitlines()


@pytest.mark.parametrize(
    ("schedule", "what"),
    [
        (forward_only(loop(2), 2), "a schedule without backward"),
        (build("chimera", ranks=2, microbatches=2), "more than one direction"),
        (build("seq1f1b", ranks=2, microbatches=2), "slices of a sequence"),
        (build("autopipe", ranks=4, microbatches=4), "micro-batches of unequal size"),
        (build("varuna", ranks=2, microbatches=2), "recomputation by the schedule"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_torch_cannot_run_is_refused(schedule: Schedule, what: str) -> None:
    message = f"schedule {schedule.name}: torch.distributed.pipelining cannot run {what}; it knows"
    with pytest.raises(ScheduleError, match=message):
        to_torch_csv(schedule)
