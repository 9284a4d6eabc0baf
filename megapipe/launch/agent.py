"""torchrun's agent, which tells all nodes at once where a rank of its own has failed."""

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

from megapipe.launch.forks import ForkServer
from megapipe.launch.ranks import exit_code
from megapipe.launch.rendezvous import of_ranks
from megapipe.launch.shutdown import FAILED, claim
from megapipe.util.answers import NoAnswer, call_with_timeout

ANSWER_S = 0.5
"""How long the store may take to answer; without an answer a job goes on to end, or to start again.
"""
LOOK_S = 0.25
"""How long the thread that waits for a failure may take to notice that the ranks have ended."""
HANDLER = "get_subprocess_handler"
"""The function of torch's module that starts a process for an agent, which has no other way in."""


class Agent(LocalElasticAgent):
    """An agent whose ranks meet as :mod:`megapipe.launch.rendezvous` says.

    A rank that is killed, or fails before it has met the others, says nothing to those of other
    nodes, so this claims its failure. The rank's neighbours, which torchrun's agent is about to ask
    to stop, then know why.
    """

    def __init__(
        self, *given: Any, handed_on: Container[int], forks: ForkServer | None, **more: Any
    ) -> None:
        super().__init__(*given, **more)
        self._forks = forks
        self.before: int | None = None
        """The exit code of a failure that another process has claimed before a rank failed here."""
        self.has_noticed = False
        """Whether it knows that a rank has failed here; from then on it asks the store no more."""
        self._handed_on = handed_on
        self._heard: list[int] = []
        """The exit code of the job's failure, once there is one."""
        self._alone = threading.Event()
        """Set when the store is gone, and with it the node that hosts it."""
        self._over = threading.Event()
        self._ear: threading.Thread | None = None

    def run(self, *given: Any) -> RunResult:
        try:
            return super().run(*given)
        finally:
            self._over.set()
            if self._ear is not None:
                self._ear.join(LOOK_S + ANSWER_S)  # no thread may come out of C++ at Python's end

    @property
    def has_failed(self) -> bool:
        """Whether the job has on another node, as far as is known."""
        return bool(self._heard) or self._alone.is_set()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if (worker_group.group_world_size or 1) > 1:  # nodes
            store = _store(worker_group)
            with contextlib.suppress(DistError, NoAnswer):
                own = call_with_timeout(ANSWER_S, store.clone)  # type: ignore[attr-defined]
                self._ear = threading.Thread(target=self._hear, args=(own,), daemon=True)
                self._ear.start()
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
        """Claim a failure, unless the rank ended by a signal that was handed on to it."""
        self.before = next(iter(self._heard), None)
        if self.before is None and code - 128 not in self._handed_on:
            store = _store(worker_group)
            try:
                self.before = call_with_timeout(ANSWER_S, lambda: claim(store, code))
            except DistError:
                pass
            except NoAnswer:
                self._ear = None  # in C++ it waits for the same store

    def _hear(self, store: Store) -> None:
        """Wait for a failure of the job while it runs, over a connection of its own: the store may
        answer nobody."""
        while not self._over.is_set():
            try:
                store.wait([FAILED], datetime.timedelta(seconds=LOOK_S))
                self._heard.append(int(store.get(FAILED)))
                return
            except DistStoreError:
                pass
            except DistError:
                self._alone.set()
                return


def _store(worker_group: WorkerGroup) -> Store:
    """That of the ranks."""
    assert isinstance(worker_group.store, PrefixStore)
    return of_ranks(worker_group.store.underlying_store)
