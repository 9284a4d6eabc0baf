"""Verification and removal of checkpoints while training goes on.

A saved checkpoint is read back and its checksums are compared before any older one is removed. On
each rank a thread reads some of the files and then increments a counter in the rendezvous store,
without a collective, as in :mod:`megapipe.checkpoint.async_save`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from megapipe.checkpoint.async_save import LOOK_S, Counter
from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.storage import StorageLocation
from megapipe.checkpoint.writer import SaveGroup, described
from megapipe.errors import CheckpointError, StorageError


class AsyncVerify:
    """Verification of the checkpoint at `path` by all ranks of `group`; the constructor starts it.
    All ranks pass the same `path`, and share the rendezvous store `counter`. A path can be verified
    only once."""

    def __init__(self, path: StorageLocation, group: SaveGroup, counter: Counter) -> None:
        self.path = path
        self._group = group
        self._counter = counter
        self._checkpoint: Checkpoint | None = None
        self._problem = ""
        self._unread = ""
        self._read, self._all_have = threading.Event(), threading.Event()
        threading.Thread(target=self._look, name="checkpoint check", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether :meth:`finish` would not have to wait; always False on ranks other than 0."""
        return self._all_have.is_set()

    def finish(self) -> tuple[Checkpoint | None, str]:
        """Wait for the end of the verification. Return the checkpoint if it is intact and all its
        values are finite, else None and the reason. Collective. Raises StorageError on all ranks if
        one of them cannot read the checkpoint."""
        self._read.wait()
        if (unread := self._group.agree(self._unread or None)) is not None:
            raise StorageError(unread)
        problem = self._group.agree(self._problem or None)
        return (self._checkpoint, "") if problem is None else (None, problem)

    def _look(self) -> None:
        group = self._group
        try:
            self._checkpoint = Checkpoint.open_sound(self.path, group.rank, group.world, threads=1)
        except StorageError as error:
            self._unread = str(error)
        except CheckpointError as error:
            self._problem = str(error)
        except Exception as error:
            self._problem = f"{self.path}: rank {group.rank}: {described(error)}"
        self._read.set()
        key = f"megapipe/checked/{self.path}"
        with contextlib.suppress(Exception):  # the store is gone, with the job
            self._counter.add(key, 1)
            while group.rank == 0 and self._counter.add(key, 0) < group.world:
                time.sleep(LOOK_S)
            if group.rank == 0:
                self._all_have.set()


class AsyncRemoval:
    """Removal of checkpoints in a thread: it calls `remove`, a function that returns a line of text
    for each problem."""

    def __init__(self, remove: Callable[[], list[str]]) -> None:
        self._remove = remove
        self._problems: list[str] = []
        self._thread = threading.Thread(target=self._run, name="checkpoint removal", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> list[str]:
        """Wait for the end of the removal; return the lines about problems."""
        self._thread.join()
        return self._problems

    def _run(self) -> None:
        try:
            self._problems = self._remove()
        except Exception as error:
            self._problems = [f"older checkpoints are not removed: {described(error)}"]
