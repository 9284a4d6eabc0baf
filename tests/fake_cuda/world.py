"""Worlds of processes with a device of type cuda each, for tests.

The process of a test never has the device. Ranks come from a forkserver of their own, which has
loaded the device before torch (:mod:`tests.fake_cuda.preload`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any
from unittest import mock

from megapipe.launch.local import RankError, run_ranks
from megapipe.testing import WorldError
from tests.fake_cuda import build
from tests.fake_cuda.ledger import Ledger, compare
from tests.parity.forked import loaded

DEVICES = 8
"""Number of devices; a rank uses the device of its number."""


@dataclass
class Report:
    """What the device of one rank noted, in addition to the result of its function."""

    ledger: Ledger
    faults: list[str]
    """Races between streams, and memory that was freed too early."""
    host_waits: dict[str, int]
    """Number of times that the host waited for the device, by cause."""


def faults_of(reports: Sequence[Report]) -> list[str]:
    """Return all faults that the devices of a world noted, and the differences of their notes."""
    found = [
        f"rank {report.ledger.rank}: {fault}"
        for report in reports
        for fault in (*report.faults, *report.ledger.faults)
    ]
    return [*found, *compare([report.ledger for report in reports])]


def run_world(ranks: int, function: Callable[..., Any], *args: Any, **limits: float) -> list[Any]:
    """Run `function(DeviceWorld, *args)` on each rank; returns their results, by rank.

    Raises :class:`WorldError` if a rank fails, and AssertionError if a device noted a fault.
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
    """Run `function` like :func:`run_world`, but return the reports of all ranks too and do not
    judge them."""
    try:
        pairs = run_ranks(
            DeviceContext(),
            ranks,
            _on_rank,
            (function, args),
            group_timeout_s=group_timeout_s,
            timeout_s=timeout_s,
        )
    except RankError as error:
        raise WorldError(str(error)) from None
    results, reports = zip(*pairs, strict=True)
    return list(results), list(reports)


@functools.cache
def _server() -> forkserver.ForkServer:
    """Return the forkserver with the device, started on first use."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(["tests.fake_cuda.preload", *loaded()])
    environ = {"FAKE_CUDA_LIBRARY": str(build.library()), "FAKE_CUDA_DEVICES": str(DEVICES)}
    with mock.patch.dict(os.environ, environ):
        server.ensure_running()
    return server


class _Popen(popen_forkserver.Popen):
    """A process of that forkserver."""

    def _launch(self, process: Any) -> None:
        connect = _server().connect_to_new_process
        with mock.patch.object(forkserver, "connect_to_new_process", connect):
            super()._launch(process)


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process: Any) -> _Popen:
        return _Popen(process)


class DeviceContext(ForkServerContext):
    """Starts processes that have the device."""

    Process = _Process


def _on_rank(world: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return a rank's result, and its report."""
    from tests.fake_cuda.rank import run

    return run(world, function, args)
