"""Worlds of gloo processes for tests.

Processes come from a forkserver that has torch loaded, so a world of 8 starts in a fraction of a
second. A function runs on every rank with a :class:`World`; what it returns comes back in rank
order, and a failing rank's traceback becomes the caller's error.
"""

from __future__ import annotations

import datetime
import multiprocessing
import multiprocessing.connection
import os
import pickle
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from megapipe.distributed.mesh import Grid, ParallelMesh

PRELOAD = ("torch", "megapipe.testing", "megapipe.train.trainer")


class WorldError(AssertionError):
    """One or more ranks of a test world failed or did not end in time."""


GROUP_TIMEOUT_S = 30.0


class World:
    """One rank's view of a test world, given to the function that it runs."""

    def __init__(self, rank: int, size: int, store: Store) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._lives = 0

    def restart(self) -> None:
        """Give up all process groups and start anew.

        The keys of each life are its own: groups of the same ranks would otherwise find the
        addresses of their dead namesakes in the store.
        """
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        self._lives += 1
        dist.init_process_group(
            "gloo",
            store=PrefixStore(f"life {self._lives}", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S),
        )

    def mesh(self, grid: Grid, device: str = "cpu") -> ParallelMesh:
        """A mesh over all ranks, in fresh process groups; several ranks may share a GPU."""
        self.restart()
        return ParallelMesh(grid, device=torch.device(device), timeout_s=GROUP_TIMEOUT_S)


def run_world(
    world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Run `function(World, *args)` on `world` processes; returns their results by rank.

    `function` and `args` must be picklable (a function at module level). Raises
    :class:`WorldError` with the tracebacks of the ranks that failed; the others are killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main, args=(rank, world, store.port, theirs, function, args), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _collect(pipes, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.join(timeout=1.0)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(pipes: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = dict(enumerate(pipes))
    while waiting:
        ready = multiprocessing.connection.wait(
            list(waiting.values()), timeout=max(0.0, deadline - time.monotonic())
        )
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
                )  # tensors by value: the rank may be gone
            except EOFError:
                ok, value = False, "died without a word"
            (results if ok else failures)[rank] = value
        if failures:
            # peers of a failed rank fail soon after it, with less to say
            deadline = min(deadline, time.monotonic() + 2.0)
    if failures:
        text = "\n".join(f"--- rank {rank}:\n{failures[rank]}" for rank in sorted(failures))
        raise WorldError(text)
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    rank: int, world: int, port: int, pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        store = TCPStore("127.0.0.1", port, is_master=False)
        here = World(rank, world, store)
        here.restart()
        pipe.send_bytes(pickle.dumps((True, function(here, *args))))
        dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        pipe.close()
        os._exit(0)
