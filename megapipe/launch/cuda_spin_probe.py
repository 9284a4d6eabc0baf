"""Finds out which host calls wait for a kernel that spins on another stream, and what the spinning
costs.

A posted NCCL receive is a spinning kernel: it ends when its message arrives. If the message depends
on what the host does next, a host call that waits for the kernel never returns. In place of the
receive, this module uses a kernel that sleeps and ends by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megapipe.errors import LaunchError

SECONDS = 2.0
"""Seconds that a kernel spins while a host call is tried."""
SIZE = 4096
"""Number of rows and of columns of the matrices whose product is timed."""
BLOCKS = (0, 1, 2, 4, 8)
"""Numbers of thread blocks that spin, one per kernel, while a matrix product is timed."""


class Call(NamedTuple):
    """A host call that a training step may make."""

    name: str
    run: Callable[[], object]


def calls(device: torch.device) -> Iterator[Call]:
    """Yield the host calls to try. The order matters: the first call of a kernel loads it."""
    narrow = torch.bfloat16
    q = torch.randn(2, 8, 1024, 128, device=device, dtype=narrow, requires_grad=True)

    def attention(length: int) -> Tensor:
        here = q[:, :, :length]
        return functional.scaled_dot_product_attention(here, here, here, is_causal=True)

    numbers = torch.arange(4.0)
    yield Call("memory from the driver, 1 GiB", lambda: torch.empty(1 << 28, device=device))
    yield Call("memory back to the driver", torch.cuda.empty_cache)
    yield Call("pinned memory, 256 MiB", lambda: torch.empty(1 << 26, pin_memory=True))
    yield Call("a copy to the device", lambda: numbers.to(device))
    yield Call("a value to the host", lambda: q[0, 0, 0, 0].item())
    yield Call("the first matrix product", lambda: torch.mm(q[0, 0], q[0, 0].t()))
    yield Call("the first attention", lambda: attention(1024))
    yield Call("its backward, the first", lambda: attention(1024).sum().backward())
    yield Call("attention of another length", lambda: attention(512))
    yield Call("the first norm", lambda: functional.rms_norm(q, (128,)))
    yield Call("another matrix product", lambda: torch.mm(q[0, 0], q[0, 0].t()))
    for rows in (24, 8192):  # the number may differ in each micro-batch
        x = torch.randn(rows, 128, device=device, dtype=narrow)
        yield Call(f"a matrix product of {rows} rows", lambda x=x: torch.mm(x, q[0, 0].t()))  # type: ignore[misc]


def report(device: torch.device | None = None) -> Iterator[str]:
    """Yield a line of text for each host call and for each number of spinning blocks. Raises
    :class:`LaunchError` without a GPU."""
    if not torch.cuda.is_available():
        raise LaunchError("--spin needs a CUDA device, and this machine has none")
    device = device or torch.device("cuda", torch.cuda.current_device())
    rate = cycles_per_second()
    for name, run in calls(device):
        waited, seconds = waits_for_spin(run, int(SECONDS * rate))
        yield f"{'waits' if waited else 'ok':5}  {seconds * 1e3:9.1f} ms  {name}"
    for blocks in BLOCKS:
        seconds = product_beside(blocks, device, int(SECONDS * rate))
        yield f"{blocks} spinning blocks: {seconds * 1e3:.3f} ms for a product of {SIZE} x {SIZE}"


def cycles_per_second() -> float:
    """Measure the GPU clock cycles per second, in the cycles that ``torch.cuda._sleep`` takes."""
    cycles = 100_000_000
    torch.cuda._sleep(1000)
    return cycles / _timed(lambda: torch.cuda._sleep(cycles))


def waits_for_spin(run: Callable[[], object], cycles: int) -> tuple[bool, float]:
    """Return whether `run` returns only after a kernel on another stream has ended, and the seconds
    that it takes."""
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(cycles)
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    waited = side.query()
    torch.cuda.synchronize()
    return waited, seconds


def product_beside(blocks: int, device: torch.device, cycles: int) -> float:
    """Measure the seconds that a bf16 matrix product takes while `blocks` thread blocks spin."""
    a, b = (torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    torch.mm(a, b)
    torch.cuda.synchronize()
    for _ in range(blocks):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(cycles)
    times = 20
    seconds = _timed(lambda: [torch.mm(a, b) for _ in range(times)]) / times
    torch.cuda.synchronize()
    return seconds


def _timed(run: Callable[[], object]) -> float:
    """Measure the seconds that `run` takes on the GPU, without waiting for other streams."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    elapsed: Any = start.elapsed_time(stop)
    return float(elapsed) / 1e3
