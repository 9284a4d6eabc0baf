"""Worlds of processes with a device of type cuda each, for tests.

No test's own process ever has the device. Ranks come from a forkserver of their own, which has
loaded it before torch (:mod:`tests.fake_cuda.preload`).
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
"""All that there are; a rank's own is the one of its number."""


@dataclass
class Report:
    """What the device of one rank noted, besides what its function returned."""

    ledger: Ledger
    faults: list[str]
    """Races between streams, and memory given back too early."""
    host_waits: dict[str, int]
    """How often the host waited for the device, by what made it wait."""


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
    """The forkserver with the device, started on first use."""
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
    """What a rank returns, and its report."""
    from tests.fake_cuda.rank import run

    return run(world, function, args)
