"""Stream order is checked: unordered uses of memory, and memory that is freed too early."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fake_cuda.world import observe, run_world

N = 8


def computing() -> Any:
    return torch.cuda.current_stream()


def write_then_read(other: Any, x: Any) -> None:
    with torch.cuda.stream(other):
        x + 1


def read_then_write(other: Any, x: Any) -> None:
    other.wait_stream(computing())
    with torch.cuda.stream(other):
        x + 1
    x.zero_()


def write_twice(other: Any, x: Any) -> None:
    with torch.cuda.stream(other):
        x.zero_()


def waits_for_an_older_event(other: Any, x: Any) -> None:
    mark = computing().record_event()
    x.zero_()
    other.wait_event(mark)
    with torch.cuda.stream(other):
        x + 1


def another_stream_has_waited(other: Any, x: Any) -> None:
    torch.cuda.Stream().wait_stream(computing())
    with torch.cuda.stream(other):
        x + 1


def freed_while_in_use(other: Any, x: Any) -> None:
    other.wait_stream(computing())
    y = x * 2
    other.wait_stream(computing())
    with torch.cuda.stream(other):
        y + 1
    del y


def shrunk_while_in_use(other: Any, x: Any) -> None:
    other.wait_stream(computing())
    with torch.cuda.stream(other):
        x + 1
    x.untyped_storage().resize_(0)


def result_of_another_stream(other: Any, x: Any) -> None:
    other.wait_stream(computing())
    with torch.cuda.stream(other):
        y = x + 1
    y + 1
    other.wait_stream(computing())


def backward_on_another_stream(other: Any, x: Any) -> None:
    """Run a backward on its forward's stream, as autograd does, and do not wait for the
    gradient."""
    leaf = x.requires_grad_()
    other.wait_stream(computing())
    with torch.cuda.stream(other):
        y = (leaf * leaf).sum()
        (grad,) = torch.autograd.grad(y, leaf)
    grad.add_(1)
    other.wait_stream(computing())


def pinned_memory_changed(other: Any, x: Any) -> None:
    pinned = torch.ones(N).pin_memory()
    x.copy_(pinned, non_blocking=True)
    pinned.zero_()
    torch.cuda.synchronize()


def pinned_memory_read_by_another_copy(other: Any, x: Any) -> None:
    pinned = torch.ones(N).pin_memory()
    pinned.copy_(x, non_blocking=True)
    with torch.cuda.stream(other):
        torch.empty(N, device="cuda").copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()


RACES: dict[Callable[[Any, Any], None], str] = {
    write_then_read: "aten::add .* reads what aten::fill_ .* writes",
    read_then_write: "aten::zero_ .* writes what aten::add .* reads",
    write_twice: "aten::zero_ .* writes what aten::fill_ .* writes",
    waits_for_an_older_event: "aten::add .* reads what aten::zero_ .* writes",
    another_stream_has_waited: "aten::add .* reads what aten::fill_ .* writes",
    freed_while_in_use: "given back while stream .* may still use it",
    shrunk_while_in_use: "given back while stream .* may still use it",
    result_of_another_stream: "aten::add .* reads what aten::add .* writes",
    backward_on_another_stream: "the default stream .* reads what aten::.* writes",
    pinned_memory_changed: "pinned memory was changed while copy from the host may still read it",
    pinned_memory_read_by_another_copy: "copy from .* reads what copy to the host .* writes",
}


def race(world: Any, which: Callable[[Any, Any], None]) -> None:
    x = torch.ones(N, device="cuda")
    which(torch.cuda.Stream(), x)


@pytest.mark.parametrize("which", RACES, ids=lambda which: which.__name__)
def test_a_race_is_noticed(which: Callable[[Any, Any], None]) -> None:
    _, (report,) = observe(1, race, which)
    assert report.faults
    assert re.search(RACES[which], report.faults[0]), report.faults


def in_order(world: Any) -> None:
    """Do what the faulty functions do, with the waits that they lack: nothing is noted."""
    other = torch.cuda.Stream()
    x = torch.ones(N, device="cuda")
    other.wait_stream(computing())
    with torch.cuda.stream(other):
        y = x + 1
        done = other.record_event()
    computing().wait_event(done)
    x.zero_()
    y.add_(1)
    y.record_stream(computing())  # y was allocated on the other stream
    del y
    third = torch.cuda.Stream()
    third.wait_stream(computing())  # and so for the other one
    with torch.cuda.stream(third):
        z = x + 1
    x.record_stream(third)
    del x
    torch.cuda.synchronize()  # the host waits for all, and so does what it starts
    z.zero_()
    halves = torch.zeros(N, device="cuda")
    other.wait_stream(computing())
    with torch.cuda.stream(other):
        halves[: N // 2].add_(1)
    halves[N // 2 :].add_(2)  # other bytes
    computing().wait_stream(other)
    pinned = torch.empty(N).pin_memory()
    pinned.copy_(halves, non_blocking=True)
    assert pinned.isnan().all(), "it has not arrived"
    torch.cuda.synchronize()
    assert pinned.tolist() == [1] * (N // 2) + [2] * (N // 2)


def test_what_waits_is_in_order() -> None:
    run_world(1, in_order)


def timed(world: Any) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    for event in events:
        event.record()
        torch.cuda._sleep(20_000_000)
    with pytest.raises(ValueError, match="enable_timing"):
        computing().record_event().elapsed_time(events[0])
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def test_events_tell_the_time() -> None:
    (times,) = run_world(1, timed)
    assert all(time >= 10 for time in times)
