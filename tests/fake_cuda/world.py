"""Worlds of processes with a device of type cuda each, for tests.

No test's own process ever has the device: a host process (:mod:`tests.fake_cuda.host`) loads it
before torch, once for all worlds of a test run, and forks their ranks.
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megapipe.testing import WorldError
from tests.fake_cuda import build
from tests.fake_cuda.ledger import Ledger, compare

ROOT = Path(__file__).resolve().parents[2]
DEVICES = 8
"""All that there are; a rank's own is the one of its number."""


@dataclass
class Report:
    """What the device of one rank noted, besides what its function returned."""

    ledger: Ledger
    faults: list[str]
    """Races between streams, and memory given back too early."""
    host_waits: dict[str, int]
    """How often the host waited for the device, by what made it wait."""


@dataclass
class Request:
    """A world to be run by the host process."""

    ranks: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    timeout_s: float
    group_timeout_s: float


def faults_of(reports: Sequence[Report]) -> list[str]:
    """All that the devices of a world noted, and what their notes disagree in."""
    found = [
        f"rank {report.ledger.rank}: {fault}"
        for report in reports
        for fault in (*report.faults, *report.ledger.faults)
    ]
    return [*found, *compare([report.ledger for report in reports])]


def run_world(ranks: int, function: Callable[..., Any], *args: Any, **limits: float) -> list[Any]:
    """Run `function(DeviceWorld, *args)` on each rank; returns their results, by rank.

    Raises :class:`WorldError` where a rank fails, and AssertionError where a device noted a fault.
    """
    results, reports = observe(ranks, function, *args, **limits)
    found = faults_of(reports)
    assert not found, "\n".join(found)
    return results


def observe(
    ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 300.0,
    group_timeout_s: float = 60.0,
) -> tuple[list[Any], list[Report]]:
    """The same, with the reports of all ranks and without judging them."""
    request = Request(ranks, function, args, timeout_s, group_timeout_s)
    host = _host()
    host.send(request)
    try:
        done, value = host.recv()
    except EOFError:
        _host.cache_clear()
        raise WorldError("the process with the device died without a word") from None
    if not done:
        raise WorldError(value)
    results, reports = zip(*value, strict=True)
    return list(results), list(reports)


@functools.cache
def _host() -> Connection:
    """The connection to the host process, which ends with this one."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.fake_cuda.host"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "FAKE_CUDA_DEVICES": str(DEVICES)}
    process = subprocess.Popen(
        [*command, str(build.library()), str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        cwd=ROOT,
        env=environ,
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    connection = Connection(ours.detach())

    def end() -> None:
        connection.close()
        process.wait()

    atexit.register(end)
    return connection
