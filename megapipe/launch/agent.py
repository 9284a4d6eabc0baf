"""torchrun's agent, extended to tell all nodes as soon as a local rank has failed."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Container
from typing import Any

from torch.distributed import DistError, DistStoreError, PrefixStore, Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api

from megapipe.launch.fork_server import ForkServer
from megapipe.launch.rank_reaper import exit_code
from megapipe.launch.rendezvous import of_ranks
from megapipe.launch.shutdown import FAILED, claim
from megapipe.util.timeouts import NoAnswer, call_with_timeout

ANSWER_S = 0.5
"""Seconds that the store may take to answer. Without an answer the job still ends or restarts."""
LOOK_S = 0.25
"""Seconds within which the thread that waits for a failure notices that the ranks have ended."""
HANDLER = "get_subprocess_handler"
"""Name of the function in torch's module ``api`` that starts a rank. The agent replaces it for the
time of a start, as torch has no hook."""


class Agent(LocalElasticAgent):
    """torchrun's agent for ranks that meet as :mod:`megapipe.launch.rendezvous` describes.

    A rank that is killed, or that fails before it has met the others, cannot tell other nodes. The
    agent then claims the failure in the store for that rank. So the other local ranks, which
    torchrun's agent is about to stop, know why they end.
    """

    def __init__(
        self, *arguments: Any, handed_on: Container[int], forks: ForkServer | None, **more: Any
    ) -> None:
        super().__init__(*arguments, **more)
        self._forks = forks
        self.before: int | None = None
        """Exit code of a failure that another process claimed first; None if there is none."""
        self.has_noticed = False
        """Whether the agent has noticed a local rank's failure. Only the first one is claimed."""
        self._handed_on = handed_on
        self._failure_codes: list[int] = []
        """Exit code of the job's first failure; empty until a failure is known."""
        self._alone = threading.Event()
        """Event that is set when the store is lost, because the node that hosts it is lost."""
        self._over = threading.Event()
        self._failure_thread: threading.Thread | None = None

    def run(self, *arguments: Any) -> RunResult:
        try:
            return super().run(*arguments)
        finally:
            self._over.set()
            if self._failure_thread is not None:
                # no thread may return from C++ at Python's end
                self._failure_thread.join(LOOK_S + ANSWER_S)

    @property
    def has_failed(self) -> bool:
        """Whether this agent knows that a process has claimed a failure of the job, or that the
        store's node is lost."""
        return bool(self._failure_codes) or self._alone.is_set()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if (worker_group.group_world_size or 1) > 1:  # number of nodes
            store = _store(worker_group)
            with contextlib.suppress(DistError, NoAnswer):
                own = call_with_timeout(ANSWER_S, store.clone)  # type: ignore[attr-defined]
                self._failure_thread = threading.Thread(
                    target=self._await_failure, args=(own,), daemon=True
                )
                self._failure_thread.start()
        started: dict[int, Any]
        if self._forks is None:
            started = super()._start_workers(worker_group)
            return started
        before = getattr(api, HANDLER)
        setattr(api, HANDLER, self._forks.handler)
        try:
            started = super()._start_workers(worker_group)
        finally:
            setattr(api, HANDLER, before)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = (exit_code(worker.id) for worker in worker_group.workers)
        code = next((code for code in codes if code), None)
        if code is not None and not self.has_noticed:
            self.has_noticed = True
            self._claim(code, worker_group)
        return super()._monitor_workers(worker_group)

    def _claim(self, code: int, worker_group: WorkerGroup) -> None:
        """Claim a local rank's failure, unless the rank was ended by a signal that the launcher has
        passed on. Remember an earlier claim of another process."""
        self.before = next(iter(self._failure_codes), None)
        if self.before is None and code - 128 not in self._handed_on:
            store = _store(worker_group)
            try:
                self.before = call_with_timeout(ANSWER_S, lambda: claim(store, code))
            except DistError:
                pass
            except NoAnswer:
                # the thread waits for the same store in C++: do not join it
                self._failure_thread = None

    def _await_failure(self, store: Store) -> None:
        """Wait until any process claims a failure. `store` is a separate connection: a request on
        it may block for ever."""
        while not self._over.is_set():
            try:
                store.wait([FAILED], datetime.timedelta(seconds=LOOK_S))
                self._failure_codes.append(int(store.get(FAILED)))
                return
            except DistStoreError:
                pass
            except DistError:
                self._alone.set()
                return


def _store(worker_group: WorkerGroup) -> Store:
    """Return the ranks' TCP store, without torchrun's key prefix."""
    assert isinstance(worker_group.store, PrefixStore)
    return of_ranks(worker_group.store.underlying_store)
