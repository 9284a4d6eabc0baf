"""A thread that reads samples one step before they are used."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Wanted = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class PrefetchThread:
    """A thread that calls functions, one after the other. It starts with the first call, and ends
    with this object or with the process.

    One thread serves all steps: starting a thread takes longer than reading a small step.
    """

    def __init__(self) -> None:
        self._wanted: _Wanted = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, read: Callable[[], T]) -> Future[T]:
        """Queue a call of `read`; the future receives its result or exception."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run, args=(self._wanted,), name="megapipe-reading", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._wanted.put, None)
        future: Future[T] = Future()
        self._wanted.put((future, read))
        return future


def _run(wanted: _Wanted) -> None:
    while (task := wanted.get()) is not None:
        future, read = task
        try:
            future.set_result(read())
        except BaseException as error:  # raised where the result is read
            future.set_exception(error)
        del task, future, read  # free them before waiting for the next
