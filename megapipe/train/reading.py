"""Samples are read in a thread of their own, a step ahead of their use."""

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
    """A thread that calls what it is given, one after the other. It begins with the first of them,
    and ends with this object or with the process.

    One thread for all steps, since to start one takes longer than a small step's samples do.
    """

    def __init__(self) -> None:
        self._wanted: _Wanted = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, read: Callable[[], T]) -> Future[T]:
        """Have `read` called; its result, or what it raises, is that of the future."""
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
    while (given := wanted.get()) is not None:
        future, read = given
        try:
            future.set_result(read())
        except BaseException as error:  # it belongs to whoever asks for the result
            future.set_exception(error)
        del given, future, read  # what they hold is not kept until the next
