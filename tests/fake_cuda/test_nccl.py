"""The stand-in for NCCL: what it computes, and that violations of its rules are noticed."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.distributed.mesh import Grid
from megapipe.testing import WorldError
from tests.fake_cuda.world import faults_of, observe, run_world

N = 6


def own(world: Any, n: int = N, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return values that differ between ranks."""
    return torch.arange(n, device="cuda", dtype=dtype) + 10 * world.rank


def collectives(world: Any, dtype: torch.dtype, later: bool) -> dict[str, list[float]]:
    """Run every kind of collective, and wait for it at once or later."""
    world.restart()
    x, size = own(world, dtype=dtype), world.size
    outs = {name: x.clone() for name in ("sum", "max", "broadcast")}
    outs |= {"gather": x.new_empty(size * N), "scatter": x.new_empty(N // size)}
    outs |= {"all_to_all": torch.empty_like(x), "in place": x.new_zeros(size * N)}
    place = outs["in place"][world.rank * N : (world.rank + 1) * N].copy_(x)
    works = [
        dist.all_reduce(outs["sum"], async_op=later),
        dist.all_reduce(outs["max"], dist.ReduceOp.MAX, async_op=later),
        dist.broadcast(outs["broadcast"], 1, async_op=later),
        dist.all_gather_into_tensor(outs["gather"], x, async_op=later),
        dist.all_gather_into_tensor(outs["in place"], place, async_op=later),
        dist.reduce_scatter_tensor(outs["scatter"], x, async_op=later),
        dist.all_to_all_single(outs["all_to_all"], x, async_op=later),
    ]
    for work in works:
        if work is not None:
            work.wait()
    objects: list[Any] = [None] * size
    dist.gather_object(f"from {world.rank}", objects if world.rank == 0 else None)
    assert world.rank or objects == [f"from {i}" for i in range(size)]
    dist.barrier()
    return {name: out.double().tolist() for name, out in outs.items()}


def thread_blocks(world: Any) -> list[int | None]:
    """Return the thread-block limit of groups of a mesh: with a limit of 3, and with none."""
    mesh = world.mesh(Grid(pp=2))
    axes = [mesh.group_of([0, 1], ctas=ctas) for ctas in (3, None)]
    return [getattr(axis.group.options.config, "max_ctas", None) for axis in axes]


def test_a_channel_has_as_many_thread_blocks_as_are_asked_for() -> None:
    assert run_world(2, thread_blocks) == [[3, None]] * 2


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_collectives(dtype: torch.dtype, later: bool) -> None:
    results = run_world(2, collectives, dtype, later)
    first, second = ([float(i + 10 * rank) for i in range(N)] for rank in range(2))
    total = [a + b for a, b in zip(first, second, strict=True)]
    for rank, found in enumerate(results):
        mine = slice(rank * N // 2, (rank + 1) * N // 2)
        assert found == {
            "sum": total,
            "max": second,
            "broadcast": second,
            "gather": first + second,
            "in place": first + second,
            "scatter": total[mine],
            "all_to_all": first[mine] + second[mine],
        }


def messages(world: Any) -> list[Any]:
    """Send messages long before they are received; receive them in order."""
    world.restart()
    group = dist.group.WORLD
    if world.rank == 0:
        works = [group.send([own(world) * i], 1, 0) for i in range(5)]
        return [work.wait() for work in works]
    buffers = [torch.empty(N, device="cuda") for _ in range(5)]
    works = [group.recv([buffer], 0, 0) for buffer in buffers]
    for work in works:
        work.wait()
    return [buffer.tolist() for buffer in buffers]


def test_messages() -> None:
    _, received = run_world(2, messages)
    assert received == [[float(k * i) for k in range(N)] for i in range(5)]


def refused(world: Any) -> None:
    """Check the errors for what NCCL cannot take."""
    world.restart()
    here, there = (torch.ones(4, 4, device=f"cuda:{i}") for i in range(2))
    for tensor, text in (
        (torch.ones(2), "NCCL takes tensors of a GPU, not of cpu"),
        (here.t()[1:], "contiguous"),
        (there, "the current device is cuda:0"),
    ):
        with pytest.raises(ValueError, match=text):
            dist.all_reduce(tensor)
    whole = torch.zeros(8, device="cuda")
    with pytest.raises(ValueError, match="not as long as all inputs"):
        dist.group.WORLD.all_gather_single(whole, whole[:3])


def test_what_nccl_cannot_take_is_refused() -> None:
    run_world(1, refused)


def read_early(world: Any) -> None:
    x = own(world)
    work = dist.all_reduce(x, async_op=True)
    assert x.isnan().all()
    work.wait()


def count_read_early(world: Any) -> None:
    """Check that an integer result is large and negative before the wait: integers have no NaN."""
    x = own(world, dtype=torch.int64)
    work = dist.all_reduce(x, async_op=True)
    assert (x < -(2**32)).all()
    work.wait()


def message_read_early(world: Any) -> None:
    group, peer = dist.group.WORLD, 1 - world.rank
    sent = group.send([own(world)], peer, 0)
    x = torch.zeros(N, device="cuda")
    received = group.recv([x], peer, 0)
    x + 1
    sent.wait()
    received.wait()


def input_changed(world: Any) -> None:
    x = own(world)
    out = x.new_empty(2 * N)
    work = dist.all_gather_into_tensor(out, x, async_op=True)
    x.zero_()
    work.wait()


def own_part_changed(world: Any) -> None:
    """Change this rank's part of an in-place output before the wait: it is the input."""
    out = torch.zeros(2 * N, device="cuda")
    part = out[world.rank * N : (world.rank + 1) * N]
    work = dist.all_gather_into_tensor(out, part, async_op=True)
    part.fill_(3)
    work.wait()


def message_changed(world: Any) -> None:
    group, peer = dist.group.WORLD, 1 - world.rank
    x = own(world)
    sent = group.send([x], peer, 0)
    received = group.recv([torch.empty(N, device="cuda")], peer, 0)
    x.zero_()
    sent.wait()
    received.wait()


def never_waited_for(world: Any) -> None:
    dist.all_reduce(own(world), async_op=True)


def waited_for_on_another_stream(world: Any) -> None:
    """Wait on one stream, and use the result on another."""
    x = own(world)
    work = dist.all_reduce(x, async_op=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        work.wait()
    x + 1
    torch.cuda.synchronize()


def begun_before_its_input_is_there(world: Any) -> None:
    x, other = own(world), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        x.mul_(2)
    dist.all_reduce(x)
    other.synchronize()


def another_order(world: Any) -> None:
    x, y = own(world), own(world)
    for tensor in (x, y) if world.rank == 0 else (y, x):
        dist.all_reduce(tensor[: 3 if tensor is x else N])


def another_reduction(world: Any) -> None:
    dist.all_reduce(own(world), dist.ReduceOp.MAX if world.rank else dist.ReduceOp.SUM)


def message_of_another_type(world: Any) -> None:
    group, peer = dist.group.WORLD, 1 - world.rank
    if world.rank == 0:
        group.send([own(world)], peer, 0).wait()
    else:
        group.recv([own(world, dtype=torch.int32)], peer, 0).wait()


RACE = "and has not waited for it"
NOTICED: dict[Callable[[Any], None], tuple[str, ...]] = {
    read_early: (f"aten::.* reads what NCCL's all_reduce .* writes, {RACE}",),
    count_read_early: (f"aten::.* reads what NCCL's all_reduce .* writes, {RACE}",),
    message_read_early: (f"aten::add .* reads what NCCL's recv .* writes, {RACE}",),
    input_changed: (
        f"aten::zero_ .* writes what NCCL's all_gather .* reads, {RACE}",
        "all_gather of float32 6: what it was given was changed before the wait",
    ),
    own_part_changed: (
        f"aten::fill_ .* writes what NCCL's all_gather .* reads, {RACE}",
        "all_gather of float32 6: what it was given was changed before the wait",
    ),
    message_changed: (
        f"aten::zero_ .* writes what NCCL's send .* reads, {RACE}",
        "send of float32 6 to .: what it was given was changed before the wait",
    ),
    never_waited_for: ("all_reduce of float32 6: it was let go, and nobody had waited for it",),
    waited_for_on_another_stream: (f"aten::add .* reads what NCCL's all_reduce .* {RACE}",),
    begun_before_its_input_is_there: (f"NCCL's all_reduce .* writes what aten::mul .* {RACE}",),
    message_of_another_type: ("messages from rank 0 to 1: number 1 is float32 6 .* int32 6",),
}


def restarted(world: Any, which: Callable[[Any], None]) -> None:
    world.restart()
    which(world)


@pytest.mark.parametrize("which", NOTICED, ids=lambda which: which.__name__)
def test_a_rule_that_is_broken_is_noticed(which: Callable[[Any], None]) -> None:
    _, reports = observe(2, restarted, which)
    found = faults_of(reports)
    for pattern in NOTICED[which]:
        assert any(re.search(pattern, fault) for fault in found), found


def two_groups(world: Any) -> list[Any]:
    world.restart()
    patience = datetime.timedelta(seconds=world._timeout_s)
    return [dist.new_group([0, 1], timeout=patience) for _ in range(2)]


@pytest.mark.parametrize(
    "which", [another_order, another_reduction], ids=lambda which: which.__name__
)
def test_collectives_that_differ_are_refused(which: Callable[[Any], None]) -> None:
    with pytest.raises(WorldError, match=r"number 1 is all_reduce .* on another"):
        observe(2, restarted, which, group_timeout_s=3.0)


def first_used_in_another_order(world: Any) -> None:
    groups = two_groups(world)
    for group in groups if world.rank == 0 else reversed(groups):
        dist.all_reduce(own(world), group=group)


@pytest.mark.full
def test_groups_that_are_first_used_in_another_order_hang() -> None:
    with pytest.raises(WorldError, match=r"[Tt]imed? ?out"):
        observe(2, first_used_in_another_order, group_timeout_s=3.0, timeout_s=30.0)


def used_in_another_order(world: Any) -> None:
    """Connect in one order and use in different ones: ranks with one device may deadlock."""
    groups = two_groups(world)
    for group in groups:
        dist.all_reduce(own(world), group=group)
    works = [
        dist.all_reduce(own(world), group=group, async_op=True)
        for group in (groups if world.rank == 0 else reversed(groups))
    ]
    for work in works:
        work.wait()


def test_groups_that_are_used_in_another_order_are_noticed() -> None:
    _, reports = observe(2, used_in_another_order)
    (fault,) = faults_of(reports)
    assert "groups that ranks 0 and 1 share: number 3 is in group" in fault


def polled(world: Any) -> list[bool]:
    """Ask whether messages are complete; a sent one is at the second time."""
    world.restart()
    group, peer = dist.group.WORLD, 1 - world.rank
    sent = group.send([own(world)], peer, 0)
    received = group.recv([torch.empty(N, device="cuda")], peer, 0)
    asked = [sent.is_completed(), sent.is_completed(), received.is_completed()]
    received.wait()
    return [*asked, received.is_completed()]


@pytest.mark.full
def test_messages_can_be_asked() -> None:
    for asked in run_world(2, polled):
        assert asked == [False, True, False, True]


@pytest.mark.full
def test_communicators_are_counted() -> None:
    """The world has one; messages of two ranks have another."""
    _, reports = observe(2, polled)
    assert [report.ledger.communicators for report in reports] == [1, 1]
    _, reports = observe(2, used_in_another_order)
    assert [report.ledger.communicators for report in reports] == [2, 2]
    assert [report.ledger.counts["all_reduce"] for report in reports] == [4, 4]
