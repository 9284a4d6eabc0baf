"""Looking at a checkpoint, and removing others, while training goes on.

What was saved is read again and its checksums compared before anything older goes: on each rank a
thread reads its share of the files and counts itself in the rendezvous store, without a collective,
as in :mod:`megapipe.checkpoint.background`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from megapipe.checkpoint.background import LOOK_S, Counter
from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.storage import StorageLocation
from megapipe.checkpoint.writer import SaveGroup, described
from megapipe.errors import CheckpointError, StorageError


class AsyncVerify:
    """A look at the checkpoint at `path` by all ranks of `group`, which begins at once; `counter`
    is a store that they reach. One checkpoint is looked at once, and has the same path on all."""

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
        """Whether :meth:`finish` would wait for nothing, as rank 0 knows; False on all others."""
        return self._all_have.is_set()

    def finish(self) -> tuple[Checkpoint | None, str]:
        """Wait for the end; the checkpoint if it is whole and its values are finite, else why not.
        Collective: every rank calls it. Raises StorageError on all where a rank cannot read it."""
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
        key = f"megapipe/looked at/{self.path}"
        with contextlib.suppress(Exception):  # the store is gone, with the job
            self._counter.add(key, 1)
            while group.rank == 0 and self._counter.add(key, 0) < group.world:
                time.sleep(LOOK_S)
            if group.rank == 0:
                self._all_have.set()


class AsyncRemoval:
    """A removal in a thread, `remove`, which returns a line for each problem."""

    def __init__(self, remove: Callable[[], list[str]]) -> None:
        self._remove = remove
        self._problems: list[str] = []
        self._thread = threading.Thread(target=self._run, name="checkpoint removal", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> list[str]:
        """Wait for the end; returns the problems."""
        self._thread.join()
        return self._problems

    def _run(self) -> None:
        try:
            self._problems = self._remove()
        except Exception as error:
            self._problems = [f"older checkpoints are not removed: {described(error)}"]
