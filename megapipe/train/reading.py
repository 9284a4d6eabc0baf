"""Samples are read in a thread of their own, a step ahead of their use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Reading(Generic[T]):
    """Calls `read` in a thread, which ends with it or with the process."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="megapipe-reading", daemon=True)
        self._thread.start()

    def result(self) -> T:
        """The result of `read`, once it is there. Raises what that has raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found[0]

    def _run(self) -> None:
        try:
            self._found.append(self._read())
        except BaseException as error:  # it belongs to whoever asks for the result
            self._error = error
