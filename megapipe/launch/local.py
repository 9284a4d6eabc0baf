"""Groups of gloo processes on this machine, started from a script or a notebook.

A function runs on every rank and receives a :class:`World`. Results come back in rank order, and a
failed rank's traceback becomes the caller's error.

Processes are forks of the caller where a fork is safe. Forks have torch loaded and can run
functions that cannot be imported, such as those of a notebook. CUDA does not survive a fork.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.context import BaseContext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from megapipe.distributed.mesh import Grid, ParallelMesh
from megapipe.errors import LaunchError
from megapipe.launch.loopback import ADDRESS, loopback_problem

GROUP_TIMEOUT_S = 600.0
"""Seconds that ranks wait for each other in a collective."""
STORE_S = 120.0
"""Seconds that a rank waits for the store, which opens when all processes are started."""
PEERS_S = 2.0
"""Seconds that peers of a failed rank may take to fail too; then they are killed."""


class RankError(LaunchError):
    """One or more ranks failed, or did not end in time. `failures`: error texts by rank."""

    def __init__(self, failures: Mapping[int, str], ranks: int) -> None:
        first = next(iter(failures))
        last_line = failures[first].rstrip().rpartition("\n")[2]
        texts = "\n".join(f"--- rank {rank}:\n{failures[rank]}" for rank in sorted(failures))
        super().__init__(f"rank {first} of {ranks}: {last_line}\n{texts}")
        self.failures = failures


class World:
    """One rank's view of all processes, passed to the function that the rank runs.

    The ranks are in torch's default process group, with the backend `backend`.
    """

    backend: ClassVar[str] = "gloo"

    def __init__(self, rank: int, size: int, store: Store, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._timeout_s = timeout_s
        self._lives = 0

    def restart(self) -> None:
        """Destroy all process groups and make new ones.

        Each generation of groups has its own keys in the store. Otherwise new groups would find the
        addresses of earlier groups of the same ranks in the store.
        """
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        self._lives += 1
        store = PrefixStore(f"{self.backend} life {self._lives}", self._store)
        patience = datetime.timedelta(seconds=self._timeout_s)
        dist.init_process_group(
            self.backend, store=store, rank=self.rank, world_size=self.size, timeout=patience
        )
        # a rank that has connected may end while another still connects, which then loses it
        store.set(f"connected {self.rank}", "")
        store.wait([f"connected {rank}" for rank in range(self.size)], patience)

    def mesh(self, grid: Grid, device: str = "cpu") -> ParallelMesh:
        """Make a mesh over all ranks, in new process groups; several ranks may share a GPU."""
        self.restart()
        return ParallelMesh(grid, device=torch.device(device), timeout_s=self._timeout_s)


def spawn(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Run `function(World, *args)` on `ranks` processes of this machine. Return the results in rank
    order.

    Each process computes with one thread, and has its own copies of `args`. Results are pickled.
    Ctrl-C ends all processes.

    Raises:
        RankError: a rank raised an exception or died; the text has its traceback. The others are
            ended.
        LaunchError: no rank could be started, or this process is a rank itself.
    """
    if ranks < 1:
        raise LaunchError(f"spawn: ranks={ranks}: expected at least 1")
    if dist.is_initialized():
        raise LaunchError("spawn: this process is in a process group: call spawn outside of any")
    context = _context(function)
    return run_ranks(context, ranks, function, args, group_timeout_s=GROUP_TIMEOUT_S)


def _context(function: Callable[..., Any]) -> BaseContext:
    """Choose fork or spawn as the way to start processes for `function`."""
    if sys.platform == "linux" and not torch.cuda.is_initialized():
        return multiprocessing.get_context("fork")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise LaunchError(
            "spawn: every process runs this script from its start: call spawn below "
            'if __name__ == "__main__":'
        )
    name = getattr(function, "__qualname__", repr(function))
    in_file = hasattr(sys.modules["__main__"], "__file__")
    try:
        pickle.dumps(function)
        importable = in_file or function.__module__ != "__main__"
    except (pickle.PicklingError, AttributeError, TypeError):
        importable = False
    if not importable:
        why = "CUDA is in use" if sys.platform == "linux" else f"{sys.platform} has no safe fork"
        raise LaunchError(
            f"spawn: {why}, so new processes must import {name}, and they cannot: write it "
            "into a file next to the notebook (%%writefile my_ranks.py) and import it from "
            "that file"
        )
    return multiprocessing.get_context("spawn")


def run_ranks(
    context: BaseContext,
    ranks: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    group_timeout_s: float,
    timeout_s: float | None = None,
) -> list[Any]:
    """Run `function(World, *args)` on `ranks` processes of the multiprocessing `context`, and
    return the results in rank order. `group_timeout_s`: time limit of a collective; `timeout_s`: of
    everything, None for no limit. Raises :class:`RankError` and :class:`LaunchError`."""
    if (problem := loopback_problem()) is not None:
        raise LaunchError(problem)
    pipes: list[Any] = []
    processes: list[Any] = []
    store: Store | None = None
    ended = False
    try:
        for rank in range(ranks):
            ours, theirs = multiprocessing.Pipe()
            given = (rank, ranks, group_timeout_s, theirs, function, args)
            process = context.Process(target=_rank_main, args=given, daemon=True)  # type: ignore[attr-defined]
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        # made after the forks, which would copy locks that the store's thread holds
        store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
        for pipe in pipes:
            with contextlib.suppress(OSError):  # _collect reports a rank that has died
                pipe.send(store.port)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        results = _collect(pipes, deadline)
        ended = True
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)  # tells the rank that all ranks have returned
        return results
    finally:
        for process in processes:
            process.join(timeout=1.0 if ended else 0.0)
            if process.is_alive():
                process.kill()
                process.join()
        # a traceback would keep the store; a later fork that frees it would wait for its thread
        del store


def _collect(pipes: list[Any], deadline: float | None) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = dict(enumerate(pipes))
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = _ready(list(waiting.values()), left)
        if not ready:
            failures.update(dict.fromkeys(waiting, "did not end in time"))
            break
        for rank, pipe in list(waiting.items()):
            if pipe not in ready:
                continue
            del waiting[rank]
            try:
                ok, value = pickle.loads(
                    pipe.recv_bytes()
                )  # tensors are sent by value: the rank may be gone before they are read here
            except EOFError:
                ok, value = False, "died without an error message"
            (results if ok else failures)[rank] = value
        if failures:
            soon = time.monotonic() + PEERS_S
            deadline = soon if deadline is None else min(deadline, soon)
    if failures:
        raise RankError(failures, len(pipes))
    return [results[rank] for rank in range(len(pipes))]


def _ready(pipes: list[Any], seconds: float | None) -> list[Any]:
    """Return the pipes that have something to read; none if nothing comes within `seconds`.

    The wait is split into waits of a second. A signal just before a wait begins does not interrupt
    that wait, so in one long wait Ctrl-C could have no effect for long.
    """
    ends = math.inf if seconds is None else time.monotonic() + seconds
    while True:
        left = ends - time.monotonic()
        ready = multiprocessing.connection.wait(pipes, timeout=min(1.0, max(0.0, left)))
        if ready or left <= 0:
            return ready


def _rank_main(
    rank: int,
    ranks: int,
    group_timeout_s: float,
    pipe: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller ends this process
    torch.set_num_threads(1)
    try:
        if not pipe.poll(STORE_S):
            raise TimeoutError("the caller has not started a store")
        store = TCPStore(ADDRESS, pipe.recv(), is_master=False)
        here = World(rank, ranks, store, group_timeout_s)
        here.restart()
        pipe.send_bytes(pickle.dumps((True, function(here, *args))))
        while not pipe.poll(1.0) and os.getppid() == parent:
            pass  # keep connections: messages to peers may be in flight
        dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        pipe.close()
        sys.stdout.flush()
        os._exit(0)
